"""Operators behind torch.library, for implementations that torch.compile must not trace.

One custom operator ``vllm_fl::NAME`` serves all opaque implementations of an operator: while Dynamo traces, the call
is recorded as it; when the graph runs, its body dispatches as an eager call does. Schema, written arguments and meta
function are the specification's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from vllm_fl.catalog import OpSpec
from vllm_fl.errors import RegistrationError

from . import forks
from .bound import BoundOp
from .links import Call
from .tracing import runs_while_tracing

NAMESPACE = "vllm_fl"
_SINGLE = {"None": "()", "Tensor": "Tensor"}


def schema_of(spec: OpSpec) -> str:
    """The ``torch.library`` schema of an operator, without its name.

    It is the specification's, with symbolic integers, and with the results spelled out where their number is fixed:
    PyTorch does not functionalise an operator that both writes an argument and returns a list.

    Raises:
        RegistrationError: a parameter or the result is of a type that torch.library does not know.
    """
    try:
        arguments = spec.schema.rpartition(" -> ")[0]
    except KeyError as error:
        raise RegistrationError(f"{spec}: a parameter of type {error} cannot be behind torch.library") from None
    returns = _returns(spec)
    if returns == "Tensor[]" and spec.mutates:
        raise RegistrationError(f"{spec}: it writes arguments and the number of its results varies; fix the number")
    symbolic = re.sub(r"\bint\b", "SymInt", arguments)
    return f"{symbolic} -> {returns}"


def _returns(spec: OpSpec) -> str:
    text = str(spec.signature.return_annotation).replace("torch.", "")
    if text in _SINGLE:
        return _SINGLE[text]
    fixed = re.fullmatch(r"tuple\[(Tensor(?:, Tensor)*)\]", text)
    if fixed:
        return f"({fixed[1]})"
    if re.fullmatch(r"(Tensor|tuple\[Tensor(, (Tensor|\.\.\.))*\]|list\[Tensor\])( \| (Tensor|tuple\[[^]]*\]))*", text):
        return "Tensor[]"
    raise RegistrationError(f"{spec}: a result of type {text} cannot be behind torch.library")


class OpaqueOp:
    """The custom operator of one bound operator; defined when it is first needed."""

    def __init__(self, spec: OpSpec, name: str, look: Callable[[], Call]) -> None:
        self.name = name
        self.op: Any = None
        self._look = look
        self._spec = spec
        self._returns = schema_of(spec).rpartition(" -> ")[2]

    def define(self) -> None:
        """Define the operator, once."""
        with _definitions.lock:
            if self.op is not None:
                return
            import torch

            library = _definitions.library = _definitions.library or torch.library.Library(NAMESPACE, "FRAGMENT")
            library.define(f"{self.name}{schema_of(self._spec)}")
            library.impl(self.name, self._run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._fake, lib=library)
            self.op = getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def make_call(self) -> Callable[..., Any]:
        """A function with the operator's arguments and results, which Dynamo records as the custom operator."""

        @runs_while_tracing
        def define() -> None:
            self.define()

        listed = self._returns == "Tensor[]"

        def call(*args: Any, **kwargs: Any) -> Any:
            define()
            result = self.op(*args, **kwargs)
            if not listed:
                return result
            return result[0] if len(result) == 1 else tuple(result)

        return call

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._packed(self._look()(*args, **kwargs), [*args, *kwargs.values()])

    def _fake(self, *args: Any, **kwargs: Any) -> Any:
        return self._packed(self._spec.fake(*args, **kwargs), [])

    def _packed(self, result: Any, inputs: list[Any]) -> Any:
        """`result` as the schema has it; an input among the results is copied, since graphs assume fresh results."""
        if self._returns == "()":
            return None
        results = [result] if not isinstance(result, (list, tuple)) else list(result)
        storages = {value.untyped_storage()._cdata for value in inputs if hasattr(value, "untyped_storage")}
        if storages:
            results = [r.clone() if r.untyped_storage()._cdata in storages else r for r in results]
        if self._returns == "Tensor":
            return results[0]
        return results if self._returns == "Tensor[]" else tuple(results)


class _Definitions:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.library: Any = None
        self.names: set[str] = set()
        forks.reset_in_child(self)

    def after_fork_in_child(self) -> None:
        self.lock = threading.RLock()


_definitions = _Definitions()


def opaque_op(bound: BoundOp, spec: OpSpec, look: Callable[[], Call]) -> OpaqueOp:
    """The custom operator of `bound`: the same object each time. `look` says what serves the operator.

    That of the default manager has the operator's name, which compiled graphs on disk refer to; those of other managers
    of the process get a number.
    """
    with _definitions.lock:
        known = bound.opaque
        if isinstance(known, OpaqueOp):
            return known
        names = (f"{spec.name}_{n}" if n else spec.name for n in count(0 if bound.is_default else 2))
        name = next(name for name in names if name not in _definitions.names)
        _definitions.names.add(name)
        bound.opaque = made = OpaqueOp(spec, name, look)
        return made
