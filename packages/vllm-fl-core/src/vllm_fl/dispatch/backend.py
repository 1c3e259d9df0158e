"""Backends: a chip's operators as methods of one class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from vllm_fl.catalog import CATALOG
from vllm_fl.errors import RegistrationError, nearest
from vllm_fl.logging import get_logger

from .registry import OpRegistry
from .types import BackendImplKind, BackendPriority, OpImpl

_F = TypeVar("_F", bound=Callable[..., Any])
_PRIORITIES = {
    BackendImplKind.DEFAULT: BackendPriority.DEFAULT,
    BackendImplKind.VENDOR: BackendPriority.VENDOR,
    BackendImplKind.REFERENCE: BackendPriority.REFERENCE,
}
_PREFIXES = {
    BackendImplKind.DEFAULT: "default",
    BackendImplKind.VENDOR: "vendor",
    BackendImplKind.REFERENCE: "reference",
}


class Backend(ABC):
    """A backend: subclasses have one method for each operator that they implement.

    A method has the name and the signature of the catalogue's operator. The constructor imports no vendor library,
    :meth:`is_available` says whether there is one, the methods import what they need.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the backend."""

    @property
    def vendor(self) -> str | None:
        """Name of the vendor; None for a backend that belongs to none."""
        return None

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this process can run the backend's operators."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, vendor={self.vendor!r})"


def op_options(**options: Any) -> Callable[[_F], _F]:
    """Decorator for a backend's method: fields of its :class:`OpImpl`.

    Args:
        options: any of supported_dtypes, min_arch, supports, opaque, priority, impl_id, parameters, buckets.

    Raises:
        TypeError: another name.
    """
    allowed = ("supported_dtypes", "min_arch", "supports", "opaque", "priority", "impl_id", "parameters", "buckets")
    wrong = sorted(set(options) - set(allowed))
    if wrong:
        raise TypeError(f"op_options takes {', '.join(allowed)}, not {', '.join(wrong)}")

    def decorate(method: _F) -> _F:
        method._fl_options = options  # type: ignore[attr-defined]
        return method

    return decorate


def register_backend(
    registry: OpRegistry, backend: Backend, *, kind: BackendImplKind | None = None, priority: int | None = None
) -> tuple[OpImpl, ...]:
    """Register the methods of `backend` that are operators; all of them, or none if one is refused.

    Args:
        registry: where to.
        backend: its public methods that bear the name of an operator become implementations, available when
            ``backend.is_available()`` says so.
        kind: who provides it; by default VENDOR if the backend names a vendor.
        priority: by default that of the kind.

    Returns:
        What was registered. The impl_id is ``vendor.NAME``, ``default.NAME`` or ``reference.NAME``.

    Raises:
        RegistrationError: no kind given and no vendor named; no method is an operator; a signature does not fit.
    """
    vendor = backend.vendor
    if kind is None:
        if not vendor:
            raise RegistrationError(f"{backend!r} names no vendor; give register_backend(..., kind=...)")
        kind = BackendImplKind.VENDOR
    impls = tuple(_implementations(registry, backend, kind, _PRIORITIES[kind] if priority is None else priority))
    if not impls:
        raise RegistrationError(
            f"{backend!r} has no method that is an operator (the catalogue has {', '.join(CATALOG)})"
        )
    registry.register_many(impls)
    return impls


def _implementations(registry: OpRegistry, backend: Backend, kind: BackendImplKind, priority: int) -> Iterator[OpImpl]:
    operators = set(registry.known_operators())
    name = backend.vendor if kind is BackendImplKind.VENDOR else backend.name
    for method_name in _public_methods(backend):
        if method_name not in operators:
            _warn_of_misspelling(backend, method_name, operators)
            continue
        method = getattr(backend, method_name)
        fields: dict[str, Any] = {
            "impl_id": f"{_PREFIXES[kind]}.{name}",
            "vendor": backend.vendor,
            "priority": priority,
            **getattr(method, "_fl_options", {}),
        }
        # A bound method is available when the object that it is bound to says so.
        yield OpImpl(op_name=method_name, kind=kind, fn=method, **fields)


def _public_methods(backend: Backend) -> list[str]:
    return [
        name
        for name in dir(type(backend))
        if not name.startswith("_") and not hasattr(Backend, name) and callable(getattr(type(backend), name))
    ]


def _warn_of_misspelling(backend: Backend, name: str, operators: set[str]) -> None:
    near = nearest(name, operators)
    if near is not None and not hasattr(type(backend), near):
        get_logger(__name__).warning(
            "%r: the method %r is not an operator and is not registered; did you mean %r?", backend, name, near
        )
