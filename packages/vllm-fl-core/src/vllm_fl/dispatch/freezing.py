"""Freezing the default manager under the names of vllm-plugin-FL."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_fl.errors import NoImplementationError

from .default import get_default_manager
from .policy import get_policy

_REASON = "freeze_dispatch() was called"


@dataclass(frozen=True)
class FrozenDispatchManifest:
    """What was frozen: operator to impl_id, and the operators that have no implementation."""

    policy_fingerprint: str
    selections: Mapping[str, str]
    unresolved: tuple[str, ...]
    fingerprint: str


_manifest: FrozenDispatchManifest | None = None


def freeze_dispatch(op_names: Iterable[str] | None = None, *, strict: bool = True) -> FrozenDispatchManifest:
    """Bind the operators and refuse later changes of the policy.

    Args:
        op_names: the operators to bind; by default all that have an implementation.
        strict: raise if one of them has no implementation that can be used; else it is in ``unresolved``.

    Raises:
        UnknownOperatorError, NoImplementationError: see `strict`; nothing is frozen then.
    """
    global _manifest
    manager = get_default_manager()
    manager.ensure_initialized()
    selected: dict[str, str] = {}
    unresolved: list[str] = []
    for name in manager.registry.list_operators() if op_names is None else op_names:
        try:
            selected[name] = manager.get_selected_impl_id(name)
            manager.find(name)
        except NoImplementationError:
            if strict:
                raise
            unresolved.append(name)
    _manifest = FrozenDispatchManifest(get_policy().fingerprint(), selected, tuple(unresolved), manager.fingerprint())
    manager.freeze(_REASON)
    return _manifest


def thaw_dispatch() -> None:
    """Allow changes again."""
    global _manifest
    _manifest = None
    get_default_manager().thaw()


def is_dispatch_frozen() -> bool:
    """Whether the default manager is frozen, by whomever."""
    return get_default_manager().frozen is not None


def get_frozen_dispatch_manifest() -> FrozenDispatchManifest | None:
    """What freeze_dispatch() froze, or None."""
    return _manifest if is_dispatch_frozen() else None
