"""Files mapped into memory, with no descriptor that stays open for each: Python's own `mmap` keeps one, and a process may have few."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any, Final

__all__ = ["map_privately"]

_NO_RESERVE: Final = 0x4000 if os.name == "posix" and os.uname().sysname == "Linux" else 0
"""MAP_NORESERVE: what is mapped to be written counts as memory that may be needed, and files may be larger than that."""


def map_privately(descriptor: int) -> Any:
    """The whole of a file as a buffer, mapped to be read, and written to in copies of its pages that are this process's alone.

    It is unmapped with the last reference to the buffer. Raises OSError where the system refuses, and ValueError for an empty file.
    """
    if os.name != "posix":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    nbytes = os.fstat(descriptor).st_size
    if nbytes == 0:
        raise ValueError("an empty file cannot be mapped")
    library = ctypes.CDLL(None, use_errno=True)
    map_file, unmap = library.mmap, library.munmap
    map_file.restype = ctypes.c_void_p
    map_file.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = map_file(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    # At the end of the process tensors may still lie there.
    weakref.finalize(buffer, unmap, address, nbytes).atexit = False
    return buffer
