"""What watches the calls of implementations: counters, the oplist, and watchers that wrap them.

Hooks and wrappers exist only while something watches: each change builds the plans anew.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

from . import forks
from .links import Call, Hook
from .oplist import OpList
from .tracing import runs_while_tracing
from .types import OpImpl


class Watcher(Protocol):
    """Takes part in the calls of implementations, for as long as a manager has it: a profiler, a comparison."""

    def around(self, impl: OpImpl, call: Call) -> Call:
        """A function to call in place of `call`, with the arguments that the implementation takes.

        torch.compile may trace it; see :func:`~vllm_fl.dispatch.tracing.is_compiling`.
        """


class Observers:
    """Counters, oplist and watchers of one manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counting = False
        self._counts: dict[tuple[str, str], int] = {}
        self._oplist: OpList | None = None
        self._watchers: tuple[Watcher, ...] = ()
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

    def watch(self, watcher: Watcher) -> None:
        self._watchers = (*self._watchers, watcher)

    def unwatch(self, watcher: Watcher) -> None:
        self._watchers = tuple(present for present in self._watchers if present is not watcher)

    def function(self, impl: OpImpl, call: Call) -> Call:
        """`call`, the implementation's function, inside whatever watches it."""
        for watcher in self._watchers:
            call = watcher.around(impl, call)
        return call

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
