"""TokenWeave for TensorRT-LLM engines.

Importing this package imports nothing heavy: modules load what they need when they are used.
"""

from __future__ import annotations

__version__ = "0.1.0"
