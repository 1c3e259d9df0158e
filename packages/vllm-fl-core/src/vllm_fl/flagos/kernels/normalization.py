"""RMS normalisation, with a residual or a gate: each row is read once and kept in registers.

A program takes one long row, or several short ones of at least `tile` entries (the heads of a query norm, the groups of
a gated norm). Sum, mean
of squares and products are in float32; the normalised value comes from the sum before that is rounded to the residual's
dtype. Rows beyond 16,384 entries are read twice. Any row strides are taken, the last dimension must be contiguous. Any
device.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from .activation import activate
from .common import cdiv, need_unit_stride, power_of_2, rows_of, warps_for
from .launch import fast
from .planned import planned

_TILE = 1024
_MOST = 16384  # entries of a row that fit into the registers of a program
_GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


@triton.jit
def _at(row, inner, outer_stride, inner_stride):
    """Where each row begins."""
    return (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride


@triton.jit
def _scale(weight, column, mask, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr):
    scale = tl.full(column.shape, 1.0, tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + OFFSET
    return scale


@fast
@triton.jit(do_not_specialize=["rows", "x_inner", "r_inner"])
def _rms_norm(
    x, residual, weight, out, total, rows, width, epsilon,
    x_inner, x_outer_stride, x_inner_stride, r_inner, r_outer_stride, r_inner_stride,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = _at(row, x_inner, x_outer_stride, x_inner_stride)[:, None] + column[None, :]
    result_at = row.to(tl.int64)[:, None] * width + column[None, :]
    s = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        r_at = _at(row, r_inner, r_outer_stride, r_inner_stride)[:, None] + column[None, :]
        s += tl.load(residual + r_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + result_at, s.to(total.dtype.element_ty), mask=mask)
    factor = tl.rsqrt(tl.sum(s * s, 1) / width + epsilon)
    scale = _scale(weight, column, column < width, HAS_WEIGHT, OFFSET)
    tl.store(out + result_at, (s * factor[:, None] * scale[None, :]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_of(x, residual, at, r_at, mask, HAS_RESIDUAL: tl.constexpr):
    s = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        s += tl.load(residual + r_at, mask=mask, other=0.0).to(tl.float32)
    return s


@fast
@triton.jit(do_not_specialize=["rows", "x_inner", "r_inner"])
def _rms_norm_long(
    x, residual, weight, out, total, rows, width, epsilon,
    x_inner, x_outer_stride, x_inner_stride, r_inner, r_outer_stride, r_inner_stride,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program, in pieces."""
    tl.static_assert(ROWS == 1)
    row = tl.program_id(0)
    at = _at(row, x_inner, x_outer_stride, x_inner_stride)
    r_at = _at(row, r_inner, r_outer_stride, r_inner_stride)
    result_at = row.to(tl.int64) * width
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        s = _sum_of(x, residual, at + column, r_at + column, mask, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(total + result_at + column, s.to(total.dtype.element_ty), mask=mask)
        squares += s * s
    factor = tl.rsqrt(tl.sum(squares, 0) / width + epsilon)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        s = _sum_of(x, residual, at + column, r_at + column, mask, HAS_RESIDUAL)
        y = s * factor * _scale(weight, column, mask, HAS_WEIGHT, OFFSET)
        tl.store(out + result_at + column, y.to(out.dtype.element_ty), mask=mask)


@fast
@triton.jit(do_not_specialize=["rows", "x_inner", "g_inner"])
def _rms_norm_gated(
    x, gate, weight, out, rows, width, groups, epsilon,
    x_inner, x_outer_stride, x_inner_stride, g_inner, g_outer_stride, g_inner_stride,
    HAS_GATE: tl.constexpr, NORM_FIRST: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (column < width)[None, :]
    mask = (row < rows)[:, None] & inside
    at = _at(row, x_inner, x_outer_stride, x_inner_stride)[:, None] + column[None, :]
    y = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATE:
        g_at = _at(row, g_inner, g_outer_stride, g_inner_stride)[:, None] + column[None, :]
        g = activate(tl.load(gate + g_at, mask=mask, other=0.0).to(tl.float32), KIND)
        if not NORM_FIRST:
            y *= g
    y *= tl.rsqrt(tl.sum(y * y, 1) / width + epsilon)[:, None]
    w_at = ((row % groups) * width)[:, None] + column[None, :]
    y *= tl.load(weight + w_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_GATE and NORM_FIRST:
        y *= g
    tl.store(out + row.to(tl.int64)[:, None] * width + column[None, :], y.to(out.dtype.element_ty), mask=mask)


@planned
def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    *,
    tile: int = _TILE,
    warps: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.normalization.rms_norm`."""
    return _normalize(x, residual, weight, epsilon, 0.0, tile, warps)


@planned
def gemma_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    epsilon: float,
    *,
    tile: int = _TILE,
    warps: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.normalization.gemma_rms_norm`."""
    return _normalize(x, residual, weight, epsilon, 1.0, tile, warps)


def _normalize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    offset: float,
    tile: int,
    warps: int | None,
) -> Tensor | tuple[Tensor, Tensor]:
    width = x.shape[-1]
    if weight is not None:
        need_unit_stride("weight", weight)
    read = rows_of("x", x, width)
    read_residual = read if residual is None else rows_of("residual", residual, width)
    out = x.new_empty(x.shape)
    total = None if residual is None else residual.new_empty(residual.shape)
    rows = read.rows
    if rows:
        kernel, block, per_program, num_warps = _shape(width, tile, warps)
        _, _, x_inner, x_outer_stride, x_inner_stride = read
        _, _, r_inner, r_outer_stride, r_inner_stride = read_residual
        kernel[(cdiv(rows, per_program),)](
            read.tensor, None if residual is None else read_residual.tensor, weight, out, total, rows, width, epsilon,
            x_inner, x_outer_stride, x_inner_stride, r_inner, r_outer_stride, r_inner_stride,
            HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, OFFSET=offset,
            ROWS=per_program, BLOCK=block, num_warps=num_warps,
        )  # fmt: skip
    return out if total is None else (out, total)


@functools.cache
def _shape(width: int, tile: int, warps: int | None) -> tuple[triton.JITFunction, int, int, int]:
    """Kernel, block, rows a program and warps for rows of this width."""
    block = power_of_2(width)
    if block > _MOST:
        return _rms_norm_long, _MOST // 4, 1, warps or _warps(_MOST // 4)
    per_program = max(tile // block, 1)
    return _rms_norm, block, per_program, warps or _warps(per_program * block)


def _warps(elements: int) -> int:
    """Measured on an H200: with 16 warps a row of 2,560 entries takes 1.4 times as long as with 8."""
    return warps_for(elements, most=8 if elements <= _MOST // 2 else 16)


@planned
def rms_norm_gated(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    *,
    tile: int = _TILE,
    warps: int | None = None,
) -> Tensor:
    """See :func:`vllm_fl.catalog.normalization.rms_norm_gated`."""
    if activation not in _GATES:
        raise NotImplementedError(f"activation: {activation!r} is not one of {', '.join(_GATES)}")
    width = group_size or x.shape[-1]
    block = power_of_2(width)
    if block > _MOST:
        raise NotImplementedError(f"groups of {width} entries; at most {_MOST} are kept in registers")
    need_unit_stride("weight", weight)
    read = rows_of("x", x, width)
    read_gate = read if gate is None else rows_of("gate", gate, width)
    out = x.new_empty(x.shape)
    if read.rows:
        per_program = max(tile // block, 1)
        _rms_norm_gated[(cdiv(read.rows, per_program),)](
            read.tensor, None if gate is None else read_gate.tensor, weight, out,
            read.rows, width, x.shape[-1] // width, epsilon, *read[2:], *read_gate[2:],
            HAS_GATE=gate is not None, NORM_FIRST=norm_before_gate, KIND=_GATES[activation],
            ROWS=per_program, BLOCK=block, num_warps=warps or _warps(per_program * block),
        )  # fmt: skip
    return out
