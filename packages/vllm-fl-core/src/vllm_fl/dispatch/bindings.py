"""The bound operators of a manager and the table of ``call``: two views of what serves each operator."""

from __future__ import annotations

from collections.abc import Callable

from .bound import BoundOp, deferred
from .links import Call

Find = Callable[[str], Call]


class Bindings:
    """Points bound operators at functions. The manager's lock guards every change.

    Args:
        find: selects and installs, at the first call of an operator.
        look: selects, and leaves the binding as it is.
    """

    def __init__(self, find: Find, look: Find) -> None:
        self.bound: dict[str, BoundOp] = {}
        self.table: dict[str, Call] = {}
        self.pickle: Callable[[str], BoundOp] | None = None
        #: Operators that point at something else than a deferred function.
        self.installed: set[str] = set()
        self._find = find
        self._look = look

    def bind(self, op_name: str) -> BoundOp:
        """The bound operator; a new one points at a deferred function."""
        bound = self.bound.get(op_name)
        if bound is None:
            bound = self.bound.setdefault(op_name, BoundOp(op_name, self._deferred(op_name), self.pickle))
            self.table.setdefault(op_name, bound.fn)
        return bound

    def install(self, op_name: str, fn: Call) -> Call:
        """Let `fn` serve an operator."""
        self._point(op_name, fn)
        self.installed.add(op_name)
        return fn

    def install_lookup(self, op_name: str) -> Call:
        """Let each call of an operator ask which function serves it in its context.

        It is always a new function: by it compiled code tells that the context may be another one.
        """
        return self.install(op_name, deferred(lambda: self._look(op_name), lambda: self._look(op_name)))

    def defer(self, op_name: str) -> None:
        """Let the next call of an operator select afresh."""
        self._point(op_name, self._deferred(op_name))
        self.installed.discard(op_name)

    def adopt(self, bound: dict[str, BoundOp], table: dict[str, Call], pickle: Callable[[str], BoundOp]) -> None:
        """Serve these bound operators, and keep the functions in `table` up to date.

        Raises:
            ValueError: there are bound operators already.
        """
        if self.bound:
            raise ValueError("a manager that has been used cannot become the default one")
        self.bound, self.table, self.pickle = bound, table, pickle

    def disown(self) -> None:
        """Leave the bound operators to another manager."""
        self.bound, self.table = {}, {}
        self.installed.clear()

    def _deferred(self, op_name: str) -> Call:
        return deferred(lambda: self._find(op_name), lambda: self._look(op_name))

    def _point(self, op_name: str, fn: Call) -> None:
        bound = self.bound.get(op_name) or self.bound.setdefault(op_name, BoundOp(op_name, fn, self.pickle))
        bound.fn = self.table[op_name] = fn
