"""PyTorch implementations of different speed, for `tuning.py` on machines without other ones; the slowest come first.

A module for VLLM_FL_PLUGIN_MODULES, with VLLM_FL_PREFER=vendor. ``vendor.float64`` computes everything in float64,
``vendor.rows`` takes the tokens eight by eight; the reference's come last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_fl.dispatch import BackendImplKind, OpImpl

ROWS = 8


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    total = x if residual is None else x + residual
    wide = total.double()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        y = y * weight.double()
    return y.to(x.dtype) if residual is None else (y.to(x.dtype), total)


def rms_norm_by_rows(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    total = x if residual is None else x + residual
    shape = (x.shape[-1],)
    parts = [torch.nn.functional.rms_norm(rows, shape, weight, epsilon) for rows in total.split(ROWS)]
    y = torch.cat(parts) if parts else total.clone()
    return y if residual is None else (y, total)


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def silu_and_mul_by_rows(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    pairs = zip(gate.split(ROWS), up.split(ROWS), strict=True)
    parts = [torch.nn.functional.silu(g) * u for g, u in pairs]
    return torch.cat(parts) if parts else gate * up


def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> Any:
    if not is_neox_style:
        raise NotImplementedError("interleaved pairs")
    half = cos.shape[-1]
    c, s = (table[position_ids].unsqueeze(1).double() for table in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        a, b = x[..., :half].double(), x[..., half : 2 * half].double()
        return torch.cat(((a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype), x[..., 2 * half :]), -1)

    return rotated(query) if key is None else (rotated(query), rotated(key))


IMPLEMENTATIONS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("rms_norm", "float64", rms_norm),
    ("rms_norm", "rows", rms_norm_by_rows),
    ("silu_and_mul", "float64", silu_and_mul),
    ("silu_and_mul", "rows", silu_and_mul_by_rows),
    ("rotary_embedding", "float64", rotary_embedding),
)


def register(registry: Any) -> None:
    for place, (operator, vendor, fn) in enumerate(IMPLEMENTATIONS):
        registry.register_impl(
            OpImpl(operator, f"vendor.{vendor}", BackendImplKind.VENDOR, fn, vendor=vendor, priority=200 - place)
        )
