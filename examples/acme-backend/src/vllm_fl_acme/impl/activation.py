"""Step 2: gated activations, as a kernel in Triton."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _silu_and_mul(x, out, d, row_stride, BLOCK: tl.constexpr):
    """One row and `BLOCK` columns a program; the product is in float32 and rounded once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < d
    gate = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + d + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * d + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_and_mul_acme(x: Tensor) -> Tensor:
    """``silu(x[..., :d]) * x[..., d:]``, with d half of the last dimension.

    Raises:
        NotImplementedError: the last dimension is not contiguous.
    """
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise NotImplementedError(f"x: the last dimension has stride {x.stride(-1)}, expected 1")
    d = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], d))
    if out.numel():
        rows = x if x.dim() == 2 else x.reshape(-1, 2 * d)
        _silu_and_mul[(rows.shape[0], triton.cdiv(d, _BLOCK))](rows, out, d, rows.stride(0), BLOCK=_BLOCK)
    return out


def supports_silu_and_mul(x: Tensor) -> bool | str:
    """Why the kernel does not take `x`, if it does not."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter computes bfloat16 wrongly" if x.dtype == torch.bfloat16 else True
    return "Triton has no driver for the CPU" if x.device.type == "cpu" else True
