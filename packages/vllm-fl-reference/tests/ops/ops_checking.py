"""Runs an operator's case and compares all of it with the oracle: results, what it writes, what it must not touch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import ops_oracles
import ops_oracles_gdn
import ops_oracles_moe
import torch
from torch import Tensor

from vllm_fl.catalog import Case, OpSpec

ORACLES: Mapping[str, Callable[..., Any]] = {
    name: function
    for module in (ops_oracles, ops_oracles_moe, ops_oracles_gdn)
    for name, function in vars(module).items()
    if callable(function) and function.__module__ == module.__name__
}


def arguments(spec: OpSpec, case: Case) -> dict[str, Any]:
    """All arguments of the case by name; tensors are copies with the same strides."""
    bound = spec.signature.bind(*case.args, **case.kwargs)
    return {name: copy(value) for name, value in bound.arguments.items()}


def copy(value: Any) -> Any:
    """A tensor with storage of its own and the same strides; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.as_strided(
        value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0).clone(),
        value.shape,
        value.stride(),
        value.storage_offset(),
    )


def to_numpy(value: Any) -> Any:
    """Floating tensors as float64 arrays, integers as int64 ones, in memory of their own."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bool:
        return value.numpy().copy()
    return value.to(torch.float64 if value.is_floating_point() else torch.int64).numpy().copy()


def listed(result: Any) -> list[Any]:
    return [] if result is None else list(result) if isinstance(result, tuple) else [result]


def check(spec: OpSpec, fn: Callable[..., Any], case: Case, tolerances: OpSpec | None = None) -> None:
    """Raise AssertionError, with the case's name, if `fn` does not do what the specification says.

    Args:
        tolerances: take the tolerances of this specification.
    """
    args = arguments(spec, case)
    expected_args = {name: to_numpy(value) for name, value in args.items()}
    before = {name: copy(value) for name, value in args.items()}
    fakes = listed(spec.fake(**args))
    results = listed(fn(**args))
    expected = listed(ORACLES[spec.name](**expected_args))

    assert len(results) == len(fakes) == len(expected), f"{case.name}: {len(results)} results"
    for number, (result, fake, wanted) in enumerate(zip(results, fakes, expected, strict=True)):
        where = f"{spec.name}, {case.name}: result {number}"
        _agrees_with_fake(where, result, fake)
        compare(where, result, wanted, tolerances or spec)
    for name, value in args.items():
        where = f"{spec.name}, {case.name}: argument {name!r}"
        if name in spec.mutates:
            compare(where, value, expected_args[name], tolerances or spec)
        elif isinstance(value, Tensor):
            assert same_bits(value, before[name]), f"{where} was written"


def _agrees_with_fake(where: str, result: Tensor, fake: Tensor) -> None:
    assert result.shape == fake.shape, f"{where} has shape {result.shape}, the meta function says {fake.shape}"
    assert result.dtype == fake.dtype, f"{where} has dtype {result.dtype}, the meta function says {fake.dtype}"
    assert result.device == fake.device, f"{where} is on {result.device}, the meta function says {fake.device}"
    if result.numel():
        strides = [
            (real, wanted)
            for real, wanted, size in zip(result.stride(), fake.stride(), result.shape, strict=True)
            if size > 1
        ]
        assert all(real == wanted for real, wanted in strides), f"{where} has strides {result.stride()}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that takes NaN as equal to itself."""
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def compare(where: str, result: Tensor, wanted: Any, spec: OpSpec) -> None:
    wanted = torch.from_numpy(np.asarray(wanted))
    assert result.shape == wanted.shape, f"{where} has shape {result.shape}, not {wanted.shape}"
    if not result.is_floating_point():
        assert torch.equal(result.to(torch.int64), wanted.to(torch.int64)), f"{where}: {result} is not {wanted}"
        return
    relative, absolute = spec.tolerance(result.dtype)
    torch.testing.assert_close(
        result.to(torch.float64), wanted, rtol=relative, atol=absolute, msg=lambda text: f"{where}: {text}"
    )
