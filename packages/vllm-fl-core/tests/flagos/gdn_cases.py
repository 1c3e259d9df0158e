"""The catalogue's cases of the gated delta net's operators, by name."""

from __future__ import annotations

import functools
from typing import Any

import torch
from kernel_inputs import DEVICE, maker

from vllm_fl.catalog import CATALOG, Case, InputMaker


def names(op_name: str) -> list[str]:
    """Names of the cases; without the large ones in the interpreter."""
    cases = CATALOG[op_name].cases
    assert cases is not None
    found = [case.name for case in cases(InputMaker(torch.float32))]
    return [name for name in found if DEVICE != "cpu" or name.partition(",")[0] != "large"]


@functools.cache
def _cases(op_name: str, dtype: torch.dtype) -> dict[str, Case]:
    cases = CATALOG[op_name].cases
    assert cases is not None
    return {case.name: case for case in cases(maker(dtype))}


def arguments(op_name: str, name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Fresh arguments of a case."""
    return tuple(_copy(value) for value in _cases(op_name, dtype)[name].args)


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return out.copy_(value)


def tolerances(op_name: str, dtype: torch.dtype) -> dict[str, float]:
    """For :func:`kernel_inputs.check`: written states carry the rounding of the activations."""
    rtol, atol = CATALOG[op_name].tolerance(dtype)
    return {"rtol": rtol, "atol": atol}
