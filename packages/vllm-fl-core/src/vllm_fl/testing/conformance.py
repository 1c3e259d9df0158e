"""Runs the checks: each implementation of each operator, each backend's declarations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_fl.catalog import CATALOG, InputMaker, OpSpec
from vllm_fl.dispatch.types import OpImpl
from vllm_fl.errors import ConfigError, did_you_mean

from .allowlist import AllowList
from .marks import is_reference_based
from .results import CHECKS, PLATFORM_CHECKS, CheckResult, Report, Status, Subject, Violation
from .subjects import Bundle, installed_versions, reference_implementations

if TYPE_CHECKING:
    import torch

    from .judge import Judge

Progress = Callable[[str], None]

_TRACED = ("fake", "compile", "graph")


@dataclass(frozen=True)
class Options:
    """What is checked, and how.

    Args:
        device: torch device that the operators run on.
        operators: names of operators; empty for all.
        dtypes: names of dtypes; empty for those of each operator.
        tokens: numbers of tokens, beside the catalogue's cases.
        checks: names of checks; empty for all.
        seed: of the inputs.

    Raises:
        ConfigError: a name that does not exist.
    """

    device: str = "cpu"
    operators: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    tokens: tuple[int, ...] = (1, 33)
    checks: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        dtypes = ("float32", "float16", "bfloat16")
        _known("operator", self.operators, CATALOG)
        _known("dtype", self.dtypes, dtypes)
        _known("check", self.checks, [*CHECKS, *PLATFORM_CHECKS])
        wrong = [number for number in self.tokens if number < 0]
        if wrong:
            raise ConfigError(f"tokens: {wrong[0]} is not a number of tokens; give numbers from 0")

    @property
    def complete(self) -> bool:
        """Whether nothing is left out, so that an entry of an allow-list that nothing needs is stale."""
        return not (self.operators or self.dtypes or self.checks)

    def wants(self, check: str) -> bool:
        return not self.checks or check in self.checks


def _known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in (options := list(known)):
            raise ConfigError(f"unknown {what} {name!r} (known: {', '.join(options)}){did_you_mean(name, options)}")


@dataclass(frozen=True)
class Item:
    """An implementation to be checked, or with None a backend's declarations."""

    bundle: Bundle
    impl: OpImpl | None

    @property
    def name(self) -> str:
        return f"{self.impl.op_name} {self.impl.impl_id}" if self.impl is not None else f"backend {self.bundle.name}"

    @property
    def checks(self) -> Mapping[str, str]:
        return CHECKS if self.impl is not None else PLATFORM_CHECKS


class Kit:
    """The checks of some bundles, to be made one item after the other.

    Args:
        bundles: from :func:`vllm_fl.testing.find_bundles`.
        options: what is checked.
        allow: known gaps; by default those that the distributions ship.

    Raises:
        MissingReferenceError: there is nothing to compare with.
    """

    def __init__(
        self, bundles: Sequence[Bundle], options: Options | None = None, allow: AllowList | None = None
    ) -> None:
        self.bundles = bundles
        self.options = options or Options()
        self.gaps = allow if allow is not None else sum((bundle.known_gaps() for bundle in bundles), AllowList())
        for bundle in bundles:
            bundle.prepare()
        has_operators = any(bundle.implementations for bundle in bundles)
        self._truths = reference_implementations() if has_operators else {}

    def items(self) -> list[Item]:
        """What the options leave to be checked."""
        names = self.options.operators
        found = []
        for bundle in self.bundles:
            found += [Item(bundle, impl) for impl in bundle.implementations if not names or impl.op_name in names]
            if not names and any(map(self.options.wants, PLATFORM_CHECKS)):
                found.append(Item(bundle, None))
        return found

    def check(self, item: Item) -> Subject:
        """Make the checks of one item; what is a known gap is said to be one."""
        impl, bundle = item.impl, item.bundle
        if impl is None:
            from .platform import check_backend

            subject = check_backend(bundle, self.options)
        else:
            truth = self._truths.get(impl.op_name)
            spec = bundle.registry.spec(impl.op_name)
            subject = check_implementation(impl, spec, truth, self.options, bundle.distribution)
        for result in subject.checks.values():
            self.gaps.apply(subject, result, self.options.device.partition(":")[0])
        return subject

    def stale(self) -> list[str]:
        """Known gaps that nothing needed; none where not everything was checked."""
        return self.gaps.stale() if self.options.complete else []


def run(
    bundles: Sequence[Bundle],
    options: Options | None = None,
    allow: AllowList | None = None,
    progress: Progress = lambda text: None,
) -> Report:
    """Check everything that `bundles` bring; arguments and errors are those of :class:`Kit`.

    An interrupt ends the checks, and the report says what is left.

    Args:
        progress: told what comes next.
    """
    kit = Kit(bundles, options, allow)
    report = Report(kit.options.device, installed_versions(bundles))
    items = kit.items()
    try:
        for item in items:
            progress(item.name)
            report.subjects.append(kit.check(item))
    except KeyboardInterrupt:
        report.left = [item.name for item in items[len(report.subjects) :]]
        return report
    report.stale = kit.stale()
    return report


