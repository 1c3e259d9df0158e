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
    if not 2 <= x.dim() <= 8:
        raise NotImplementedError(f"npu_rms_norm takes 2 to 8 dimensions, not {x.dim()}")
    dtypes = {x.dtype, weight.dtype, x.dtype if residual is None else residual.dtype}
    if len(dtypes) > 1:
        raise NotImplementedError(f"npu_rms_norm needs one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    if residual is None:
        if x.numel() == 0:
            return x.new_empty(x.shape)
        return torch.ops.npu.npu_rms_norm(x, weight, epsilon)[0]
    if residual.shape != x.shape:
        raise NotImplementedError("npu_add_rms_norm does not broadcast a residual")
    if x.numel() == 0:
        return x.new_empty(x.shape), residual.new_empty(residual.shape)
    out, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, epsilon)
    return out, total
