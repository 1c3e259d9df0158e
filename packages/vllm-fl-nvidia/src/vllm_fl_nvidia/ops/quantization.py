"""FP8 and INT8 by vLLM's compiled kernels (CUTLASS for the product)."""

from __future__ import annotations

import torch
from torch import Tensor

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def per_token_group_quant_fp8(
    x: Tensor, group_size: int, eps: float = 1e-10, column_major_scales: bool = False, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.quantization.per_token_group_quant_fp8`.

    Raises:
        NotImplementedError: a float32 input, one that is empty or not contiguous, groups that are no multiple of 64, or
            columns first of more than a matrix.
    """
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8 as kernel

    if x.dtype == torch.float32 or not x.is_contiguous() or not x.numel():
        raise NotImplementedError("vLLM's per_token_group_quant_fp8 wants contiguous float16 or bfloat16, not empty")
    if group_size % 64 or (column_major_scales and x.dim() != 2):
        raise NotImplementedError("vLLM's per_token_group_quant_fp8 wants groups of a multiple of 64, and matrices")
    q, scales = kernel(x, group_size, eps, column_major_scales=column_major_scales, use_ue8m0=use_ue8m0)
    return q, scales


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: str, bias: Tensor | None = None
) -> Tensor:
    """See :func:`vllm_fl.catalog.quantization.scaled_mm`.

    Raises:
        NotImplementedError: float32 results, scales by groups of K, or matrices that CUTLASS cannot read or are empty.
    """
    from vllm import _custom_ops

    dtype = getattr(torch, out_dtype)
    grouped = scale_a.numel() not in (1, a.shape[0]) or scale_b.numel() not in (1, b.shape[1])
    is_readable = a.stride(1) == 1 and b.stride(0) == 1
    if dtype == torch.float32 or grouped or not is_readable or a.shape[1] % 16 or b.shape[1] % 16 or not a.numel():
        raise NotImplementedError(
            "vLLM's cutlass_scaled_mm wants float16 or bfloat16 results, scales by tensor, row or column, a row-major"
            " and a column-major matrix, and sizes that are multiples of 16"
        )
    return _custom_ops.cutlass_scaled_mm(a, b, scale_a, scale_b, dtype, bias)
