"""What failures of accuracy have in common: an argument that is ignored, cases of one kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vllm_fl.dispatch.types import dtype_name

from .cases import tensors
from .judge import Judge, Outcome, Trial


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
        for label, change in _CHANGES.items():
            fits = {_fits(judge, trial, outcome, name, change) for trial, outcome in kept}
            if True in fits and False not in fits:
                yield f"it computes as if {name} were {label}"
                break


def _fits(judge: Judge, trial: Trial, outcome: Outcome, name: str, change: Callable[[Any], Any]) -> bool | None:
    """Whether a change of one argument explains a failure; None if the argument has that value anyway."""
    value = outcome.arguments.by_name.get(name, judge.spec.signature.parameters[name].default)
    other = change(value)
    if other is _NOT_OF_THIS_TYPE:
        return False
    if not isinstance(value, Tensor) and other == value:
        return None
    try:
        return judge.matches(outcome, trial.case, trial.dtype, **{name: other})
    except Exception:  # the reference may refuse the other value
        return False


_NOT_OF_THIS_TYPE = object()


def _if_type(kind: type, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: change(value) if type(value) is kind else _NOT_OF_THIS_TYPE


def _constant(other: Any) -> Callable[[Any], Any]:
    return _if_type(type(other), lambda value: other)


def _filled(number: float) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        is_wide = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1
        return torch.full_like(value, number) if is_wide else _NOT_OF_THIS_TYPE

    return change


#: Description -> function from the value of an argument to another one that is worth a try.
_CHANGES: dict[str, Callable[[Any], Any]] = {
    **{str(flag): _constant(flag) for flag in (True, False)},
    **{f"{number:g}": _constant(number) for number in (0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1.0)},
    "10 times as large": _if_type(float, lambda value: value * 10),
    "a tenth of it": _if_type(float, lambda value: value / 10),
    "None": _if_type(Tensor, lambda value: None),
    "zeros": _filled(0.0),
    "ones": _filled(1.0),
}


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
