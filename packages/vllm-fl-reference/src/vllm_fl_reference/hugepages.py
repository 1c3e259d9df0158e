"""Large pages under large allocations.

A decode step reads every weight once. Through pages of 4 KiB a processor then spends much of its time on address
translation; Linux gives 2 MiB pages to memory that asks for them.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from vllm_fl.logging import get_logger

__all__ = ["advise", "use_huge_pages"]

_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # <linux/mman.h>; the second since Linux 6.1
_MAPS = Path("/proc/self/maps")


def use_huge_pages(minimum: int = 8 << 20) -> int:
    """Ask for 2 MiB pages under every private anonymous mapping of at least `minimum` bytes of this process.

    What is there already is moved into them, three seconds a GiB. Does nothing where the system says no
    (``/sys/kernel/mm/transparent_hugepage/enabled`` is ``never``), or elsewhere than on Linux. On a kernel that cannot
    collapse pages at once, they come in the background.

    Returns:
        Bytes that now lie, or may come to lie, in large pages.
    """
    if not sys.platform.startswith("linux"):
        return 0
    size = 0
    for start, length in _large_mappings(minimum):
        if advise(start, length, _MADV_HUGEPAGE):
            advise(start, length, _MADV_COLLAPSE)
            size += length
    get_logger(__name__).debug("asked for large pages under %d MiB", size >> 20)
    return size


def advise(start: int, length: int, advice: int) -> bool:
    """``madvise(2)`` on whole pages; whether the system took the advice."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(start, length, advice) == 0)


def _large_mappings(minimum: int) -> list[tuple[int, int]]:
    """(start, length) of the whole large pages in writable, private mappings that belong to no file."""
    found = []
    for line in _MAPS.read_text().splitlines():
        span, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions != "rw-p" or inode != "0" or (name and name[0] != "[heap]"):
            continue
        low, high = (int(part, 16) for part in span.split("-"))
        start, end = -(-low // _PAGE) * _PAGE, high // _PAGE * _PAGE
        if end - start >= minimum:
            found.append((start, end - start))
    return found
