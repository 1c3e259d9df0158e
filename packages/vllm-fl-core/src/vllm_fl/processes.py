"""Other processes of this host, as ``/proc`` shows them (proc(5)); where there is no ``/proc``, nothing is known."""

from __future__ import annotations

from pathlib import Path

__all__ = ["catches", "owner", "started"]

_PROC = Path("/proc")
_ENDED = ("Z", "X")  # ended, and the parent has not asked for its status yet


def started(pid: int) -> int | None:
    """When a process was started, in clock ticks after the host's start; None if it has ended or cannot be seen.

    It tells the process from a later one of the same id.
    """
    text = _read(pid, "stat")
    # The second field, the command, may hold spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return int(fields[19]) if fields and fields[0] not in _ENDED else None


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler of the signal `number`, of Python or of a compiled library."""
    mask = _status(pid, "SigCgt")
    return bool(int(mask or "0", 16) >> (number - 1) & 1)


def owner(pid: int) -> int | None:
    """The effective user id of a process, to which its files belong; None if it cannot be seen."""
    ids = _status(pid, "Uid").split()
    return int(ids[1]) if ids else None


def _status(pid: int, field: str) -> str:
    for line in _read(pid, "status").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return value.strip()
    return ""


def _read(pid: int, file: str) -> str:
    try:
        return (_PROC / str(pid) / file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
