"""What the C interfaces of both libraries share (plugins/include/tokenweave/tokenweave.h), without torch."""

from __future__ import annotations

import ctypes

from trtllm_tokenweave.errors import TokenWeaveError

MESSAGE_BYTES = 512
OK, INVALID_ARGUMENT, UNSUPPORTED = 0, 1, 2
RANKS_DISAGREE, TIMEOUT = 6, 7


class Status(ctypes.Structure):
    """TwStatus."""

    _fields_ = (("code", ctypes.c_int32), ("message", ctypes.c_char * MESSAGE_BYTES))


class LibraryError(TokenWeaveError):
    """A C function's code and message."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.message.decode(errors="replace"))
        self.code: int = status.code
