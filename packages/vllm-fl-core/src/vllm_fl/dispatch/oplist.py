"""The oplist: a file that records which implementation served each operator, one line at the first use of each.

``FLAGGEMS_ENABLE_OPLIST_PATH`` names the file. Each rank but the first has a file of its own, with ``.rankN`` before
the suffix. Lines are appended. Functions of ATen that FlagGems replaces are not in it.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import BinaryIO

from vllm_fl.errors import ConfigError
from vllm_fl.logging import get_logger

from . import forks

_rank: int | None = None


def set_rank(rank: int) -> None:
    """The rank of this process, for those that have no RANK or LOCAL_RANK in the environment (vLLM's workers)."""
    global _rank
    _rank = rank


def current_rank() -> int:
    """The rank that was set, else RANK, else LOCAL_RANK, else 0."""
    if _rank is not None:
        return _rank
    for name in ("RANK", "LOCAL_RANK"):
        text = os.environ.get(name, "")
        if text.strip().isdigit():
            return int(text)
    return 0


class OpList:
    """The writer of one process."""

    def __init__(self, path: Path, origin: str) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._origin = origin
        self._rank: int | None = None
        self._seen: set[tuple[str, str]] = set()
        self._broken = False
        forks.reset_in_child(self)

    def record(self, op_name: str, impl_id: str) -> None:
        """Write the line of (operator, implementation) unless it has been. A failure is reported once, never raised."""
        with self._lock:
            rank = current_rank()
            if rank != self._rank:
                self._rank, self._broken, self._seen = rank, False, set()
            if self._broken or (op_name, impl_id) in self._seen:
                return
            self._seen.add((op_name, impl_id))
            try:
                with open_private(self.path(rank)) as file:
                    # One write a line: lines of several processes do not mix.
                    file.write(f"[DEBUG] vllm_fl.dispatch.ops.{op_name}: {impl_id}\n".encode())
            except (OSError, ConfigError) as error:
                self._broken = True
                get_logger(__name__).warning("%s: no oplist is written: %s", self._origin, error)

    def path(self, rank: int) -> Path:
        """The file of a rank."""
        return self._path if rank == 0 else self._path.with_suffix(f".rank{rank}{self._path.suffix}")

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._rank = None


def open_private(path: Path) -> BinaryIO:
    """Open `path` for appending; create it, readable by the owner alone, if it is not there.

    Raises:
        ConfigError: it is a link, or not a plain file, or belongs to someone else, or has a second name. In a directory
            that others can write to, such a file may have been put there to have something else overwritten.
        OSError: it cannot be opened.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o600)
    except OSError as error:
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link, which is not followed; name the file itself") from error
        raise
    problem = _objection(os.fstat(fd))
    if problem:
        os.close(fd)
        raise ConfigError(f"{path} {problem}; remove it or name another file")
    return open(fd, "ab", buffering=0)


def _objection(status: os.stat_result) -> str | None:
    if not stat.S_ISREG(status.st_mode):
        return "is not a plain file"
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    if status.st_nlink != 1:
        return f"has {status.st_nlink} names (hard links)"
    return None
