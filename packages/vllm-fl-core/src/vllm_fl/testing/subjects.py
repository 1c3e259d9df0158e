"""What there is to check: the implementations and declarations that each installed distribution brings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.resources import files
from typing import Any

from packaging.utils import canonicalize_name

from vllm_fl.dispatch import PLUGIN_GROUP, Availability, BackendImplKind, OpRegistry
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.errors import ConfigError, FLError, did_you_mean
from vllm_fl.plugins import BackendPlugin, InstalledBackend, installed_backends, load_object, probe

from .allowlist import FILE_NAME, AllowList
from .imports import unimportable


class MissingReferenceError(FLError, RuntimeError):
    """No reference implementations are installed to compare with."""


@dataclass(frozen=True)
class Bundle:
    """What one entry point brings.

    Args:
        name: of the entry point.
        distribution: that it belongs to.
        package: top package of its code; empty if that is not known.
        plugin: what a backend declares; None for an entry point of the group ``vllm_fl.plugin``.
        registry: a registry of its own, with what it has registered.
        error: why it could not be loaded or registered.
    """

    name: str
    distribution: str
    package: str
    plugin: BackendPlugin | None
    registry: OpRegistry
    error: str = ""

    @property
    def implementations(self) -> list[OpImpl]:
        """By operator, then in the order of their registration."""
        return [impl for impls in self.registry.snapshot().impls_by_op.values() for impl in impls]

    def is_here(self) -> Availability:
        """Whether the backend's device is on this machine, as its own probe says."""
        if self.plugin is None:
            return Availability(False, "it declares no platform")
        return probe(InstalledBackend(self.plugin, self.distribution, self.name))

    def prepare(self) -> None:
        """Import the platform where the device is, as vLLM does: it brings the device to PyTorch.

        A failure is left to the check of the platform.
        """
        if self.plugin is not None and self.plugin.platform is not None and self.is_here():
            unimportable(self.plugin.platform)

    def known_gaps(self) -> AllowList:
        """The allow-list that the distribution ships as ``conformance.yaml`` in its package; empty without one.

        Raises:
            ConfigError: anything in the file is wrong.
        """
        if not self.package or self.error:
            return AllowList()
        file = files(self.package).joinpath(FILE_NAME)
        if not file.is_file():
            return AllowList()
        return AllowList.parse(file.read_bytes(), f"{self.package}/{FILE_NAME}")


def find_bundles(name: str | None = None) -> list[Bundle]:
    """Load and register what is installed, each in a registry of its own.

    Args:
        name: a distribution, a backend or an entry point of ``vllm_fl.plugin``; None for all.

    Raises:
        ConfigError: nothing of that name is installed.
    """
    sources = [*_backends(), *_plugins()]
    if name is not None:
        wanted = canonicalize_name(name)
        chosen = [s for s in sources if wanted in (canonicalize_name(s.distribution), canonicalize_name(s.name))]
        if not chosen:
            known = sorted({source.distribution for source in sources} | {source.name for source in sources})
            raise ConfigError(
                f"no distribution or backend {name!r} is installed ({', '.join(known)}){did_you_mean(name, known)}"
            )
        sources = chosen
    return [source.bundle() for source in sources]


def reference_implementations() -> dict[str, Callable[..., Any]]:
    """Operator -> function of the installed backends of kind reference.

    Raises:
        MissingReferenceError: there are none.
    """
    found: dict[str, Callable[..., Any]] = {}
    errors = []
    for source in _backends():
        if source.plugin is None or source.plugin.kind is not BackendImplKind.REFERENCE:
            continue
        bundle = source.bundle()
        errors.append(f"{source.distribution}: {bundle.error}" if bundle.error else "")
        found.update({impl.op_name: impl.fn for impl in bundle.implementations})
    if not found:
        reasons = "; ".join(filter(None, errors)) or "none is installed"
        raise MissingReferenceError(
            f"there are no reference implementations to compare with ({reasons}); pip install vllm-fl-reference"
        )
    return found


def installed_versions(bundles: Sequence[Bundle]) -> dict[str, str]:
    """Versions of the distributions of `bundles` and of what they run on."""
    names = dict.fromkeys([*(bundle.distribution for bundle in bundles), "vllm-fl-core", "torch", "triton", "vllm"])
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class _Source:
    name: str
    distribution: str
    package: str
    plugin: BackendPlugin | None
    load: Callable[[], Callable[[OpRegistry], Any]] | None
    error: str = ""

    def bundle(self) -> Bundle:
        registry, error = OpRegistry(), self.error
        if not error and self.load is not None:
            try:
                with registry.transaction():
                    self.load()(registry)
            except (Exception, SystemExit) as raised:  # a plug-in may fail in any way
                error = f"{type(raised).__name__}: {raised}"
        return Bundle(self.name, self.distribution, self.package, self.plugin, registry, error)


def _backends() -> Iterator[_Source]:
    for backend in installed_backends():
        plugin = backend.plugin
        register = plugin.register if plugin is not None else None
        paths = [path for path in (register, plugin and plugin.config, plugin and plugin.platform) if path]
        package = paths[0].partition(":")[0].partition(".")[0] if paths else ""
        load = (lambda target=register: load_object(target)) if register else None
        yield _Source(backend.entry_point, backend.distribution, package, plugin, load, backend.error or "")


def _plugins() -> Iterator[_Source]:
    for point in sorted(entry_points(group=PLUGIN_GROUP), key=lambda point: point.name):
        yield _Source(point.name, _owner(point), point.value.partition(".")[0].partition(":")[0], None, point.load)


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"
