"""Results against the float64 results of the reference distribution, and against the operator's meta function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from vllm_fl.catalog import Case, OpSpec

from .memory import same_bits

#: Elements of a case's tensors up to which float64 results are computed on the CPU, whatever the device.
ON_CPU = 1 << 21


#: Results, and written arguments by name.
Expected = tuple[tuple[Any, ...], dict[str, Any]]


def listed(result: Any) -> tuple[Any, ...]:
    """The results of a call as a tuple."""
    if result is None:
        return ()
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def canonical(spec: OpSpec, arguments: Mapping[str, Any], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """`results` in the operator's canonical form."""
    return spec.canonical(arguments, results) if spec.canonical else results


class Truth:
    """What the reference distribution computes in float64.

    Args:
        spec: the operator.
        reference: the reference implementation.
    """

    def __init__(self, spec: OpSpec, reference: Callable[..., Any]) -> None:
        self.spec, self._reference = spec, reference

    def __call__(self, case: Case, changes: Mapping[str, Any] | None = None) -> Expected:
        """Results in canonical form, and written arguments by name, in float64.

        Args:
            case: the arguments.
            changes: other values for some of the arguments.
        """
        given = self.spec.signature.bind(*case.args, **case.kwargs).arguments
        size = sum(value.numel() for value in given.values() if isinstance(value, Tensor))
        wide = {name: _wide(value, size <= ON_CPU) for name, value in {**given, **(changes or {})}.items()}
        results = listed(self._reference(**wide))
        return canonical(self.spec, wide, results), {name: wide[name] for name in self.spec.mutates if name in wide}


def _wide(value: Any, on_cpu: bool) -> Any:
    if isinstance(value, Tensor):
        dtype = torch.float64 if value.is_floating_point() and value.element_size() > 1 else value.dtype
        return value.detach().to("cpu" if on_cpu else value.device, dtype, copy=True)
    # An argument that names the dtype of the result.
    is_dtype = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
    return "float64" if is_dtype else value


def difference(got: Tensor, want: Tensor, tolerance: tuple[float, float]) -> str | None:
    """How far `got` is from `want`; None if each entry is within the (relative, absolute) tolerance.

    Integers have to be equal, infinities the same, and NaN is where NaN is to be.
    """
    if got.shape != want.shape:
        return f"has shape {list(got.shape)}, expected {list(want.shape)}"
    want = want.to(got.device)
    if not got.is_floating_point():
        wrong = got.to(torch.int64) != want.to(torch.int64)
        return _worst(wrong, got, want) if wrong.any() else None
    exact = got.detach().to(torch.float64)
    want = want.to(torch.float64)
    error = (exact - want).abs()
    close = want.isfinite() & (error <= tolerance[1] + tolerance[0] * want.abs())
    wrong = ~(close | same_bits(exact, want))
    if not wrong.any():
        return None
    return f"{_worst(wrong, exact, want, error)} (tolerance {tolerance[0]:g} relative, {tolerance[1]:g} absolute)"


def _worst(wrong: Tensor, got: Tensor, want: Tensor, error: Tensor | None = None) -> str:
    count = int(wrong.sum())
    if error is None:
        index = int(wrong.flatten().to(torch.uint8).argmax())
    else:
        index = int(torch.where(wrong, error.nan_to_num(nan=float("inf")), -1.0).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(index), wrong.shape)] if wrong.dim() else []
    values = f"{got.flatten()[index].item():.6g}, expected {want.flatten()[index].item():.6g}"
    return f"differs in {count} of {wrong.numel()} entries; at {place} it is {values}"


def disagreements(fakes: tuple[Any, ...], results: tuple[Any, ...], of: str = "the operator's") -> Iterator[str]:
    """What results have other than the meta function says: their number, shape, dtype, device or strides."""
    if len(results) != len(fakes):
        yield f"{len(results)} results, {of} are {len(fakes)}"
        return
    for index, (result, fake) in enumerate(zip(results, fakes, strict=True)):
        if not isinstance(result, type(fake)) or not isinstance(result, Tensor):
            if not isinstance(result, type(fake)):
                yield f"result {index} is of type {type(result).__name__}, {of} is a {type(fake).__name__}"
            continue
        for name in ("shape", "dtype", "device"):
            mine, theirs = getattr(result, name), getattr(fake, name)
            if mine != theirs:
                shown = (list(mine), list(theirs)) if name == "shape" else (mine, theirs)
                yield f"result {index} has {name} {shown[0]}, {of} is {shown[1]}"
                break
        else:
            if _strides(result) != _strides(fake):
                yield f"result {index} has strides {list(result.stride())}, {of} are {list(fake.stride())}"


def _strides(value: Tensor) -> list[int]:
    """Strides of the dimensions that have any."""
    if not value.numel():
        return []
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
