"""What failures of accuracy have in common: an argument that is ignored, cases of one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_fl.dispatch.types import dtype_name

from .cases import tensors
from .judge import Judge, Outcome, Trial

_EPSILONS = (0.0, 1e-12, 1e-8, 1e-6, 1e-5)


def diagnose(judge: Judge) -> list[str]:
    """Sentences about the failures of a judge's comparisons with float64; empty if nothing fits all of them."""
    failed = [trial for trial in judge.trials if trial.failed]
    if not failed:
        return []
    notes = list(_as_if(judge, failed))
    if not notes:
        notes = list(_only_where(judge, failed))
    return notes


def _as_if(judge: Judge, failed: Sequence[Trial]) -> Iterator[str]:
    """Other values of one argument that explain every kept failure."""
    kept = [(trial, trial.outcome) for trial in failed if trial.outcome is not None]
    for name in judge.spec.signature.parameters:
        for label, change in _alternatives(name):
            fits = [_fits(judge, trial, outcome, name, change) for trial, outcome in kept]
            if any(fits) and False not in fits:
                yield f"it computes as if {name} were {label}"
                break


def _fits(judge: Judge, trial: Trial, outcome: Outcome, name: str, change: Callable[[Any], Any]) -> bool | None:
    """Whether the failure is explained by the change; None if the argument has that value anyway."""
    given = outcome.arguments.by_name
    default = judge.spec.signature.parameters[name].default
    value = given.get(name, default)
    other = change(value)
    if other is _NONE_OF_IT or (not isinstance(value, Tensor) and other == value):
        return False if other is _NONE_OF_IT else None
    try:
        return judge.matches(outcome, trial.case, trial.dtype, **{name: other})
    except Exception:  # the reference may refuse the other value
        return False


_NONE_OF_IT = object()


def _alternatives(name: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """(description, function from the value of an argument to another value that is worth a try)."""

    def fixed(value: Any, kind: type) -> Callable[[Any], Any]:
        return lambda given: value if type(given) is kind else _NONE_OF_IT

    for flag in (True, False):
        yield str(flag), fixed(flag, bool)
    for epsilon in _EPSILONS:
        yield f"{epsilon:g}", fixed(epsilon, float)
    yield "10 times as large", lambda given: given * 10 if type(given) is float else _NONE_OF_IT
    yield "a tenth of it", lambda given: given / 10 if type(given) is float else _NONE_OF_IT
    yield "1", fixed(1.0, float)
    yield "None", lambda given: None if isinstance(given, Tensor) else _NONE_OF_IT
    yield "zeros", lambda given: _filled(given, 0.0)
    yield "ones", lambda given: _filled(given, 1.0)


def _filled(given: Any, value: float) -> Any:
    if isinstance(given, Tensor) and given.is_floating_point() and given.element_size() > 1:
        return torch.full_like(given, value)
    return _NONE_OF_IT


def _only_where(judge: Judge, failed: Sequence[Trial]) -> Iterator[str]:
    """What all failures are and no success is."""
    passed = [trial for trial in judge.trials if not trial.failed]
    if not passed:
        yield "no case is right"
        return
    failed_traits = [_traits(judge, trial) for trial in failed]
    shared = set.intersection(*failed_traits)
    for trial in passed:
        shared -= _traits(judge, trial)
    if shared:
        yield f"only where {' and '.join(sorted(shared))}"


def _traits(judge: Judge, trial: Trial) -> set[str]:
    """What a case is, in words."""
    given = judge.spec.signature.bind(*trial.case.args, **trial.case.kwargs).arguments
    traits = {f"the dtype is {dtype_name(trial.dtype)}"}
    for name, parameter in judge.spec.signature.parameters.items():
        value = given.get(name, parameter.default)
        if value is None or isinstance(value, (bool, str)):
            traits.add(f"{name} is {value!r}")
        elif isinstance(value, Tensor) and "None" in str(parameter.annotation):
            traits.add(f"{name} is given")
    fake = judge.spec.fake(*trial.case.args, **trial.case.kwargs)
    first = fake if isinstance(fake, Tensor) else fake[0] if isinstance(fake, tuple) else None
    if not isinstance(first, Tensor):
        first = next(iter(tensors(judge.spec, trial.case).values()), None)
    if first is not None and first.dim():
        if first.shape[-1] % 2:
            traits.add("the last dimension is odd")
        if first.shape[0] == 1:
            traits.add("there is one token")
        if first.numel() > 1 << 16:
            traits.add("the tensors are large")
    return traits
