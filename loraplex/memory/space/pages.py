"""Pages of memory given back to the operating system."""

from __future__ import annotations

import ctypes
import mmap
import sys


def release_pages(address: int, nbytes: int) -> int:
    """Drop the whole pages inside [address, address + nbytes): they hold zeros, and cost nothing until they are written again.

    Returns the bytes dropped; 0 where the system is not Linux or refuses. The memory must be private and writable.
    """
    if not sys.platform.startswith("linux"):
        return 0
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    is_refused = libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))
    return 0 if is_refused else length
