"""The default manager of the process, and the functions that use it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from vllm_fl.catalog import CATALOG

from . import forks
from .bound import BoundOp, deferred
from .links import Call

if TYPE_CHECKING:
    from .manager import OpManager


class _Default:
    """Holds the manager. Bound operators outlive it: after a reset they serve the next one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.manager: OpManager | None = None
        self.bound: dict[str, BoundOp] = {}
        forks.reset_in_child(self)

    def after_fork_in_child(self) -> None:
        self.lock = threading.RLock()


def get_default_manager() -> OpManager:
    """The manager of this process; made at the first call."""
    manager = _default.manager
    if manager is None:
        with _default.lock:
            manager = _default.manager
            if manager is None:
                from .manager import OpManager

                manager = OpManager()
                manager.adopt(_default.bound, _table, bind)
                _default.manager = manager
    return manager


def adopt_default_manager(manager: OpManager) -> None:
    """Make `manager`, which has not been used yet, the default one. Bound operators go through it from now on.

    Raises:
        ValueError: it has been used.
    """
    with _default.lock:
        reset_default_manager()
        manager.adopt(_default.bound, _table, bind)
        _default.manager = manager


def reset_default_manager() -> None:
    """Drop the default manager and its registry; the next use makes a new one. Bound operators stay valid."""
    with _default.lock:
        if _default.manager is not None:
            _default.manager.disown()
            _default.manager = None
        _table.clear()
        for name in {*CATALOG, *_default.bound}:
            fn = _deferred(name)
            _table[name] = fn
            if name in _default.bound:
                _default.bound[name].fn = fn


def bind(op_name: str) -> BoundOp:
    """The operator of the default manager, as an object to keep at the call site; call its ``fn``.

    May be called while a module is imported: nothing is resolved, and a wrong name is an error of the first call.
    """
    bound = _default.bound.get(op_name)
    return bound or _default.bound.setdefault(op_name, BoundOp(op_name, _deferred(op_name), bind))


def call_op(op_name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call an operator of the default manager.

    Raises:
        UnknownOperatorError: there is no such operator.
        NoImplementationError: no implementation is available, wanted and able to take the arguments.
        TypeError: the arguments do not fit the operator's signature.
    """
    try:
        fn = _table[op_name]
    except KeyError:
        fn = get_default_manager().find(op_name)
    if kwargs:
        return fn(*args, **kwargs)
    return fn(*args)


def resolve_op(op_name: str) -> Call:
    """The function of the implementation that the default manager has chosen."""
    return get_default_manager().resolve(op_name)


def _deferred(op_name: str) -> Call:
    return deferred(lambda: get_default_manager().find(op_name), lambda: get_default_manager().look(op_name))


_default = _Default()
#: Operator to the function that serves it; the catalogue's are there from the start, so that Dynamo misses no key.
_table: dict[str, Call] = {}
reset_default_manager()
