"""All implementations of an operator on the catalogue's inputs: error against float64, and time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_fl.catalog import Case, InputMaker, OpSpec
from vllm_fl.dispatch import OpManager, get_default_manager
from vllm_fl.dispatch.links import Link
from vllm_fl.dispatch.types import OpImpl, dtype_name
from vllm_fl.errors import FLError, UnknownOperatorError, did_you_mean
from vllm_fl.testing.cases import sized_case
from vllm_fl.testing.comparison import Truth, canonical, listed
from vllm_fl.testing.memory import Arguments
from vllm_fl.testing.subjects import reference_implementations

from .values import Difference, differences

_REPEATS = 15


class NothingToCompareError(FLError, LookupError):
    """The operator has no specification, or no inputs in the catalogue."""


@dataclass(frozen=True)
class OperatorResult:
    """One implementation in one dtype.

    Args:
        implementation: its id.
        dtype: of the floating inputs.
        cases: number of inputs that it took.
        refused: number of inputs that it does not take.
        failed: what it raised, for the first input that it failed on; empty if it did not fail.
        outside: number of inputs with an entry outside of the tolerance.
        worst: the largest difference to the float64 result, those outside of the tolerance first; None without any.
        worst_case: the name of that input.
        time_us: median time of one call on `timed_case`, microseconds; None if it does not take it.
        timed_case: the input that was timed.
    """

    implementation: str
    dtype: str
    cases: int
    refused: int
    failed: str
    outside: int
    worst: Difference | None
    worst_case: str
    time_us: float | None
    timed_case: str

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data, ready for JSON."""
        return {**vars(self), "worst": self.worst.as_dict() if self.worst is not None else None}


def compare_operator(
    op_name: str,
    *,
    dtypes: Sequence[torch.dtype] = (),
    device: str = "cpu",
    tokens: int = 256,
    manager: OpManager | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> list[OperatorResult]:
    """Run every implementation that is available here, whatever the policy says.

    Args:
        op_name: the operator.
        dtypes: the floating dtypes; those of the specification if empty.
        device: where the inputs are.
        tokens: size of the timed input, where the catalogue can make one of any size.
        manager: whose implementations; the default manager if None.
        progress: told what is being done.

    Raises:
        UnknownOperatorError: there is no such operator.
        NothingToCompareError: nothing is known about its arguments.
        MissingReferenceError: no reference implementations are installed.
    """
    manager = manager or get_default_manager()
    manager.ensure_initialized()
    spec = manager.registry.spec(op_name)
    if spec is None and not manager.registry.get_implementations(op_name):
        known = manager.registry.known_operators()
        raise UnknownOperatorError(f"there is no operator {op_name!r}{did_you_mean(op_name, known)}")
    if spec is None or spec.cases is None:
        raise NothingToCompareError(f"operator {op_name!r} has no inputs in the catalogue to compare on")
    truth = Truth(spec, reference_implementations()[op_name])
    results = []
    for dtype in dtypes or [getattr(torch, name) for name in spec.dtypes]:
        cases = list(spec.inputs(InputMaker(dtype, device)))
        expected = [truth(case) for case in cases]
        timed = sized_case(spec, InputMaker(dtype, device), tokens)
        for impl in manager.registry.get_implementations(op_name):
            if impl.is_available():
                progress(f"{impl.impl_id}, {dtype_name(dtype)}")
                results.append(_Trial(spec, impl).run(cases, expected, timed, dtype_name(dtype)))
    return results


class _Trial:
    """One implementation on its way through the inputs."""

    def __init__(self, spec: OpSpec, impl: OpImpl) -> None:
        self.spec, self.impl, self.link = spec, impl, Link(impl, 0, spec)
        self.failed = ""

    def run(self, cases: Sequence[Case], expected: Sequence[Any], timed: Case, dtype: str) -> OperatorResult:
        found: list[tuple[str, list[Difference]]] = []
        refused = 0
        for case, truth in zip(cases, expected, strict=True):
            outcome = self._outcome(case)
            if outcome is None:
                refused += 1
            elif not isinstance(outcome, str):
                found.append((case.name, differences(self.spec, outcome, truth)))
            else:
                self.failed = self.failed or f"{case.name}: {outcome}"
        time_us = self._time(timed)  # which may be what it fails on
        every = [(difference, name) for name, listed_ in found for difference in listed_]
        worst, worst_case = max(every, key=lambda pair: (not pair[0].within, pair[0].max_ulp), default=(None, ""))
        return OperatorResult(
            implementation=self.impl.impl_id,
            dtype=dtype,
            cases=len(found),
            refused=refused,
            failed=self.failed,
            outside=sum(not all(d.within for d in listed_) for _, listed_ in found),
            worst=worst,
            worst_case=worst_case,
            time_us=time_us,
            timed_case=timed.name,
        )

    def _outcome(self, case: Case) -> tuple[tuple[Any, ...], dict[str, Any]] | str | None:
        """Results and written arguments; what it raised; None if it does not take the input."""
        arguments = Arguments(self.spec, case)
        if self.link.refusal(arguments.args, arguments.kwargs) is not None:
            return None
        try:
            results = listed(self.link.call(*arguments.args, **arguments.kwargs))
        except NotImplementedError:
            return None
        except Exception as error:  # an implementation may fail in any way; that is a result, too
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        written = {name: arguments.by_name[name] for name in self.spec.mutates if name in arguments.by_name}
        return canonical(self.spec, arguments.by_name, results), written

    def _time(self, case: Case) -> float | None:
        outcome = self._outcome(case)
        if isinstance(outcome, str):
            self.failed = self.failed or f"{case.name}: {outcome}"
        if outcome is None or self.failed:
            return None
        return statistics.median(self._seconds(case)) * 1e6

    def _seconds(self, case: Case) -> Iterator[float]:
        for _ in range(_REPEATS):
            arguments = Arguments(self.spec, case)
            _wait()
            begin = time.perf_counter()
            self.link.call(*arguments.args, **arguments.kwargs)
            _wait()
            yield time.perf_counter() - begin


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
