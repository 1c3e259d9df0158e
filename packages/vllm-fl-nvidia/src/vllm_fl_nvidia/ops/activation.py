"""Gated activations by vLLM's compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    """See :func:`vllm_fl.catalog.activation.silu_and_mul`."""
    out = _half(x)
    if out.numel():
        torch.ops._C.silu_and_mul(out, x.contiguous())
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :func:`vllm_fl.catalog.activation.gelu_and_mul`."""
    if approximate not in ("none", "tanh"):
        raise NotImplementedError(f"approximate: {approximate!r} is not one of none, tanh")
    out = _half(x)
    kernel = torch.ops._C.gelu_tanh_and_mul if approximate == "tanh" else torch.ops._C.gelu_and_mul
    if out.numel():
        kernel(out, x.contiguous())
    return out


def _half(x: Tensor) -> Tensor:
    if x.shape[-1] % 2:
        raise ValueError(f"the last dimension of x is gate and value in halves; {x.shape[-1]} is odd")
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
