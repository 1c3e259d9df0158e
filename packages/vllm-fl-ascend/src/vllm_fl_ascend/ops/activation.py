"""Gated activations."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_ascend.schemas import needs


@needs("npu::npu_swiglu")
def silu_and_mul(x: Tensor) -> Tensor:
    """``silu(x[..., :d]) * x[..., d:]``; see the catalogue."""
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    return torch.ops.npu.npu_swiglu(x, -1)


@needs("npu::npu_geglu")
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(x[..., :d]) * x[..., d:]``; see the catalogue.

    npu_gelu_mul does the same, but for at most 1024 columns.
    """
    if approximate not in ("none", "tanh"):
        raise NotImplementedError(f"npu_geglu has the forms 'none' and 'tanh' of GELU, not {approximate!r}")
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    return torch.ops.npu.npu_geglu(x, -1, 1 if approximate == "tanh" else 0, True)[0]
