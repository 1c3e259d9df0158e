"""How far two results are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_fl.catalog import DEFAULT_TOLERANCES, OpSpec
from vllm_fl.dispatch.types import dtype_name


@dataclass(frozen=True)
class Difference:
    """One tensor against another.

    Args:
        what: which tensor: ``result 0``, ``argument 'key_cache'``.
        within: whether every entry is within the tolerance.
        max_abs: largest absolute difference; infinite where one is NaN or infinite and the other is not.
        max_ulp: largest difference in units of the last place of the expected value, of which what is below the
            absolute tolerance counts as large as that; of integers the absolute difference.
        outside: number of entries outside of the tolerance.
        entries: number of entries.
        index: where the worst entry is; empty for a scalar, or where nothing differs.
        got: its value.
        expected: what it should be.
        text: what else is wrong: another shape or dtype; empty if nothing.
    """

    what: str
    within: bool
    max_abs: float = 0.0
    max_ulp: float = 0.0
    outside: int = 0
    entries: int = 0
    index: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0
    text: str = ""

    def __str__(self) -> str:
        if self.text:
            return f"{self.what} {self.text}"
        if self.within:
            return f"{self.what} is within tolerance (at most {self.max_abs:.3g} off)"
        where = f" at {list(self.index)}" if self.index else ""
        return (
            f"{self.what} is outside of the tolerance in {self.outside} of {self.entries} entries: {self.got:.6g}"
            f"{where}, expected {self.expected:.6g}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The difference as plain data."""
        return {**asdict(self), "index": list(self.index)}


def measure(got: Tensor, expected: Tensor, tolerance: tuple[float, float], what: str) -> Difference:
    """Compare entry by entry; NaN and infinities have to be where `expected` has them.

    Args:
        got: a tensor; units of the last place are those of its dtype.
        expected: what it is compared with, of any dtype.
        tolerance: (relative, absolute); integers have to be equal.
        what: the tensor's name.
    """
    if got.shape != expected.shape:
        return Difference(what, False, text=f"has shape {list(got.shape)}, expected {list(expected.shape)}")
    if not got.numel():
        return Difference(what, True)
    exact, want = got.detach().to(torch.float64), expected.detach().to(got.device, torch.float64)
    same = (exact == want) | (exact.isnan() & want.isnan())
    error = torch.where(same, 0.0, (exact - want).abs().nan_to_num(nan=float("inf"), posinf=float("inf")))
    limit = tolerance[1] + tolerance[0] * want.abs().nan_to_num(posinf=0.0) if got.is_floating_point() else 0.0
    outside = error > limit
    worst = int(torch.where(outside, error, -1.0).argmax()) if bool(outside.any()) else int(error.argmax())
    differs = float(error.flatten()[worst]) > 0
    place = torch.unravel_index(torch.tensor(worst), got.shape) if differs and got.dim() else ()
    return Difference(
        what=what,
        within=not bool(outside.any()),
        max_abs=float(error.max()),
        max_ulp=float((error / _ulp(want, got.dtype, tolerance[1])).max()),
        outside=int(outside.sum()),
        entries=got.numel(),
        index=tuple(int(i) for i in place),
        got=float(exact.flatten()[worst]),
        expected=float(want.flatten()[worst]),
    )


def _ulp(values: Tensor, dtype: torch.dtype, least: float) -> Tensor:
    """The distance of neighbouring numbers of `dtype` around each value; values below `least` count as that."""
    if not dtype.is_floating_point:
        return torch.ones_like(values)
    facts = torch.finfo(dtype)
    finite = values.abs().nan_to_num(posinf=facts.max).clamp(min=max(facts.smallest_normal, least), max=facts.max)
    _, exponent = torch.frexp(finite)
    return torch.ldexp(torch.full_like(values, facts.eps), exponent - 1)


def tolerance_of(spec: OpSpec, value: Tensor) -> tuple[float, float]:
    """The operator's (relative, absolute) tolerance for a result of the dtype of `value`."""
    name = dtype_name(value.dtype)
    return spec.tolerance(value.dtype) if name in DEFAULT_TOLERANCES or name in spec.tolerances else (0.0, 0.0)


def differences(
    spec: OpSpec,
    got: tuple[tuple[Any, ...], Mapping[str, Any]],
    expected: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> list[Difference]:
    """Compare two outcomes of an operator: (results, written arguments by name), in canonical form.

    What is no tensor is compared by equality.
    """
    pairs = [(f"result {i}", a, b) for i, (a, b) in enumerate(zip(got[0], expected[0], strict=False))]
    pairs += [(f"argument {name!r}", value, expected[1][name]) for name, value in got[1].items() if name in expected[1]]
    found = []
    if len(got[0]) != len(expected[0]):
        found.append(Difference("the call", False, text=f"has {len(got[0])} results, expected {len(expected[0])}"))
    for what, a, b in pairs:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            found.append(measure(a, b, tolerance_of(spec, a), what))
        elif a is not b and a != b:
            found.append(Difference(what, False, text=f"is {a!r}, expected {b!r}"))
    return found
