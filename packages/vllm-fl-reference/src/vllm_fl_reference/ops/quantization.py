"""Quantisation to float8, and products of quantised matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import compute_dtype

_FP8_MAX = 448.0  # largest finite float8_e4m3fn


def per_token_group_quant_fp8(
    x: Tensor, group_size: int, eps: float = 1e-10, column_major_scales: bool = False, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise groups of neighbours of the last dimension to float8_e4m3fn, one scale a group."""
    groups = x.to(compute_dtype(x.dtype)).unflatten(-1, (x.shape[-1] // group_size, group_size))
    scales = groups.abs().amax(-1).clamp(min=eps).div_(_FP8_MAX)
    if use_ue8m0:
        scales = _power_of_two_above(scales)
    scales = scales.to(torch.float32)
    q = (groups / scales.unsqueeze(-1)).clamp_(-_FP8_MAX, _FP8_MAX).flatten(-2).to(torch.float8_e4m3fn)
    column_major = column_major_scales and scales.dim() == 2
    return q.contiguous(), scales.t().contiguous().t() if column_major else scales.contiguous()


def _power_of_two_above(x: Tensor) -> Tensor:
    """The smallest power of two that is at least x; from the exponent itself, since a rounded logarithm can be less."""
    mantissa, exponent = torch.frexp(x)  # x = mantissa * 2 ** exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: str, bias: Tensor | None = None
) -> Tensor:
    """Product of two quantised matrices with scales for tensors, rows and columns, groups or blocks.

    Scales of whole rows and columns are applied to the product, scales inside K to the operands before it. Blocks are
    taken as squares where N allows it, so the last block of columns may be narrower.

    Raises:
        ValueError: scales of a shape that does not fit.
    """
    dtype = compute_dtype(scale_a.dtype)
    x, y = a.to(dtype), b.to(dtype)
    (rows, k), columns = a.shape, b.shape[1]
    row_scale = _outer_scale(scale_a, (rows, 1))
    if row_scale is None:
        x = x * _expand_rows(scale_a, k, "scale_a", a)
    column_scale = _outer_scale(scale_b, (1, columns))
    if column_scale is None:
        y = y * _expand_blocks(scale_b, k, columns, b)
    out = x @ y
    for scale in (row_scale, column_scale):
        if scale is not None:
            out.mul_(scale)
    if bias is not None:
        out.add_(bias)
    return out.to(getattr(torch, out_dtype))


def _outer_scale(scale: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """The scale, if it is one number or one for each row (column)."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    return scale if tuple(scale.shape) == shape else None


def _expand_rows(scale: Tensor, k: int, name: str, matrix: Tensor) -> Tensor:
    if scale.dim() != 2 or scale.shape[0] != matrix.shape[0] or scale.shape[1] == 0 or k % scale.shape[1]:
        raise _unfit(name, scale, matrix, "[1], [M, 1] or [M, K / group]")
    return scale.repeat_interleave(k // scale.shape[1], 1)


def _expand_blocks(scale: Tensor, k: int, columns: int, matrix: Tensor) -> Tensor:
    if scale.dim() != 2 or 0 in scale.shape or k % scale.shape[0]:
        raise _unfit("scale_b", scale, matrix, "[1], [1, N] or [K / group, N / group]")
    group = k // scale.shape[0]
    width = group if -(-columns // group) == scale.shape[1] else columns // scale.shape[1]
    if width == 0 or -(-columns // width) != scale.shape[1]:
        raise _unfit("scale_b", scale, matrix, "[1], [1, N] or [K / group, N / group]")
    return scale.repeat_interleave(group, 0).repeat_interleave(width, 1)[:, :columns]


def _unfit(name: str, scale: Tensor, matrix: Tensor, allowed: str) -> ValueError:
    return ValueError(
        f"scaled_mm: {name} of shape {list(scale.shape)} does not fit a matrix of shape {list(matrix.shape)}; "
        f"it must be {allowed}"
    )
