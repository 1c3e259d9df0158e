"""The registry of implementations: checked when they come in, immutable to those who read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakSet

from vllm_fl.catalog import CATALOG, OpSpec
from vllm_fl.errors import FrozenError, RegistrationError, did_you_mean
from vllm_fl.logging import get_logger

from . import forks
from .parameters import check_function
from .types import OpImpl


def _empty() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class OpRegistrySnapshot:
    """The registry's content at one moment."""

    impls_by_op: Mapping[str, tuple[OpImpl, ...]] = field(default_factory=_empty)
    generation: int = 0


@dataclass(frozen=True)
class _State:
    impls: Mapping[str, tuple[OpImpl, ...]] = field(default_factory=_empty)
    specs: Mapping[str, OpSpec] = field(default_factory=_empty)
    owners: Mapping[tuple[str, str], str] = field(default_factory=_empty)
    sources: frozenset[str] = frozenset()
    generation: int = 0


class RegistryListener(Protocol):
    def registry_changed(self) -> None:
        """Called after each change, without any lock of the registry held."""


class OpRegistry:
    """Implementations by operator.

    Reading takes no lock and never sees half of a transaction of another thread. Writing is serialised.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._state = _State()
        self._draft: _State | None = None
        self._writer: int | None = None
        self._source = ""
        self._listeners: WeakSet[RegistryListener] = WeakSet()
        self._unspecified: set[str] = set()
        self._frozen: str | None = None
        forks.reset_in_child(self)

    def register_impl(self, impl: OpImpl) -> None:
        """Add one implementation.

        Raises:
            RegistrationError: its signature is not the operator's, or its impl_id is taken.
            FrozenError: the selection is frozen.
        """
        with self.transaction():
            self._add(impl)

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Add all of `impls`, or none if one of them is refused (see :meth:`register_impl`)."""
        with self.transaction():
            for impl in impls:
                self._add(impl)

    def register_spec(self, spec: OpSpec) -> None:
        """Add an operator that the catalogue does not have.

        Raises:
            RegistrationError: the operator has a specification already, or an implementation that does not fit.
        """
        with self.transaction():
            state = self._view()
            if spec.name in CATALOG:
                raise RegistrationError(
                    f"operator {spec.name!r} is the catalogue's: {CATALOG[spec.name]}; rename yours"
                )
            if state.specs.get(spec.name, spec) != spec:
                raise RegistrationError(
                    f"operator {spec.name!r} has a specification already: {state.specs[spec.name]}; rename yours"
                )
            for impl in state.impls.get(spec.name, ()):
                _check_signature(spec, impl)
            self._draft = replace(state, specs=MappingProxyType({**state.specs, spec.name: spec}))

    def clear(self) -> None:
        """Remove everything."""
        with self.transaction():
            self._draft = _State(generation=self._view().generation)

    @contextmanager
    def transaction(self, source: str = "") -> Iterator[None]:
        """All that the block registers, or nothing if it raises; other threads see it all at once.

        Args:
            source: who registers, for messages and for :meth:`has_source`.
        """
        with self._lock:
            outer, outer_source = self._draft, self._source
            if outer is None:
                self._refuse_if_frozen()
            self._draft, self._writer = outer or self._state, threading.get_ident()
            self._source = source or outer_source
            try:
                yield
                done: _State = self._draft
                if source:
                    done = replace(done, sources=done.sources | {source})
                self._draft = done if outer is not None else None
                if outer is None:
                    self._commit(done)
            except BaseException:
                self._draft = outer
                raise
            finally:
                self._source = outer_source
                if outer is None:
                    self._writer = None
        if outer is None:
            for listener in list(self._listeners):
                listener.registry_changed()

    @property
    def generation(self) -> int:
        """Grows with each change."""
        return self._view().generation

    def snapshot(self) -> OpRegistrySnapshot:
        state = self._view()
        return OpRegistrySnapshot(state.impls, state.generation)

    def spec(self, op_name: str) -> OpSpec | None:
        """The specification of the catalogue, or the registered one."""
        return CATALOG.get(op_name) or self._view().specs.get(op_name)

    def get_implementations(self, op_name: str) -> list[OpImpl]:
        """All implementations of an operator, in the order of their registration."""
        return list(self._view().impls.get(op_name, ()))

    def get_implementation(self, op_name: str, impl_id: str) -> OpImpl | None:
        return next((impl for impl in self._view().impls.get(op_name, ()) if impl.impl_id == impl_id), None)

    def list_operators(self) -> list[str]:
        """Names of the operators that have an implementation, sorted."""
        return sorted(self._view().impls)

    def known_operators(self) -> list[str]:
        """Names of all operators: the catalogue's, those with a registered spec, those with an implementation."""
        state = self._view()
        return sorted({*CATALOG, *state.specs, *state.impls})

    def owner(self, op_name: str, impl_id: str) -> str:
        """Who registered an implementation; empty if it did not say."""
        return self._view().owners.get((op_name, impl_id), "")

    def has_source(self, source: str) -> bool:
        """Whether a transaction of that source has been committed."""
        return source in self._view().sources

    def subscribe(self, listener: RegistryListener) -> None:
        """Tell `listener`, which is held weakly, about changes."""
        self._listeners.add(listener)

    def freeze(self, reason: str | None) -> None:
        """Refuse changes from now on (None: allow them again)."""
        self._frozen = reason

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        self._draft = self._writer = None
        self._source = ""

    def _view(self) -> _State:
        draft = self._draft
        return draft if draft is not None and self._writer == threading.get_ident() else self._state

    def _refuse_if_frozen(self) -> None:
        if self._frozen is not None:
            raise FrozenError(
                f"nothing can be registered: the selection is frozen because {self._frozen}; register before that,"
                " or call thaw() on the manager and compile again"
            )

    def _add(self, impl: OpImpl) -> None:
        if not isinstance(impl, OpImpl):
            raise RegistrationError(f"expected an OpImpl, got {impl!r}")
        state = self._view()
        present = state.impls.get(impl.op_name, ())
        if any(other.impl_id == impl.impl_id for other in present):
            owner = state.owners.get((impl.op_name, impl.impl_id))
            by = f" by {owner}" if owner else ""
            raise RegistrationError(
                f"{impl.op_name}: implementation {impl.impl_id!r} is registered already{by};"
                " give the second one another impl_id"
            )
        _check_signature(self.spec(impl.op_name), impl)
        impls = {**state.impls, impl.op_name: (*present, impl)}
        owners = {**state.owners, (impl.op_name, impl.impl_id): self._source}
        self._draft = replace(state, impls=MappingProxyType(impls), owners=MappingProxyType(owners))

    def _commit(self, state: _State) -> None:
        for name in state.impls:
            if name in CATALOG or name in state.specs:
                continue
            opaque = next((impl.impl_id for impl in state.impls[name] if impl.opaque), None)
            if opaque is not None:
                raise RegistrationError(
                    f"{name}: implementation {opaque!r} is opaque, and the operator has no OpSpec to make a"
                    " torch.library operator from; register one with registry.register_spec(OpSpec(...))"
                )
            if name not in self._unspecified:
                self._unspecified.add(name)
                get_logger(__name__).warning(
                    "operator %r (implementation %r) is not in the catalogue and has no OpSpec: neither its signature"
                    " nor what it writes is known; register one with registry.register_spec(OpSpec(...))%s",
                    name,
                    state.impls[name][0].impl_id,
                    did_you_mean(name, CATALOG),
                )
        self._state = replace(state, generation=self._state.generation + 1)


def _check_signature(spec: OpSpec | None, impl: OpImpl) -> None:
    try:
        difference = (spec.mismatch(impl.fn) if spec is not None else None) or check_function(impl, spec)
    except (TypeError, ValueError) as error:
        difference = f"it has no signature that can be read ({error}); wrap it in a function"
    if difference is not None:
        raise RegistrationError(f"{spec or impl.op_name}: implementation {impl.impl_id!r} does not fit: {difference}")
    if impl.opaque and spec is not None:
        from .torch_ops import schema_of

        schema_of(spec)
