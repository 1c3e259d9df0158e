"""Finds what registers implementations: installed backends, entry points, modules that a variable names.

Each source registers in a transaction of its own: if anything in it raises, none of its implementations is there, the
failure is reported once at WARNING, and the other sources are not disturbed.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from vllm_fl.errors import FrozenError, RegistrationError, did_you_mean
from vllm_fl.logging import get_logger

from .registry import OpRegistry

PLUGIN_GROUP = "vllm_fl.plugin"
PLUGIN_MODULES_ENV = "VLLM_FL_PLUGIN_MODULES"
#: The functions that a module may have, in the order in which they are looked for.
REGISTER_NAMES = ("vllm_fl_register", "register", "register_builtins")


@dataclass(frozen=True)
class PluginReport:
    """What became of one source of implementations.

    Args:
        name: of the backend, the entry point or the module.
        source: where it was named: "backend", "entry_point" or "env".
        distribution: the distribution that it belongs to; for a module the module itself.
        ok: whether it registered.
        error: what was raised, and the remedy; empty if nothing was.
        details: the traceback.
    """

    name: str
    source: str
    distribution: str
    ok: bool
    error: str = ""
    details: str = ""


@dataclass(frozen=True)
class _Source:
    name: str
    source: str
    distribution: str
    load: Callable[[], Callable[[OpRegistry], Any]]

    @property
    def key(self) -> str:
        return f"{self.source} {self.name!r} of {self.distribution}"


_reports: dict[str, PluginReport] = {}


def discover_plugins(registry: OpRegistry) -> int:
    """Register the entry points of ``vllm_fl.plugin`` and the modules of ``VLLM_FL_PLUGIN_MODULES``.

    A source that `registry` has already is left out. Returns the number of sources that registered now.
    """
    return discover_from_entry_points(registry) + discover_from_env_modules(registry)


def discover_backends(registry: OpRegistry) -> int:
    """Register the installed backends (entry points of ``vllm_fl.backends``) that name a register function."""
    return _register_all(registry, _backends())


def discover_from_entry_points(registry: OpRegistry) -> int:
    """Register the entry points of ``vllm_fl.plugin``."""
    return _register_all(registry, _entry_points())


def discover_from_env_modules(registry: OpRegistry) -> int:
    """Register the modules of ``VLLM_FL_PLUGIN_MODULES``.

    Raises:
        ConfigError: the configuration is wrong.
    """
    return _register_all(registry, _env_modules())


def get_discovered_plugins() -> list[tuple[str, str, bool]]:
    """(name, source, registered) of all sources found so far, for whatever registry; see :func:`plugin_reports`."""
    return [(report.name, report.source, report.ok) for report in plugin_reports()]


def plugin_reports() -> list[PluginReport]:
    """The reports of all sources found so far, in the order of their discovery."""
    return list(_reports.copy().values())


def clear_discovered_plugins() -> None:
    """Forget the reports."""
    _reports.clear()


def _backends() -> Iterator[_Source]:
    from vllm_fl.plugins import installed_backends, load_object

    for backend in installed_backends():
        # What cannot be used has been reported by installed_backends().
        if backend.error is None and backend.plugin is not None and backend.plugin.register is not None:
            register = backend.plugin.register
            yield _Source(backend.plugin.name, "backend", backend.distribution, partial(load_object, register))


def _entry_points() -> Iterator[_Source]:
    for point in sorted(entry_points(group=PLUGIN_GROUP), key=lambda point: (point.name, point.value)):
        yield _Source(point.name, "entry_point", _distribution(point), point.load)


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


def _env_modules() -> Iterator[_Source]:
    from vllm_fl.config import user_value

    for name in user_value("plugin_modules")[0]:
        yield _Source(name, "env", f"module {name}", partial(_module_function, name))


def _module_function(name: str) -> Callable[[OpRegistry], Any]:
    module = importlib.import_module(name)
    for function in REGISTER_NAMES:
        found = getattr(module, function, None)
        if callable(found):
            return found
    hint = next((hint for wanted in REGISTER_NAMES if (hint := did_you_mean(wanted, vars(module)))), "")
    raise RegistrationError(f"module {name!r} has none of the functions {', '.join(REGISTER_NAMES)}{hint}")


def _register_all(registry: OpRegistry, sources: Iterator[_Source]) -> int:
    return sum(_register(registry, source) for source in sources if not registry.has_source(source.key))


def _register(registry: OpRegistry, source: _Source) -> bool:
    try:
        with registry.transaction(source.key):
            source.load()(registry)
    except FrozenError:
        raise
    except (Exception, SystemExit) as error:  # a plug-in may fail in any way
        text = f"{type(error).__name__}: {error}; {_remedy(source, error)}"
        report = PluginReport(source.name, source.source, source.distribution, False, text, traceback.format_exc())
        known = _reports.get(source.key)
        if known is None or known.error != report.error:
            get_logger(__name__).warning(
                "%s is left out, none of its implementations is registered: %s", source.key, text
            )
            get_logger(__name__).debug("%s", report.details)
    else:
        report = PluginReport(source.name, source.source, source.distribution, True)
    _reports[source.key] = report
    return report.ok


def _remedy(source: _Source, error: BaseException) -> str:
    if source.source == "env":
        return f"correct the module, or {PLUGIN_MODULES_ENV}, which names it"
    remove = f"remove it (pip uninstall {source.distribution})"
    if isinstance(error, ImportError):
        return f"install what it imports, or {remove}"
    return f"update it, report it to its maintainers, or {remove}"
