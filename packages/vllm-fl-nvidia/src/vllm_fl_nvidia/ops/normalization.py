"""RMS norm by vLLM's compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.normalization.rms_norm`.

    With a residual the kernel works in place, on copies here: the operator leaves its arguments as they are. vLLM's
    own layer needs no copies.

    Raises:
        NotImplementedError: `weight` is of another dtype than `x`.
    """
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    if weight.dtype != x.dtype or (residual is not None and residual.dtype != x.dtype):
        raise NotImplementedError("vLLM's rms_norm takes one dtype for input, residual and weight")
    if residual is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
        return out
    out, total = (t.clone(memory_format=torch.contiguous_format) for t in (x, residual))
    if x.numel():
        torch.ops._C.fused_add_rms_norm(out, total, weight, epsilon)
    return out, total
