"""Gated activations: one pass over both halves of each row.

Programs take `block` entries of one row. Any row stride is taken, the last dimension must be contiguous. Any device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import GRID_ROWS, cdiv, need_unit_stride
from .launch import fast
from .planned import planned

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


@triton.jit
def activate(x, KIND: tl.constexpr):
    """An activation of float32 values: silu, sigmoid, gelu (error function) or gelu_tanh."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "sigmoid":
        y = tl.sigmoid(x)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@fast
@triton.jit(do_not_specialize=["rows"])
def _activate_and_mul(
    x, out, rows, d, stride, KIND: tl.constexpr, BLOCK: tl.constexpr, ROWS_PER_LAYER: tl.constexpr
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64) * ROWS_PER_LAYER + tl.program_id(1)
    if row < rows:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = column < d
        gate = tl.load(x + row * stride + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + row * stride + d + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * d + column, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=mask)


@planned
def silu_and_mul(x: Tensor, *, block: int = 1024, warps: int = 4) -> Tensor:
    """See :func:`vllm_fl.catalog.activation.silu_and_mul`."""
    return _launch(x, "silu", block, warps)


@planned
def gelu_and_mul(x: Tensor, approximate: str = "none", *, block: int = 1024, warps: int = 4) -> Tensor:
    """See :func:`vllm_fl.catalog.activation.gelu_and_mul`."""
    kind = _GELU.get(approximate)
    if kind is None:
        raise NotImplementedError(f"approximate: {approximate!r} is not one of {', '.join(_GELU)}")
    return _launch(x, kind, block, warps)


def _launch(x: Tensor, kind: str, block: int, warps: int) -> Tensor:
    need_unit_stride("x", x)
    d = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], d))
    if out.numel() == 0:
        return out
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    grid = (cdiv(d, block), min(rows, GRID_ROWS), cdiv(rows, GRID_ROWS))
    _activate_and_mul[grid](
        flat, out, rows, d, flat.stride(0), KIND=kind, BLOCK=block, ROWS_PER_LAYER=GRID_ROWS, num_warps=warps
    )
    return out
