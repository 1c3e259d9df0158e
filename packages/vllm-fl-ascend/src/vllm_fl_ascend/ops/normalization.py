"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_ascend.schemas import needs


@needs("npu::npu_rms_norm", "npu::npu_add_rms_norm")
def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS normalisation, after adding a residual if there is one; see the catalogue."""
    if weight is None:
        raise NotImplementedError("npu_rms_norm needs a weight")
    _check("npu_rms_norm", 2, x, residual, weight)
    if x.numel() == 0:
        out = x.new_empty(x.shape)
        return out if residual is None else (out, out.clone())
    if residual is None:
        return torch.ops.npu.npu_rms_norm(x, weight, epsilon)[0]
    out, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, epsilon)
    return out, total


@needs("npu::npu_gemma_rms_norm")
def gemma_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """As `rms_norm`, with the weight stored as its distance from 1; PyTorch adds the residual."""
    _check("npu_gemma_rms_norm", 1, x, residual, weight)
    total = (x if residual is None else x + residual).contiguous()
    if x.numel() == 0:
        out = x.new_empty(x.shape)
    else:
        out = torch.ops.npu.npu_gemma_rms_norm(total, weight.contiguous(), epsilon)[0]
    return out if residual is None else (out, total)


def _check(name: str, least: int, x: Tensor, residual: Tensor | None, weight: Tensor) -> None:
    if not least <= x.dim() <= 8:
        raise NotImplementedError(f"{name} takes {least} to 8 dimensions, not {x.dim()}")
    dtypes = {x.dtype, weight.dtype, x.dtype if residual is None else residual.dtype}
    if len(dtypes) > 1:
        raise NotImplementedError(f"{name} needs one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    if residual is not None and residual.shape != x.shape:
        raise NotImplementedError(f"{name} does not broadcast a residual")
