"""Quantised linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inputs import quantization as inputs
from .inputs import sized
from .spec import operator

if TYPE_CHECKING:
    from torch import Tensor


@operator(
    called_from="QuantFP8",
    cases=inputs.per_token_group_quant_fp8,
    sized=sized.per_token_group_quant_fp8,
    # One step of float8_e4m3fn, where x / scale lies between two of its numbers and x * (1 / scale) rounds otherwise.
    tolerances={"float8_e4m3fn": (2**-3, 2**-9)},
)
def per_token_group_quant_fp8(
    x: Tensor, group_size: int, eps: float = 1e-10, column_major_scales: bool = False, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise groups of neighbours of the last dimension to float8_e4m3fn, one scale a group.

    ``scale = max(amax, eps) / 448``, rounded up to a power of two if `use_ue8m0`; ``q = clamp(x / scale, -448, 448)``.

    Args:
        x: [..., K], floating.
        group_size: divides K.
        eps: least absolute maximum.
        column_major_scales: scales of a 2-D `x` with the token dimension contiguous.
        use_ue8m0: scales that are powers of two.

    Returns:
        q [..., K] float8_e4m3fn and scales [..., K / group_size] float32.
    """
    import torch

    shape = (*x.shape[:-1], x.shape[-1] // group_size)
    scales = x.new_empty(shape, dtype=torch.float32)
    if column_major_scales and x.dim() == 2:
        scales = x.new_empty((shape[1], shape[0]), dtype=torch.float32).t()
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


@operator(called_from="Fp8LinearMethod", cases=inputs.scaled_mm, sized=sized.scaled_mm)
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: str, bias: Tensor | None = None
) -> Tensor:
    """Product of two quantised matrices: ``(scale_a * a) (scale_b * b) + bias``, accumulated in float32.

    Args:
        a: [M, K], float8 or int8.
        b: [K, N], float8 or int8, any strides.
        scale_a: [1] or [M, 1] float32, or [M, K / group] for groups of K.
        scale_b: [1] or [1, N] float32, or [K / group, N / group] for blocks.
        out_dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        bias: [N], or None.

    Returns:
        [M, N] in `out_dtype`.
    """
    import torch

    return a.new_empty((a.shape[0], b.shape[1]), dtype=getattr(torch, out_dtype))
