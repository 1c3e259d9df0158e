"""Processes of the other ranks, as far as this host can see them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from vllm_fl.processes import started

__all__ = ["Peer"]


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
        return cls(rank, _host(), os.getpid(), started(os.getpid()) or 0)

    def is_visible(self) -> bool:
        """Whether this process can tell if that one ends: it runs on the same host, and /proc shows it."""
        return self.started > 0 and self.host == _host() and not self.has_ended()

    def has_ended(self) -> bool:
        """Whether the process has ended; only to be asked of one that was visible."""
        return started(self.pid) != self.started

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
