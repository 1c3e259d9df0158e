"""The names that a configuration may use, from what is installed, whatever the configuration says."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from vllm_fl.dispatch import OpImpl, OpRegistry
from vllm_fl.dispatch.discovery import discover_backends, discover_from_entry_points, discover_from_env_modules
from vllm_fl.dispatch.initialization import registered_names
from vllm_fl.errors import ConfigError


@dataclass(frozen=True)
class KnownNames:
    """Names of operators, vendors, implementations, operators of kind flagos, and layers; None: not known here.

    Of the implementations also themselves, for what they declare.
    """

    operators: frozenset[str]
    vendors: frozenset[str]
    impl_ids: frozenset[str]
    flagos_operators: frozenset[str] | None = None
    oot_layers: frozenset[str] | None = None
    implementations: tuple[OpImpl, ...] | None = None


def known_names() -> KnownNames:
    """The names of everything that registers here; a plug-in that fails to register is reported and left out."""
    from vllm_fl.flagos.aten import flagos_operators
    from vllm_fl.integration.layers import LAYERS

    registry = OpRegistry()
    discover_backends(registry)
    discover_from_entry_points(registry)
    with suppress(ConfigError):  # the configuration of this process is not the one that is being judged
        discover_from_env_modules(registry)
    return KnownNames(
        **registered_names(registry),
        flagos_operators=flagos_operators(),
        oot_layers=frozenset(layer.name for layer in LAYERS),
    )
