"""Decides which backend is the platform of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fl.errors import PlatformError, nearest
from vllm_fl.logging import get_logger

from .descriptor import BackendPlugin, load_object
from .loading import InstalledBackend, installed_backends, reset_plugins
from .native import has_native_platform

if TYPE_CHECKING:
    from vllm_fl.config import Origin
    from vllm_fl.dispatch.types import Availability

PLATFORM_ENV = "VLLM_FL_PLATFORM"

_cache: dict[str, PlatformChoice] = {}
_probed: dict[str, Availability] = {}


@dataclass(frozen=True)
class PlatformChoice:
    """The platform of this process.

    Args:
        plugin: the backend whose platform it is; None leaves the choice to vLLM.
        reason: why.
        rejected: (name, reason) of every other installed backend.
    """

    plugin: BackendPlugin | None
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


def resolve_platform() -> PlatformChoice:
    """The platform that ``VLLM_FL_PLATFORM`` names, else that of the one backend whose probe succeeds.

    A fallback backend is chosen only if no other fits and vLLM has no platform of its own. Decided once a process;
    safe to call while ``vllm`` is being imported.

    Raises:
        PlatformError: the named backend is not installed or cannot be used, or several backends fit.
        ConfigError: the user's configuration is wrong.
    """
    cached = _cache.get("choice")
    if cached is not None:
        return cached
    from vllm_fl.config import user_value

    name, origin = user_value("platform")
    backends = installed_backends()
    choice = _detected(backends) if name is None else _requested(name, origin, backends)
    return _cache.setdefault("choice", choice)


def reset_platform() -> None:
    """Forget the choice, the probes' answers and what is installed; for tests."""
    _cache.clear()
    _probed.clear()
    reset_plugins()


def probe(backend: InstalledBackend) -> Availability:
    """What the backend's probe says, asked once a process; a backend that cannot be used says why.

    A probe that raises, or answers with anything but a bool or an Availability, means no and is logged at WARNING.
    """
    answer = _probed.get(backend.entry_point)
    if answer is None:
        answer = _probed.setdefault(backend.entry_point, _ask(backend))
    return answer


def _ask(backend: InstalledBackend) -> Availability:
    from vllm_fl.dispatch.types import AVAILABLE, Availability

    plugin = backend.plugin
    if plugin is None or backend.error is not None:
        return Availability(False, backend.error or "it could not be loaded")
    if plugin.probe is None:
        if plugin.fallback:
            return AVAILABLE
        if plugin.platform is None:
            return Availability(False, "it brings no platform")
        return Availability(False, f"it declares no probe; {PLATFORM_ENV}={plugin.name} asks for it")
    try:
        answer = load_object(plugin.probe)()
    except (Exception, SystemExit) as error:  # a vendor's probe may fail in any way
        failure = f"its probe {plugin.probe} raised {type(error).__name__}: {error}"
    else:
        if isinstance(answer, Availability):
            return answer
        if isinstance(answer, bool):
            return AVAILABLE if answer else Availability(False, "its probe finds no device")
        failure = f"its probe {plugin.probe} returned {answer!r}, expected a bool or an Availability"
    message = "backend %r of %s: %s; reinstall or update %s"
    get_logger(__name__).warning(message, plugin.name, backend.distribution, failure, backend.distribution)
    return Availability(False, failure)


def _requested(name: str, origin: Origin, backends: Sequence[InstalledBackend]) -> PlatformChoice:
    named = next((backend for backend in backends if backend.entry_point == name), None)
    if named is None:
        raise PlatformError(f"{origin}: {_not_installed(name, backends)}")
    if named.plugin is None or named.error is not None:
        raise PlatformError(f"{origin}: backend {name!r} of {named.distribution} cannot be used: {named.error}")
    answer = probe(named)
    if named.plugin.platform is None:
        why = "" if answer else f", {answer.reason}"
        text = f"backend {name!r} of {named.distribution} brings no platform{why}"
        raise PlatformError(f"{origin}: {text} (installed platforms: {_listing(backends)})")
    reason = f"asked for by {origin}"
    if not answer:
        reason += f", against its probe: {answer.reason}"
        get_logger(__name__).warning("platform %r is %s", name, reason)
    others = tuple((other.entry_point, f"{origin} names {name!r}") for other in backends if other is not named)
    return PlatformChoice(named.plugin, reason, others)


def _not_installed(name: str, backends: Sequence[InstalledBackend]) -> str:
    # Someone who writes the vendor or the device type means the backend that declares it.
    aliases: dict[str, str] = {}
    for backend in backends:
        if backend.plugin is not None and backend.plugin.platform is not None:
            for alias in (backend.plugin.device_type, backend.plugin.vendor, backend.entry_point):
                aliases.update({alias: backend.entry_point} if alias else {})
    near = nearest(name, aliases)
    hint = f"; did you mean {aliases[near]!r}?" if near else ""
    listing = f"installed platforms: {_listing(backends)}"
    return f"platform {name!r} is not installed ({listing}; to install it: pip install vllm-fl-{name}){hint}"


def _listing(backends: Sequence[InstalledBackend]) -> str:
    usable = [b.entry_point for b in backends if b.error is None and b.plugin is not None and b.plugin.platform]
    return ", ".join(usable) or "none"


def _detected(backends: Sequence[InstalledBackend]) -> PlatformChoice:
    first: list[InstalledBackend] = []
    fallback: list[InstalledBackend] = []
    rejected: list[tuple[str, str]] = []
    for backend in backends:
        answer = probe(backend)
        if not answer:
            rejected.append((backend.entry_point, answer.reason))
        elif backend.plugin is None or backend.plugin.platform is None:
            rejected.append((backend.entry_point, "it brings no platform"))
        else:
            (fallback if backend.plugin.fallback else first).append(backend)
    if first:
        chosen, reason = _single(first), "its probe succeeds"
        rejected += [(backend.entry_point, f"a fallback, and {chosen.name!r} fits") for backend in fallback]
        return PlatformChoice(chosen, reason, _ordered(rejected))
    native = has_native_platform()
    if native:
        reason = f"vLLM has a platform of its own ({native.reason})"
        for name in (backend.entry_point for backend in fallback):
            rejected.append((name, f"a fallback, and {reason}; {PLATFORM_ENV}={name} asks for it"))
        return PlatformChoice(None, f"no backend fits, and {reason}", _ordered(rejected))
    if not fallback:
        return PlatformChoice(None, "no backend fits", _ordered(rejected))
    return PlatformChoice(_single(fallback), f"no other backend fits, and {native.reason}", _ordered(rejected))


def _ordered(rejected: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(rejected))


def _single(backends: Sequence[InstalledBackend]) -> BackendPlugin:
    plugins = [backend.plugin for backend in backends if backend.plugin is not None]
    if len(plugins) == 1:
        return plugins[0]
    names = " and ".join(f"{backend.entry_point!r} of {backend.distribution}" for backend in backends)
    choices = " or ".join(f"{PLATFORM_ENV}={backend.entry_point}" for backend in backends)
    raise PlatformError(f"more than one platform fits this machine: {names}; choose one: {choices}")
