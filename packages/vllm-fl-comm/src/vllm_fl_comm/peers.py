"""Processes of the other ranks, as far as this host can see them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Peer"]

_PROC = Path("/proc")
_ENDED = ("Z", "X")  # a process that has ended and whose parent has not asked for its status yet


@dataclass(frozen=True)
class Peer:
    """A rank's process; plain data, so that ranks can send it to one another.

    Args:
        rank: in the group.
        host: the same text for processes that can see one another, and for no others.
        pid: process id on that host.
        started: clock ticks after the host's start, which tells the process from a later one of the same id.
    """

    rank: int
    host: str
    pid: int
    started: int

    @classmethod
    def here(cls, rank: int) -> Peer:
        """This process, as the rank `rank`."""
        found = _status(os.getpid())
        return cls(rank, _host(), os.getpid(), found[1] if found else 0)

    def is_visible(self) -> bool:
        """Whether this process can tell if that one ends: it runs on the same host, and /proc shows it."""
        return self.started > 0 and self.host == _host() and not self._is_gone()

    def has_ended(self) -> bool:
        """Whether the process has ended; only to be asked of one that was visible."""
        return self._is_gone()

    def _is_gone(self) -> bool:
        found = _status(self.pid)
        return found is None or found[0] in _ENDED or found[1] != self.started

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"


def _status(pid: int) -> tuple[str, int] | None:
    """(state, start) from ``/proc/PID/stat``, fields 3 and 22 of proc(5); the second field may hold spaces."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _host() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
