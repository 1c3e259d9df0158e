"""What watches the calls of implementations: counters and the oplist. Hooks exist only while something watches."""

from __future__ import annotations

import threading
from pathlib import Path

from . import forks
from .links import Hook
from .oplist import OpList
from .tracing import runs_while_tracing


class Observers:
    """Counters and oplist of one manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counting = False
        self._counts: dict[tuple[str, str], int] = {}
        self._oplist: OpList | None = None
        forks.reset_in_child(self)

    def count(self, enabled: bool) -> None:
        with self._lock:
            self._counting = enabled
            if enabled:
                self._counts.clear()

    def counts(self) -> dict[tuple[str, str], int]:
        with self._lock:
            return dict(self._counts)

    def write_oplist(self, path: Path, origin: str) -> None:
        """Record first uses in `path`; `origin` says who asked for it."""
        if self._oplist is None:
            self._oplist = OpList(path, origin)

    def hooks(self, op_name: str, impl_id: str) -> tuple[Hook, ...]:
        """What is to be run after each call of an implementation; while Dynamo traces, once."""
        hooks: list[Hook] = []
        if self._counting:
            hooks.append(self._counter((op_name, impl_id)))
        if self._oplist is not None:
            hooks.append(_recorder(self._oplist, op_name, impl_id))
        return tuple(hooks)

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()

    def _counter(self, key: tuple[str, str]) -> Hook:
        @runs_while_tracing
        def count_one() -> None:
            with self._lock:
                self._counts[key] = self._counts.get(key, 0) + 1

        return count_one


def _recorder(oplist: OpList, op_name: str, impl_id: str) -> Hook:
    @runs_while_tracing
    def record() -> None:
        oplist.record(op_name, impl_id)

    return record
