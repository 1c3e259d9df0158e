"""A right and a wrong implementation of an operator, and the policies that choose them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_fl.dispatch import BackendImplKind, OpImpl, SelectionPolicy


def silu(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :half]) * x[..., half:]


def wrong_above_four(x: torch.Tensor) -> torch.Tensor:
    """Right, but for one entry where the first one of the input is beyond 4."""
    out = silu(x)
    if x.numel() and abs(float(x.flatten()[0])) > 4:
        out.flatten()[-1] += 64.0
    return out


def implementation(name: str, fn: Callable[..., object], **fields: Any) -> OpImpl:
    return OpImpl("silu_and_mul", f"vendor.{name}", BackendImplKind.VENDOR, fn, vendor=name, priority=100, **fields)


RIGHT = SelectionPolicy(per_op_order=(("silu_and_mul", ("vendor:right",)),))
WRONG = SelectionPolicy(per_op_order=(("silu_and_mul", ("vendor:wrong",)),))
