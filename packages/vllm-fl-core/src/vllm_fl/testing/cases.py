"""The calls that checks make: the catalogue's cases, numbers of tokens, other strides, options that do not exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vllm_fl.catalog import Case, InputMaker, OpSpec

NO_OPTION = "no-such-option"


def catalog_cases(spec: OpSpec, maker: InputMaker, tokens: Sequence[int]) -> Iterator[Case]:
    """The catalogue's cases, then one for each number of tokens."""
    yield from spec.inputs(maker)
    if spec.sized is not None:
        for count in tokens:
            yield spec.sized(maker, count)


def sized_case(spec: OpSpec, maker: InputMaker, tokens: int) -> Case:
    """One case of so many tokens; the catalogue's first case of an operator that has none of any size."""
    return spec.sized(maker, tokens) if spec.sized is not None else next(iter(spec.inputs(maker)))


def tensors(spec: OpSpec, case: Case) -> dict[str, Tensor]:
    """The arguments that are tensors, by name."""
    given = spec.signature.bind(*case.args, **case.kwargs).arguments
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def is_empty(spec: OpSpec, case: Case) -> bool:
    """Whether one of the tensors holds nothing."""
    return any(not value.numel() for value in tensors(spec, case).values())


def is_strided(spec: OpSpec, case: Case) -> bool:
    """Whether a tensor that the operator only reads is not contiguous."""
    return any(not value.is_contiguous() for name, value in tensors(spec, case).items() if name not in spec.mutates)


def overflows(spec: OpSpec, case: Case, dtype: torch.dtype) -> bool:
    """Whether the square of an input is past the largest number of `dtype`."""
    limit = torch.finfo(dtype).max ** 0.5
    found = (
        v for name, v in tensors(spec, case).items() if v.dtype == dtype and v.numel() and name not in spec.mutates
    )
    return any(bool((value.abs() > limit).any()) for value in found)


def other_strides(spec: OpSpec, case: Case) -> Iterator[Case]:
    """The case with the strides of its inputs changed: every other entry of a wider tensor, rows of a wider tensor, and
    one row for all."""
    for name, value in tensors(spec, case).items():
        if name in spec.mutates or not value.is_floating_point() or value.element_size() == 1 or not value.numel():
            continue
        # Vectors are parameters, which vLLM keeps contiguous.
        if value.dim() < 2 or value.shape[-1] == 1:
            continue
        size = value.shape[-1]
        every_other = value.new_zeros((*value.shape[:-1], 2 * size))[..., ::2].copy_(value)
        yield _with(spec, case, name, every_other, f"every other entry of a wider {name}")
        if value.shape[0] > 1:
            rows = value.new_zeros((*value.shape[:-1], size + 24))[..., 8 : 8 + size].copy_(value)
            yield _with(spec, case, name, rows, f"rows of a wider {name}")
            yield _with(spec, case, name, value[:1].expand_as(value), f"one row for all of {name}")


def unknown_options(spec: OpSpec, case: Case) -> Iterator[tuple[str, Case]]:
    """(argument, the case with a text in it that means nothing) for each argument that is a choice by name."""
    for name, parameter in spec.signature.parameters.items():
        if str(parameter.annotation) in ("str", "str | None"):
            yield name, _with(spec, case, name, NO_OPTION, f"{name}={NO_OPTION!r}")


def _with(spec: OpSpec, case: Case, name: str, value: Any, label: str) -> Case:
    given = dict(spec.signature.bind(*case.args, **case.kwargs).arguments)
    if name not in given:
        return replace(case, name=f"{case.name}, {label}", kwargs={**case.kwargs, name: value})
    given[name] = value
    positional = list(given)[: len(case.args)]
    args = tuple(given[key] for key in positional)
    return Case(f"{case.name}, {label}", args, {key: v for key, v in given.items() if key not in positional})
