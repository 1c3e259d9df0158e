"""Gated activations."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension, times the second half.

    On half-precision inputs SiLU is evaluated in float32 and rounded once before the product.
    """
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up).contiguous()


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of the first half of the last dimension, times the second half; evaluated as :func:`silu_and_mul` is."""
    gate, up = x.chunk(2, -1)
    return functional.gelu(gate, approximate=approximate).mul_(up).contiguous()