def check_implementation(
    impl: OpImpl,
    spec: OpSpec | None,
    truth: Callable[..., Any] | None,
    options: Options | None = None,
    distribution: str = "",
) -> Subject:
    """Check one implementation.

    Args:
        impl: the implementation.
        spec: its operator.
        truth: what computes float64 results: the reference implementation of the operator.
        options: what is checked.
        distribution: who brings it.
    """
    options = options or Options()
    marked = is_reference_based(impl.fn)
    subject = Subject(impl.impl_id, impl.op_name, distribution, impl.kind.value, reference_based=marked)
    wanted = [check for check in CHECKS if options.wants(check)]
    begin = time.perf_counter()
    reason = _why_not(impl, spec, truth, options.device)
    if reason or spec is None or truth is None:
        subject.checks = {check: CheckResult(check, Status.SKIPPED, notes=[reason]) for check in wanted}
        return subject
    from .comparison import Truth
    from .judge import Judge

    judge = Judge(impl, spec, Truth(spec, truth), _synchronizer(options.device))
    skipped = _judge(judge, options)
    if not impl.parameters:
        skipped["parameters"] = "it declares no parameters"
    for check in wanted:
        subject.checks[check] = _result(judge, check, skipped.get(check, ""))
    subject.cases, subject.refused = judge.offered, judge.refused
    subject.seconds = time.perf_counter() - begin
    return subject


def _why_not(impl: OpImpl, spec: OpSpec | None, truth: Callable[..., Any] | None, device: str) -> str:
    available = impl.availability()
    if not available:
        return f"not available: {available.reason}"
    if impl.min_arch is not None and (arch := _capability(device)) < impl.min_arch:
        return f"needs device capability {impl.min_arch}, this device has {arch}"
    if spec is None or spec.cases is None:
        return f"operator {impl.op_name!r} has no input generator: OpSpec(cases=...)"
    if truth is None:
        return f"no reference implementation of {impl.op_name!r} is installed"
    return ""


def _judge(judge: Judge, options: Options) -> dict[str, str]:
    """Run all cases; returns the checks that could not be made, with the reasons."""
    import torch

    from .cases import catalog_cases, other_strides, sized_case, unknown_options

    names = [name for name in judge.spec.dtypes if not options.dtypes or name in options.dtypes]
    accepted: list[torch.dtype] = []
    for name in names:
        dtype: torch.dtype = getattr(torch, name)
        before = judge.offered - judge.refused
        for case in catalog_cases(judge.spec, InputMaker(dtype, options.device, options.seed), options.tokens):
            judge.case(case, dtype)
        if judge.offered - judge.refused > before:
            accepted.append(dtype)
        maker = InputMaker(dtype, options.device, options.seed)
        first = next(iter(judge.spec.inputs(maker)))
        for case in other_strides(judge.spec, first):
            judge.strided(case, dtype)
        for argument, case in unknown_options(judge.spec, first):
            judge.option(argument, case, dtype)
        if options.wants("determinism"):
            judge.repeat(sized_case(judge.spec, maker, max(options.tokens, default=33)), dtype)
        if options.wants("parameters"):
            judge.parameters(first, dtype)
    if not accepted:
        if judge.offered:
            text = f"refuses all of {judge.offered} calls: {'; '.join(sorted(judge.reasons)[:3])}"
            judge.violations.append(Violation("refusal", text))
        return dict.fromkeys(_TRACED, "it takes no case")
    return _judge_traced(judge, options, accepted)


def _judge_traced(judge: Judge, options: Options, dtypes: Sequence[torch.dtype]) -> dict[str, str]:
    from . import tracing
    from .cases import tensors

    skipped = {}
    for dtype in dtypes:
        cases = list(judge.spec.inputs(InputMaker(dtype, options.device, options.seed)))
        if not any(tensors(judge.spec, case) for case in cases):
            return dict.fromkeys(_TRACED, "it takes no tensors")
        if options.wants("fake"):
            skipped["fake"] = tracing.check_fake(judge, cases, dtype)
    dtype = dtypes[-1]  # compilation and capture take seconds: once, in the dtype of most models
    if options.wants("compile"):
        skipped["compile"] = tracing.check_compile(judge, options.device, dtype, options.seed)
    if options.wants("graph"):
        skipped["graph"] = tracing.check_graph(judge, options.device, dtype, options.seed)
    return skipped


def _result(judge: Judge, check: str, skipped: str) -> CheckResult:
    from .diagnosis import diagnose

    violations = [violation for violation in judge.violations if violation.check == check]
    ran = judge.ran.get(check, 0)
    if violations:
        notes = diagnose(judge) if check in ("accuracy", "overflow") else []
        return CheckResult(check, Status.FAILED, ran, violations, notes)
    if not ran:
        return CheckResult(check, Status.SKIPPED, notes=[skipped or "no case of this kind"])
    return CheckResult(check, Status.PASSED, ran)


def _capability(device: str) -> int:
    """``major * 10 + minor`` of the device; 0 where it has none."""
    import torch

    module = torch.get_device_module(torch.device(device))
    if not hasattr(module, "get_device_capability"):
        return 0
    major, minor = module.get_device_capability(device)
    return int(major) * 10 + int(minor)


def _synchronizer(device: str) -> Callable[[], None]:
    import torch

    module = torch.get_device_module(torch.device(device))
    wait: Callable[[], None] = getattr(module, "synchronize", lambda: None)
    return wait
