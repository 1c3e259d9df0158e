"""The names that a configuration may use, from what is installed, whatever the configuration says."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch.discovery import discover_backends, discover_from_entry_points, discover_from_env_modules
from vllm_fl.errors import ConfigError
from vllm_fl.plugins import installed_backends


@dataclass(frozen=True)
class KnownNames:
    """Names of operators, vendors and implementations."""

    operators: frozenset[str]
    vendors: frozenset[str]
    impl_ids: frozenset[str]


def known_names() -> KnownNames:
    """The names of everything that registers here; a plug-in that fails to register is reported and left out."""
    registry = OpRegistry()
    discover_backends(registry)
    discover_from_entry_points(registry)
    with suppress(ConfigError):  # the configuration of this process is not the one that is being judged
        discover_from_env_modules(registry)
    impls = [impl for impls in registry.snapshot().impls_by_op.values() for impl in impls]
    vendors = {impl.vendor for impl in impls}
    vendors |= {backend.plugin.vendor for backend in installed_backends() if backend.plugin is not None}
    return KnownNames(
        operators=frozenset(registry.known_operators()),
        vendors=frozenset(vendor for vendor in vendors if vendor),
        impl_ids=frozenset(impl.impl_id for impl in impls),
    )
