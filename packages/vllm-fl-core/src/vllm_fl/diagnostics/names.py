"""The names that a configuration may use, from what is installed, whatever the configuration says."""

from __future__ import annotations

from contextlib import suppress

from vllm_fl.config import KnownNames
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch.discovery import discover_backends, discover_from_entry_points, discover_from_env_modules
from vllm_fl.dispatch.initialization import registered_names
from vllm_fl.errors import ConfigError


def known_names() -> KnownNames:
    """The names of everything that registers here; a plug-in that fails to register is reported and left out."""
    registry = OpRegistry()
    discover_backends(registry)
    discover_from_entry_points(registry)
    with suppress(ConfigError):  # the configuration of this process is not the one that is being judged
        discover_from_env_modules(registry)
    return registered_names(registry)
