"""Threads of OpenMP across a fork.

GNU's OpenMP, which PyTorch computes with on a CPU, keeps its threads between two parallel regions. A forked child has
the list of them and not the threads: its first parallel region waits for ever. vLLM forks its engine from the user's
process, which may well have computed something before.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["make_forks_safe"]

_MAPS = Path("/proc/self/maps")
_PAUSE_SOFT = 1  # omp_pause_soft, OpenMP 5.0, section 3.2.44

_done = False


def make_forks_safe() -> None:
    """Let OpenMP give its threads up before each fork of this process; it makes new ones when it needs them."""
    global _done
    if _done or not sys.platform.startswith("linux"):
        return
    _done = True
    os.register_at_fork(before=_pause)


def _pause() -> None:
    for path in _gnu_openmp():
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:
            pause(_PAUSE_SOFT)


def _gnu_openmp() -> set[str]:
    """Paths of the copies of GNU's OpenMP that are loaded; Intel's and LLVM's see to forks themselves."""
    paths = (line.split(maxsplit=5)[-1] for line in _MAPS.read_text().splitlines() if "/" in line)
    return {path for path in paths if Path(path).name.startswith("libgomp")}
