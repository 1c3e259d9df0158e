"""Calls one implementation with one case after the other, and notes what is wrong with each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllm_fl.catalog import DEFAULT_TOLERANCES, Case, OpSpec
from vllm_fl.dispatch.links import Link
from vllm_fl.dispatch.parameters import text_of
from vllm_fl.dispatch.types import OpImpl, dtype_name

from .cases import NO_OPTION, is_empty, is_strided, overflows
from .comparison import Expected, Truth, canonical, difference, disagreements, listed
from .imports import unimportable
from .memory import Arguments, same_bits
from .results import Violation

#: Cases that failed and whose results are kept for the diagnosis.
KEPT = 4


@dataclass(frozen=True)
class Outcome:
    """One call: its results, or None with the reason if the implementation refused or failed."""

    arguments: Arguments
    results: tuple[Any, ...] | None
    reason: str = ""

    def written(self) -> dict[str, Tensor]:
        """The arguments that the operator may write, by name."""
        return {name: value for name, value in self.arguments.tensors() if name in self.arguments.spec.mutates}

    def canonical(self) -> tuple[Any, ...]:
        """The results in the operator's canonical form."""
        return canonical(self.arguments.spec, self.arguments.by_name, self.results or ())


@dataclass
class Trial:
    """A case that was compared with float64: whether it failed, and if so what came out (for some of them)."""

    case: Case
    dtype: torch.dtype
    failed: bool
    outcome: Outcome | None = None


