"""Quantised linear layers: dynamic quantisation to float8 by groups, and the product of scaled matrices.

The product is a tiled one with float32 (int32 for int8) accumulation; scales of tensors, rows and columns are applied
at the end, those of groups and blocks after each step of K, whose length divides the group. The tile follows from the
number of rows, so that a weight is compiled for three tiles at most.

Products of float8 need a device of capability 8.9 or above; int8 runs on all. Quantisation runs on all: where the
device cannot convert to float8 the kernel does it bit by bit.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import cdiv, need_unit_stride, power_of_2, rows_of, warps_for
from .launch import fast
from .planned import planned

_TILE = 1024  # entries that a program quantises at least
_FLOAT8_ARCH = 89
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUT = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@triton.jit
def _float8_bits(x):
    """The bits of float8_e4m3fn for float32 values between -448 and 448, rounded to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Three bits of mantissa stay; the bias of the exponent falls from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 numbers are multiples of 2^-9. Adding 2^23 leaves a float32 no bits behind the point.
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    result = tl.where(magnitude < 0x3C800000, small, normal)
    return (result | ((bits >> 24) & 0x80)).to(tl.uint8)


@fast
@triton.jit(do_not_specialize=["rows", "x_inner", "scale_row_stride", "scale_group_stride"])
def _quantize_groups(
    x, quantized, scales, rows, groups, size, eps, scale_row_stride, scale_group_stride,
    x_inner, x_outer_stride, x_inner_stride,
    POWER_OF_2: tl.constexpr, CONVERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < size)[None, :]
    at = ((row // x_inner) * x_outer_stride + (row % x_inner) * x_inner_stride)[:, None] + column[None, :]
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), eps) / 448.0
    if POWER_OF_2:
        # Up to the next power of two, by the bits: a logarithm would round powers of two wrongly.
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    value = tl.minimum(tl.maximum(tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape)), -448.0), 448.0)
    result = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True) if CONVERTS else _float8_bits(value)
    tl.store(quantized + row[:, None] * size + column[None, :], result, mask=mask)
    scale_at = (row // groups) * scale_row_stride + (row % groups) * scale_group_stride
    tl.store(scales + scale_at, scale, mask=row < rows)


@planned
def per_token_group_quant_fp8(
    x: Tensor, group_size: int, eps: float = 1e-10, column_major_scales: bool = False, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.quantization.per_token_group_quant_fp8`."""
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"group_size: {group_size} does not divide the last dimension, {x.shape[-1]}")
    read = rows_of("x", x, group_size)
    groups = x.shape[-1] // group_size
    quantized = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    if column_major_scales and x.dim() == 2:
        scales = x.new_empty((groups, x.shape[0]), dtype=torch.float32).t()
    else:
        scales = x.new_empty((*x.shape[:-1], groups), dtype=torch.float32)
    if read.rows:
        block = power_of_2(group_size)
        per_program = max(_TILE // block, 1)
        row_stride, group_stride = (groups, 1) if scales.dim() != 2 else scales.stride()
        _quantize_groups[(cdiv(read.rows, per_program),)](
            read.tensor, quantized.view(torch.uint8), scales, read.rows, groups, group_size, eps, row_stride,
            group_stride, *read[2:], POWER_OF_2=use_ue8m0, CONVERTS=_has_float8(x), ROWS=per_program, BLOCK=block,
            num_warps=warps_for(per_program * block),
        )  # fmt: skip
    return quantized, scales


@triton.jit
def _load_scales(scales, index, count, stride, KIND: tl.constexpr):
    """One scale (KIND 0), or one for each index."""
    if KIND == 0:
        value = tl.load(scales) + tl.zeros(index.shape, tl.float32)
    else:
        value = tl.load(scales + index * stride, mask=index < count, other=0.0)
    return value


@fast
@triton.jit(do_not_specialize=["m", "scale_a_stride", "scale_a_group_stride"])
def _scaled_mm(
    a, b, scale_a, scale_b, bias, out, m, n, k,
    stride_a, stride_bk, stride_bn, scale_a_stride, scale_a_group_stride, scale_b_stride_k, scale_b_stride_n,
    group_a, group_bk, group_bn,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, HAS_BIAS: tl.constexpr, FLOAT: tl.constexpr, ACCUMULATOR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """KIND_A: one scale (0), one a row (1), one a row and group (2). KIND_B: one (0), one a column (1), blocks (2)."""
    # Programs of a band of rows follow each other, so that they find its columns of b in the cache.
    pid = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    band = pid // (BAND * blocks_n)
    height = tl.minimum(blocks_m - band * BAND, BAND)
    within = pid % (BAND * blocks_n)
    row = (band * BAND + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = within // height * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    a_at = a + row[:, None].to(tl.int64) * stride_a + step[None, :]
    b_at = b + step[:, None] * stride_bk + column[None, :].to(tl.int64) * stride_bn
    has_row, has_column = (row < m)[:, None], (column < n)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), ACCUMULATOR)
    for start in range(0, k, BLOCK_K):
        left = k - start
        x = tl.load(a_at, mask=has_row & (step < left)[None, :], other=0.0 if FLOAT else 0)
        y = tl.load(b_at, mask=has_column & (step < left)[:, None], other=0.0 if FLOAT else 0)
        if KIND_A == 2 or KIND_B == 2:
            part = tl.dot(x, y, out_dtype=tl.float32 if FLOAT else tl.int32).to(tl.float32)
            if KIND_A == 2:
                place = row * scale_a_stride + start // group_a * scale_a_group_stride
                part *= tl.load(scale_a + place, mask=row < m, other=0.0)[:, None]
            if KIND_B == 2:
                place = start // group_bk * scale_b_stride_k + column // group_bn * scale_b_stride_n
                part *= tl.load(scale_b + place, mask=column < n, other=0.0)[None, :]
            total += part
        else:
            # The tensor cores of some devices sum float8 products in less than float32: add up after each step.
            total = tl.dot(x, y, total, out_dtype=ACCUMULATOR, max_num_imprecise_acc=BLOCK_K)
        a_at += BLOCK_K
        b_at += BLOCK_K * stride_bk
    result = total.to(tl.float32)
    if KIND_A != 2:
        result *= _load_scales(scale_a, row, m, scale_a_stride, KIND_A)[:, None]
    if KIND_B != 2:
        result *= _load_scales(scale_b, column, n, scale_b_stride_n, KIND_B)[None, :]
    if HAS_BIAS:
        result += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    at = out + row[:, None].to(tl.int64) * n + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=has_row & has_column)


@planned
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out_dtype: str,
    bias: Tensor | None = None,
    *,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """See :func:`vllm_fl.catalog.quantization.scaled_mm`."""
    if out_dtype not in _OUT:
        raise NotImplementedError(f"out_dtype: {out_dtype!r} is not one of {', '.join(_OUT)}")
    if a.dtype != b.dtype or a.dtype not in (*_FLOAT8, torch.int8):
        raise NotImplementedError(f"a is {a.dtype} and b {b.dtype}; both must be the same float8, or int8")
    if a.dtype in _FLOAT8 and a.is_cuda and not _has_float8(a):
        raise NotImplementedError(f"products of float8 need device capability {_FLOAT8_ARCH}, this device has less")
    need_unit_stride("a", a)
    (m, k), n = a.shape, b.shape[1]
    out = a.new_empty((m, n), dtype=_OUT[out_dtype])
    if not m or not n:
        return out
    kind_a, group_a = _kind_of_a(scale_a, m, k)
    kind_b, group_bk, group_bn = _kind_of_b(scale_b, k, n)
    block_m, block_n, usual_warps, usual_stages = _tile(m)
    block_k = 128
    for group in (group_a, group_bk):
        block_k = min(block_k, group & -group)
    if block_k < 32:
        raise NotImplementedError(f"groups of {group_a} and {group_bk} along K; both must be multiples of 32")
    by_group = 2 in (kind_a, kind_b)
    _scaled_mm[(cdiv(m, block_m) * cdiv(n, block_n),)](
        a, b, scale_a, scale_b, bias, out, m, n, k, a.stride(0), b.stride(0), b.stride(1),
        *_strides(scale_a), *_strides(scale_b), group_a, group_bk, group_bn,
        KIND_A=kind_a, KIND_B=kind_b, HAS_BIAS=bias is not None, FLOAT=a.dtype != torch.int8,
        ACCUMULATOR=tl.int32 if a.dtype == torch.int8 and not by_group else tl.float32,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, BAND=8, num_warps=warps or usual_warps,
        num_stages=stages or usual_stages,
    )  # fmt: skip
    return out


def _tile(m: int) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps, stages."""
    if m <= 16:
        return 16, 64, 4, 4
    if m <= 256:
        return 64, 64, 4, 4
    return 128, 128, 8, 3


def _strides(scale: Tensor) -> tuple[int, int]:
    """Strides of the first and last dimension."""
    return (0, 0) if scale.dim() == 0 else (scale.stride(0), scale.stride(-1))


def _kind_of_a(scale: Tensor, m: int, k: int) -> tuple[int, int]:
    """KIND_A, and the entries of K that share a scale."""
    if scale.dim() == 2 and scale.shape[0] == m:
        groups = scale.shape[1]
        return (1, 1 << 30) if groups == 1 else (2, _group("scale_a", k, groups))
    if scale.numel() == 1:
        return 0, 1 << 30
    raise NotImplementedError(f"scale_a: shape {tuple(scale.shape)}, expected [1], [{m}, 1] or [{m}, {k} / group]")


def _kind_of_b(scale: Tensor, k: int, n: int) -> tuple[int, int, int]:
    """KIND_B, and the entries of K and of N that share a scale."""
    if scale.numel() == 1:
        return 0, 1 << 30, n
    if scale.dim() == 2 and scale.shape == (1, n):
        return 1, 1 << 30, 1
    if scale.dim() == 2:
        group = _group("scale_b", k, scale.shape[0])
        # Blocks are squares where that fits; the last one may then be narrower.
        is_square = cdiv(n, group) == scale.shape[1]
        return 2, group, group if is_square else _group("scale_b", n, scale.shape[1])
    raise NotImplementedError(f"scale_b: shape {tuple(scale.shape)}, expected [1], [1, {n}] or a matrix of blocks")


def _group(name: str, size: int, groups: int) -> int:
    if groups == 0 or size % groups:
        raise NotImplementedError(f"{name}: {groups} groups do not divide {size} entries")
    return size // groups


def _has_float8(x: Tensor) -> bool:
    """Whether the device of `x` computes with float8."""
    return x.is_cuda and _capability(x.device.index) >= _FLOAT8_ARCH


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return int(major * 10 + minor)
