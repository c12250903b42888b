"""TensorRT as far as a build that TensorRT-LLM drives asks this package for it: versions and enumerations."""

from __future__ import annotations

import enum
from types import SimpleNamespace

__version__ = "10.9.0"


class NetworkDefinitionCreationFlag(enum.IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased")
