"""Pages of memory that is said to be read-only."""

from __future__ import annotations

import ctypes
import os

GRANULE = 2 << 20


ADD_SEALS, GET_SEALS = 1033, 1034


_libc = ctypes.CDLL(None, use_errno=True)


class Pages:
    """A page of an array, given to a pipe by vmsplice: pinned until it is read, as by a read with O_DIRECT."""

    def __init__(self, address: int) -> None:
        self.reader, self.writer = os.pipe()
        vector = (ctypes.c_size_t * 2)(address, 4096)
        if _libc.vmsplice(self.writer, vector, ctypes.c_ulong(1), ctypes.c_uint(0)) != 4096:
            raise OSError(ctypes.get_errno(), "vmsplice")

    def let_go(self) -> None:
        if self.reader >= 0:
            os.read(self.reader, 4096)
            os.close(self.reader)
            os.close(self.writer)
            self.reader = -1
