"""The state of this installation and of this process, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_fl.config import get_settings
from vllm_fl.dispatch import FailureRecord, OpManager, Selection, get_default_manager, plugin_reports
from vllm_fl.errors import FLError
from vllm_fl.plugins import installed_backends, resolve_platform

from .checks import Check, communicator_checks, configuration_checks, installation_checks, selection_checks
from .versions import versions


@dataclass(frozen=True)
class PlatformView:
    """The platform: `name` is None where the choice is vLLM's; `rejected` are (backend, reason)."""

    name: str | None
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PlugInView:
    """A backend or a plug-in that was found: `error` is its first error, empty if it has none."""

    name: str
    source: str
    distribution: str
    implementations: int
    error: str = ""


@dataclass(frozen=True)
class Info:
    """All that ``vllm-fl info`` shows.

    Args:
        versions: distribution to version.
        platform: the chosen platform, why, and why not the others.
        plug_ins: backends and plug-ins, with what became of them.
        checks: verdicts with remedies.
        operators: implementation id to the number of operators that it serves; "none" counts those without any.
        failures: the first failure of each implementation of this process.
    """

    versions: Mapping[str, str]
    platform: PlatformView
    plug_ins: tuple[PlugInView, ...]
    checks: tuple[Check, ...]
    operators: Mapping[str, int]
    failures: tuple[FailureRecord, ...]

    @property
    def ok(self) -> bool:
        """Whether all that the user configured can work."""
        return all(check.state != "problem" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The state as plain data, ready for JSON."""
        return {
            "ok": self.ok,
            "versions": dict(self.versions),
            "platform": asdict(self.platform),
            "plug_ins": [asdict(plug_in) for plug_in in self.plug_ins],
            "checks": [asdict(check) for check in self.checks],
            "operators": dict(self.operators),
            "failures": [
                {**asdict(record), "shapes": {name: list(shape) for name, shape in record.shapes.items()}}
                for record in self.failures
            ],
        }


def collect_info(manager: OpManager | None = None) -> Info:
    """Ask everything that ``vllm-fl info`` shows; whatever is wrong becomes a check, nothing raises.

    Imports Triton, if it is installed; starts no engine and initialises no device.
    """
    manager = manager or get_default_manager()
    checks: list[Check] = []
    platform = _platform(checks)
    selections = _selections(manager, checks)
    plug_ins = _plug_ins(manager, checks)
    checks += [*installation_checks(), *communicator_checks()]
    try:
        settings = get_settings()
        checks += [*configuration_checks(settings), *selection_checks(settings, selections)]
    except FLError as error:
        _add(checks, "configuration", error)
    served = Counter(s.chosen.impl.impl_id if s.chosen is not None else "none" for s in selections.values())
    return Info(versions(), platform, plug_ins, tuple(checks), dict(served), tuple(manager.failures()))


def _platform(checks: list[Check]) -> PlatformView:
    try:
        choice = resolve_platform()
    except FLError as error:
        _add(checks, "platform", error)
        return PlatformView(None, "none can be chosen, see the checks")
    return PlatformView(choice.plugin.name if choice.plugin is not None else None, choice.reason, choice.rejected)


def _selections(manager: OpManager, checks: list[Check]) -> dict[str, Selection]:
    try:
        return manager.selections()
    except FLError as error:
        _add(checks, "dispatch", error)
        return {}


def _plug_ins(manager: OpManager, checks: list[Check]) -> tuple[PlugInView, ...]:
    owners: Counter[str] = Counter()
    for op_name, impls in manager.registry.snapshot().impls_by_op.items():
        owners.update(manager.registry.owner(op_name, impl.impl_id) for impl in impls)
    views = [
        PlugInView(backend.entry_point, "backend", backend.distribution, 0, backend.error)
        for backend in installed_backends()
        if backend.error is not None
    ]
    for report in plugin_reports():
        key = f"{report.source} {report.name!r} of {report.distribution}"
        views.append(PlugInView(report.name, report.source, report.distribution, owners[key], report.error))
        if report.source == "env" and not report.ok:
            checks.append(Check(f"plug-in {report.name}", "problem", report.error))
    return tuple(views)


def _add(checks: list[Check], subject: str, error: FLError) -> None:
    """Add `error`, which several questions may have met, once."""
    if all(check.text != str(error) for check in checks):
        checks.append(Check(subject, "problem", str(error)))
