from __future__ import annotations

import os

from . import _strict

__version__ = os.environ["TRTLLM_DOUBLE_VERSION"]

_strict.seal(__name__)