@dataclass
class Judge:
    """Judges one implementation.

    Args:
        impl: the implementation.
        spec: the operator.
        truth: float64 results.
        synchronize: waits for the device, so that its errors belong to the call that made them.
    """

    impl: OpImpl
    spec: OpSpec
    truth: Truth
    synchronize: Callable[[], None]
    violations: list[Violation] = field(default_factory=list)
    ran: dict[str, int] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    offered: int = 0
    refused: int = 0
    reasons: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.link = Link(self.impl, 0, self.spec)

    def case(self, case: Case, dtype: torch.dtype) -> None:
        """Judge a case: first with contiguous inputs, against float64; then as it is, against the first."""
        plain = self.offer(case, dtype, contiguous=True)
        if plain.results is not None:
            self._examine(plain, case, dtype)
            self._against_truth(plain, case, dtype)
        if is_strided(self.spec, case):
            self.strided(case, dtype, plain)

    def strided(self, case: Case, dtype: torch.dtype, plain: Outcome | None = None) -> None:
        """Judge a case whose inputs are not contiguous; `plain` is the same with contiguous ones."""
        plain = plain or self.offer(case, dtype, contiguous=True)
        outcome = self.offer(case, dtype)
        if outcome.results is None:
            return
        self._examine(outcome, case, dtype)
        self.count("strides")
        is_taken = plain.results is not None
        want = (plain.canonical(), plain.written()) if is_taken else self._truth_of(case, dtype)
        if want is None:
            return
        for text in self._differences(outcome, want, dtype):
            self.note("strides", f"{text}, which contiguous inputs give", case, dtype)

    def option(self, name: str, case: Case, dtype: torch.dtype) -> None:
        """Judge a call with an option that does not exist: it has to be refused."""
        outcome = self._call(case)
        self.count("refusal")
        if isinstance(outcome, Outcome):
            self.note("refusal", f"takes {name}={NO_OPTION!r} and computes something", case, dtype)
        elif written := outcome[1].written(allowed=False):
            self.note("refusal", f"{_told(outcome[0])} after {'; '.join(written)}", case, dtype)

    def repeat(self, case: Case, dtype: torch.dtype, times: int = 3) -> None:
        """Judge whether the same call gives the same bits."""
        first = self.offer(case, dtype)
        if first.results is None:
            return
        for _ in range(times - 1):
            again = self.offer(case, dtype)
            self.count("determinism")
            values = [*zip(first.canonical(), again.canonical(), strict=False)]
            values += [*zip(first.written().values(), again.written().values(), strict=True)]
            for index, (one, two) in enumerate(values):
                count = int((~same_bits(one, two)).sum()) if isinstance(one, Tensor) else 0
                if count:
                    self.note("determinism", f"value {index} differs between calls in {count} entries", case, dtype)
                    return

    def parameters(self, case: Case, dtype: torch.dtype) -> None:
        """Judge a case with each value of each parameter that is not the default."""
        usual = self.link
        for parameter in self.impl.parameters:
            for text, value in parameter.by_text.items():
                if text == text_of(parameter.default):
                    continue
                self.link = Link(self.impl, 0, self.spec, function=partial(self.impl.fn, **{parameter.name: value}))
                self._with_parameters(replace(case, name=f"{case.name}, {parameter.name}={text}"), dtype)
        self.link = usual

    def _with_parameters(self, case: Case, dtype: torch.dtype) -> None:
        outcome = self.offer(case, dtype)
        want = self._truth_of(case, dtype) if outcome.results is not None else None
        if want is not None:
            self.count("parameters")
            for text in self._differences(outcome, want, dtype):
                self.note("parameters", text, case, dtype)

    def offer(self, case: Case, dtype: torch.dtype, contiguous: bool = False) -> Outcome:
        """Call the implementation; a refusal is counted, an exception is noted."""
        self.offered += 1
        self.count("refusal")
        answer = self._call(case, contiguous)
        if isinstance(answer, Outcome):
            return answer
        error, arguments = answer
        written = arguments.written(allowed=False)
        if isinstance(error, (NotImplementedError, str)):
            self.refused += 1
            self.reasons.add(str(error))
            if written:
                self.note("refusal", f"{_told(error)} after {'; '.join(written)}", case, dtype)
        else:
            check = self._check_of(case, contiguous)
            after = f", after {'; '.join(written)}" if written else ""
            self.note(check, f"{_told(error)}{after}; NotImplementedError says that a call does not fit", case, dtype)
        return Outcome(arguments, None, _told(error))

    def note(self, check: str, text: str, case: Case, dtype: torch.dtype) -> None:
        self.violations.append(Violation(check, text, case.name, dtype_name(dtype)))

    def count(self, check: str) -> None:
        self.ran[check] = self.ran.get(check, 0) + 1

    def tolerance(self, dtype: torch.dtype, inputs: torch.dtype) -> tuple[float, float]:
        """Tolerance for a value of `dtype`: that of the coarser of it and `inputs`."""
        found = [self.spec.tolerance(d) for d in {dtype, inputs} if dtype_name(d) in self._tolerances]
        return max(found, default=(0.0, 0.0))

    @property
    def _tolerances(self) -> set[str]:
        return {*DEFAULT_TOLERANCES, *self.spec.tolerances}

    def _call(self, case: Case, contiguous: bool = False) -> Outcome | tuple[Exception | str, Arguments]:
        arguments = Arguments(self.spec, case, contiguous)
        refusal = self.link.refusal(arguments.args, arguments.kwargs)
        if refusal is not None:
            return refusal, arguments
        try:
            results = listed(self.link.call(*arguments.args, **arguments.kwargs))
            self.synchronize()
        except Exception as error:  # an implementation may fail in any way; it is what is looked for
            return error, arguments
        return Outcome(arguments, results)

    def _check_of(self, case: Case, contiguous: bool) -> str:
        """The check that an exception belongs to."""
        if is_empty(self.spec, case):
            return "empty"
        if not contiguous and is_strided(self.spec, case):
            return "strides"
        return "refusal"

    def _examine(self, outcome: Outcome, case: Case, dtype: torch.dtype) -> None:
        """Form of the results, and what was written."""
        arguments = outcome.arguments
        results = outcome.results or ()
        fakes = listed(self.spec.fake(*arguments.args, **arguments.kwargs))
        for text in disagreements(fakes, results):
            self.note("results", text, case, dtype)
        for path in results:
            if isinstance(path, str) and (problem := unimportable(path)):
                self.note("results", problem, case, dtype)
        self.count("results")
        for text in arguments.written():
            self.note("in-place", text, case, dtype)
        for index, result in enumerate(results):
            name = arguments.alias(result) if isinstance(result, Tensor) and result.numel() else None
            if name is not None:
                self.note("in-place", f"result {index} is the memory of argument {name!r}", case, dtype)
        self.count("in-place")

    def _against_truth(self, outcome: Outcome, case: Case, dtype: torch.dtype) -> None:
        check = "accuracy"
        if is_empty(self.spec, case):
            check = "empty"
        elif overflows(self.spec, case, dtype):
            check = "overflow"
        want = self._truth_of(case, dtype)
        if want is None:
            return
        found = list(self._differences(outcome, want, dtype))
        for text in found:
            self.note(check, text, case, dtype)
        self.count(check)
        kept = outcome if found and sum(trial.outcome is not None for trial in self.trials) < KEPT else None
        if check != "empty":  # where there is nothing to compute, nothing can be learnt from a success
            self.trials.append(Trial(case, dtype, bool(found), kept))

    def _truth_of(self, case: Case, dtype: torch.dtype) -> Expected | None:
        try:
            return self.truth(case)
        except Exception as error:  # the reference on some device: the run goes on
            self.note("accuracy", f"not judged: the reference {_told(error)}", case, dtype)
            return None

    def _differences(self, outcome: Outcome, want: Expected, dtype: torch.dtype) -> Iterator[str]:
        results, written = outcome.results or (), outcome.written()
        if [_shape(result) for result in results] == [_shape(value) for value in want[0]]:
            results = outcome.canonical()
        for index, (result, expected) in enumerate(zip(results, want[0], strict=False)):
            if not isinstance(result, Tensor):
                continue
            text = difference(result, expected, self.tolerance(result.dtype, result.dtype))
            if text:
                yield f"result {index} {text}"
        for name, value in written.items():
            inputs = dtype if name in self.spec.rounded else value.dtype
            text = difference(value, want[1][name], self.tolerance(value.dtype, inputs))
            if text:
                yield f"argument {name!r} {text}"

    def matches(self, outcome: Outcome, case: Case, dtype: torch.dtype, **changes: Any) -> bool:
        """Whether the outcome is what float64 gives with other values for some arguments."""
        return not any(self._differences(outcome, self.truth(case, changes), dtype))


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _told(error: Exception | str) -> str:
    if isinstance(error, str):
        return f"refused ({error})"
    lines = str(error).strip().splitlines() or [""]
    return f"raised {type(error).__name__}: {lines[0][:200]}"
