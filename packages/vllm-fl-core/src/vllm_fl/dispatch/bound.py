"""Bound operators: the object that a call site keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .links import Call
from .tracing import is_compiling, runs_while_tracing


class BoundOp:
    """An operator of one manager, ready to be called.

    Keep it for as long as you like: the manager points ``fn`` at whatever serves the operator now. ``op.fn(...)`` is
    the cheapest call; ``op(...)`` is the same. The arguments are the operator's.
    """

    __slots__ = ("__weakref__", "_pickle", "fn", "name", "opaque")

    def __init__(self, name: str, fn: Call, pickle: Callable[[str], BoundOp] | None = None) -> None:
        self.name = name
        self.fn = fn
        self.opaque: Any = None  #: the custom operator of torch.library, once one is needed
        self._pickle = pickle

    @property
    def is_default(self) -> bool:
        """Whether it belongs to the default manager, whichever that is."""
        return self._pickle is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            return self.fn(*args, **kwargs)
        return self.fn(*args)

    def __repr__(self) -> str:
        return f"<BoundOp {self.name}>"

    def __copy__(self) -> BoundOp:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundOp:
        return self

    def __reduce__(self) -> tuple[Callable[[str], BoundOp], tuple[str]]:
        if self._pickle is None:
            raise TypeError(f"{self!r} belongs to a manager of this process; pickle the operator's name")
        return self._pickle, (self.name,)


class _Slot:
    __slots__ = ("fn",)

    fn: Call


def deferred(find: Callable[[], Call], look: Callable[[], Call]) -> Call:
    """A function that asks `find` at each call which function serves it.

    While Dynamo traces, `look` is asked instead. It is run and not traced, and what it returns is traced. It must leave
    the bound operator pointing here: Dynamo checks afterwards the path on which it came by what it traced.
    """
    slot = _Slot()

    @runs_while_tracing
    def look_while_tracing() -> None:
        slot.fn = look()

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            look_while_tracing()
            return slot.fn(*args, **kwargs)
        return find()(*args, **kwargs)

    return call
