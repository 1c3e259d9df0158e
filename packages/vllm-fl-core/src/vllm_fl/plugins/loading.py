"""Finds what is installed, by entry points. What cannot be used is reported once and leaves the others alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from vllm_fl.errors import PlatformError
from vllm_fl.logging import get_logger

from .descriptor import BackendPlugin
from .requirements import requirement_problem

if TYPE_CHECKING:
    from vllm_fl.config import PlatformFile

BACKEND_GROUP = "vllm_fl.backends"
CORE = "vllm-fl-core"


class Named(Protocol):
    """What an entry point of ours is expected to be."""

    @property
    def name(self) -> str: ...
    @property
    def requires(self) -> tuple[str, ...]: ...


P = TypeVar("P", bound=Named)


@dataclass(frozen=True)
class Loaded(Generic[P]):
    """An entry point of this environment.

    Args:
        plugin: what it declares; None if that could not be loaded.
        distribution: the distribution that it belongs to.
        entry_point: its name.
        error: why it cannot be used, and the remedy; None if it can be used.
    """

    plugin: P | None
    distribution: str
    entry_point: str
    error: str | None = None


InstalledBackend = Loaded[BackendPlugin]

_cache: dict[str, tuple[Loaded[Any], ...]] = {}


def installed_backends() -> tuple[InstalledBackend, ...]:
    """Every entry point of the group ``vllm_fl.backends``, by name; read once a process."""
    return load_group(BACKEND_GROUP, BackendPlugin, "backend")


def load_group(group: str, expected: type[P], what: str) -> tuple[Loaded[P], ...]:
    """Every entry point of `group`, by name, each checked to be an `expected` that can be used; read once a process.

    One that cannot be used is reported once; `what` is what the message calls it.
    """
    cached = _cache.get(group)
    if cached is not None:
        return cached
    # No lock, which could be held during a fork. Two threads may both look; only one of them reports.
    found = tuple(_load_group(group, expected, what))
    kept = _cache.setdefault(group, found)
    if kept is found:
        for item in found:
            if item.error is not None:
                message = "%s %r of %s cannot be used: %s"
                get_logger(__name__).warning(message, what, item.entry_point, item.distribution, item.error)
    return kept


def reset_plugins() -> None:
    """Forget what is installed; for tests that install something."""
    _cache.clear()


def platform_file(plugin: BackendPlugin) -> PlatformFile | None:
    """The platform YAML of a backend; None if it declares none.

    Raises:
        PlatformError: its package cannot be imported. (A file that the package lacks is found when it is read.)
    """
    if plugin.config is None:
        return None
    from importlib.resources import files

    package, _, name = plugin.config.partition(":")
    try:
        return files(package).joinpath(name)
    except Exception as error:  # the package's own import may fail in any way
        raise PlatformError(
            f"backend {plugin.name!r}: the package of its platform file {plugin.config!r} cannot be imported: "
            f"{type(error).__name__}: {error}; reinstall the backend's distribution"
        ) from error


def _load_group(group: str, expected: type[P], what: str) -> list[Loaded[P]]:
    points = sorted(entry_points(group=group), key=lambda point: (point.name, _distribution(point)))
    names = Counter(point.name for point in points)
    return [
        _load(point, expected) if names[point.name] == 1 else Loaded(None, *_ambiguous(point, points, what))
        for point in points
    ]


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


def _ambiguous(point: EntryPoint, points: list[EntryPoint], what: str) -> tuple[str, str, str]:
    claimants = ", ".join(_distribution(other) for other in points if other.name == point.name)
    error = f"several distributions bring a {what} of this name: {claimants}; uninstall all but one"
    return _distribution(point), point.name, error


def _load(point: EntryPoint, expected: type[P]) -> Loaded[P]:
    distribution = _distribution(point)
    error = _core_mismatch(distribution)
    if error is not None:
        return Loaded(None, distribution, point.name, error)
    remedy = f"repair it (pip install --force-reinstall {distribution}) or remove it (pip uninstall {distribution})"
    try:
        plugin = point.load()
    except (Exception, SystemExit) as raised:  # a plug-in's import may fail in any way
        error = f"loading {point.value} raised {type(raised).__name__}: {raised}; {remedy}"
        return Loaded(None, distribution, point.name, error)
    if not isinstance(plugin, expected):
        wanted = f"vllm_fl.plugins.{expected.__name__}"
        error = f"{point.value} is of type {type(plugin).__name__}, expected {wanted}; {remedy}"
        return Loaded(None, distribution, point.name, error)
    if plugin.name != point.name:
        error = f"{point.value} is named {plugin.name!r}, its entry point {point.name!r}; {remedy}"
        return Loaded(plugin, distribution, point.name, error)
    problems = [problem for problem in map(requirement_problem, plugin.requires) if problem]
    return Loaded(plugin, distribution, point.name, "; ".join(problems) or None)


def _core_mismatch(distribution: str) -> str | None:
    """What the distribution itself says about the core that it was made for; asked before any of it is imported."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        declared = requires(distribution) or []
    except PackageNotFoundError:
        return None
    for text in declared:
        try:
            is_core = canonicalize_name(Requirement(text).name) == CORE
        except InvalidRequirement:
            continue
        problem = requirement_problem(text) if is_core else None
        if problem is not None:
            return problem
    return None
