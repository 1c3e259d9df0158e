"""Sampling: repetition penalties, and the cut of the logits to the top k and the nucleus, both in place.

Top k and top p need no sort: both keep the entries above a threshold, and the threshold is found by narrowing an
interval of values. Each pass over the row weighs what lies above eight values of the interval, by number (top k) or by
probability (top p), and keeps the ninth part that holds the threshold; it ends when one entry is left in the interval.
One program a row. The order of float32 values is that of their bits, read as integers. Any device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import GRID_ROWS, cdiv, need_unit_stride, power_of_2, warps_for
from .launch import fast
from .planned import planned

_BLOCK = 1024
_SEARCH_BLOCK, _PIVOTS = 2048, 8  # weighed against each other in registers


@fast
@triton.jit(do_not_specialize=["rows"])
def _apply_repetition_penalties(
    logits, prompt, output, penalties, rows, size, stride, prompt_stride, output_stride,
    BLOCK: tl.constexpr, ROWS_PER_LAYER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(2).to(tl.int64) * ROWS_PER_LAYER + tl.program_id(1)
    penalty = tl.load(penalties + row, mask=row < rows, other=1.0).to(tl.float32)
    if penalty != 1.0:
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = column < size
        seen = tl.load(prompt + row * prompt_stride + column, mask=mask, other=0) != 0
        seen |= tl.load(output + row * output_stride + column, mask=mask, other=0) != 0
        at = logits + row * stride + column
        x = tl.load(at, mask=seen, other=0.0).to(tl.float32)
        y = tl.where(x > 0, x / penalty, x * penalty)
        tl.store(at, y.to(logits.dtype.element_ty), mask=seen)


@planned
def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    """See :func:`vllm_fl.catalog.sampling.apply_repetition_penalties`."""
    for name, x in (("logits", logits), ("prompt_mask", prompt_mask), ("output_mask", output_mask)):
        need_unit_stride(name, x)
    need_unit_stride("repetition_penalties", repetition_penalties)
    rows, size = logits.shape
    if not rows or not size:
        return
    grid = (cdiv(size, _BLOCK), min(rows, GRID_ROWS), cdiv(rows, GRID_ROWS))
    _apply_repetition_penalties[grid](
        logits, prompt_mask, output_mask, repetition_penalties, rows, size,
        logits.stride(0), prompt_mask.stride(0), output_mask.stride(0),
        BLOCK=_BLOCK, ROWS_PER_LAYER=GRID_ROWS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _key(x):
    """Integers in the order of the float32 values; both zeros are 0. It is its own inverse on the bits."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scan(row, size, BLOCK: tl.constexpr):
    """Highest value, lowest finite value, number of finite values (above minus infinity)."""
    lane = tl.arange(0, BLOCK)
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    low = tl.full((BLOCK,), float("inf"), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        x = tl.load(row + start + lane, mask=start + lane < size, other=float("-inf")).to(tl.float32)
        is_finite = x > float("-inf")
        high = tl.maximum(high, x)
        low = tl.minimum(low, tl.where(is_finite, x, float("inf")))
        count += is_finite.to(tl.int32)
    return tl.max(high, 0), tl.min(low, 0), tl.sum(count, 0)


@triton.jit
def _mass(row, size, top, cut, BLOCK: tl.constexpr):
    """Sum of ``exp(x - top)`` over the entries above `cut`."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(row + start + lane, mask=start + lane < size, other=float("-inf")).to(tl.float32)
        total += tl.where(_key(x) > cut, tl.exp(x - top), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _weigh(row, size, top, pivots, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, BY_MASS: tl.constexpr):
    """Number and weight of the entries above each pivot."""
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((BLOCK, PIVOTS), tl.int32)
    masses = tl.zeros((BLOCK, PIVOTS), tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(row + start + lane, mask=start + lane < size, other=float("-inf")).to(tl.float32)
        above = _key(x)[:, None] > pivots[None, :]
        counts += above.to(tl.int32)
        if BY_MASS:
            masses += tl.where(above, tl.exp(x - top)[:, None], 0.0)
    number = tl.sum(counts, 0)
    weight = number.to(tl.float32)
    if BY_MASS:
        weight = tl.sum(masses, 0)
    return number, weight


@triton.jit
def _search(
    row, size, top, cut, inside, bound, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, BY_MASS: tl.constexpr
):  # fmt: skip
    """The key below which nothing is kept: an entry stays if the weight of those above it is less than `bound`.

    `inside` entries lie above `cut`, and weigh at least `bound`. Returns the key (entries above it stay) and how many
    entries that are.
    """
    low, high = cut.to(tl.int64), _key(top).to(tl.int64)
    below, above = inside, 0 * inside  # numbers of entries above `low` and above `high`
    part = tl.arange(0, PIVOTS) + 1
    turn = 0
    while (high - low > 1) & (below - above > 1):
        # Values first: keys between two values of different sign or size are mostly far too small. Then keys, which
        # come to an end.
        pivots = low + (high - low) * part // (PIVOTS + 1)
        if turn < 8:
            first, last = _value(low.to(tl.int32)), _value(high.to(tl.int32))
            pivots = _key(first + (last - first) * (part.to(tl.float32) / (PIVOTS + 1))).to(tl.int64)
            pivots = tl.minimum(tl.maximum(pivots, low), high - 1)
        number, weight = _weigh(row, size, top, pivots.to(tl.int32), BLOCK, PIVOTS, BY_MASS)
        is_low = weight >= bound
        low = tl.max(tl.where(is_low, pivots, low), 0)
        below = tl.min(tl.where(is_low, number, below), 0)
        high = tl.min(tl.where(is_low, high, pivots), 0)
        above = tl.max(tl.where(is_low, above, number), 0)
        turn += 1
    return low.to(tl.int32), below


@fast
@triton.jit
def _apply_top_k_top_p(
    logits, top_k, top_p, size, stride, HAS_K: tl.constexpr, HAS_P: tl.constexpr,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    top, lowest, number = _scan(row, size, BLOCK)
    if number > 0:
        nothing = _key(lowest) - 1
        cut = nothing
        if HAS_K:
            k = tl.load(top_k + index).to(tl.int32)
            if (k > 0) & (k < number):
                cut, number = _search(row, size, top, cut, number, k.to(tl.float32), BLOCK, PIVOTS, False)
        if HAS_P:
            p = tl.load(top_p + index).to(tl.float32)
            if p < 1.0:
                # The most probable entry stays whatever p is; a bound of 0 would remove it.
                bound = tl.maximum(p * _mass(row, size, top, cut, BLOCK), 1e-30)
                cut, number = _search(row, size, top, cut, number, bound, BLOCK, PIVOTS, True)
        if cut != nothing:
            lane = tl.arange(0, BLOCK)
            for start in range(0, size, BLOCK):
                inside = start + lane < size
                x = tl.load(row + start + lane, mask=inside, other=0.0).to(tl.float32)
                gone = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty)
                tl.store(row + start + lane, gone, mask=inside & (_key(x) <= cut))


@planned
def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """See :func:`vllm_fl.catalog.sampling.apply_top_k_top_p`."""
    need_unit_stride("logits", logits)
    for name, x in (("top_k", top_k), ("top_p", top_p)):
        if x is not None:
            need_unit_stride(name, x)
    rows, size = logits.shape
    if not rows or not size or (top_k is None and top_p is None):
        return
    block = min(power_of_2(size), _SEARCH_BLOCK)
    _apply_top_k_top_p[(rows,)](
        logits, top_k, top_p, size, logits.stride(0), HAS_K=top_k is not None, HAS_P=top_p is not None,
        BLOCK=block, PIVOTS=_PIVOTS, num_warps=warps_for(block),
    )  # fmt: skip
