"""Sampling: repetition penalties, and the cut of the logits to the top k and the nucleus, both in place.

Top k and top p keep the entries above a threshold, and most often two passes over a row find it. The first one counts
what lies above two values, which are guessed from a sample of the row. The second one lists the entries above one of
these, and writes minus infinity over all others; the list is short enough to be sorted, and both limits are read off.

Where the guess failed, or more entries stay than the list has room for, further passes narrow an interval of values.
Each weighs what lies above some values inside it, by number (top k) or by probability (top p), and keeps the part that
holds the threshold, until the list has room for what is left in the interval, or that is one entry.

One program a row. The order of float32 values is that of their bits, read as integers: their keys. Any device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import GRID_ROWS, cdiv, need_unit_stride, power_of_2, warps_for
from .launch import fast
from .planned import planned

_BLOCK = 1024
_SEARCH_BLOCK, _PIVOTS = 2048, 4  # weighed against each other in registers
_UNROLL, _PER_WARP = 4, 128  # blocks that are loaded at once; entries of a block a warp
_CAPACITY = 1024  # of the list


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
def _load(row, at, size):
    return tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _is_above(x, value):
    """Whether entries are kept by a cut at `value`. What is no number is."""
    return ~(x <= value)


@triton.jit
def _sample(row, size, BLOCK: tl.constexpr):
    """Mean, standard deviation and lowest of the finite ones among BLOCK entries, which are spread over the row."""
    x = _load(row, tl.arange(0, BLOCK) * tl.maximum(size // BLOCK, 1), size)
    is_finite = x > float("-inf")
    number = tl.maximum(tl.sum(is_finite.to(tl.float32), 0), 1.0)
    mean = tl.sum(tl.where(is_finite, x, 0.0), 0) / number
    offset = tl.where(is_finite, x - mean, 0.0)
    deviation = tl.sqrt(tl.sum(offset * offset, 0) / number)
    return mean, deviation, tl.min(tl.where(is_finite, x, float("inf")), 0)


@triton.jit
def _guess(mean, deviation, k, size, CAPACITY: tl.constexpr):
    """Two keys for a top k: of a normal distribution somewhat more entries than k lie above them, but not too many."""
    number = k * tl.where(tl.arange(0, 2) == 0, 1.5, 6.0) + tl.where(tl.arange(0, 2) == 0, 20.0, 100.0)
    share = tl.minimum(tl.minimum(number, 0.7 * CAPACITY) / size, 0.5)
    # The value above which that share lies; Abramowitz and Stegun, 26.2.22.
    t = tl.sqrt(-2.0 * tl.log(share))
    value = mean + deviation * (t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t))
    return _key(tl.where(value < float("inf"), value, float("inf")))  # of huge values it is no number


@triton.jit
def _scan(row, size, keys, BLOCK: tl.constexpr, UNROLL: tl.constexpr, HAS_KEYS: tl.constexpr):
    """Highest value; of each lane the number of entries above minus infinity, and of those above each of two keys."""
    lane = tl.arange(0, BLOCK)[:, None]
    values = _value(keys)[None, :]
    high = tl.full((BLOCK, 1), float("-inf"), tl.float32)
    finite = tl.zeros((BLOCK, 1), tl.float32)
    counts = tl.zeros((BLOCK, 2), tl.float32)
    for start in tl.range(0, size, BLOCK, loop_unroll_factor=UNROLL):
        x = _load(row, start + lane, size)
        high = tl.maximum(high, x)
        finite += _is_above(x, float("-inf")).to(tl.float32)
        if HAS_KEYS:
            counts += _is_above(x, values).to(tl.float32)
    return tl.max(tl.max(high, 1), 0), tl.sum(finite, 1), counts


@triton.jit
def _weigh(
    row, size, top, keys, BLOCK: tl.constexpr, UNROLL: tl.constexpr, PIVOTS: tl.constexpr, BY_MASS: tl.constexpr
):  # fmt: skip
    """Of each lane the number of entries above each pivot, and the weight of all of them."""
    lane = tl.arange(0, BLOCK)[:, None]
    values = _value(keys)[None, :]
    counts = tl.zeros((BLOCK, PIVOTS), tl.float32)
    masses = tl.zeros((BLOCK, PIVOTS), tl.float32)
    for start in tl.range(0, size, BLOCK, loop_unroll_factor=1 if BY_MASS else UNROLL):
        x = _load(row, start + lane, size)
        above = _is_above(x, values)
        counts += above.to(tl.float32)
        if BY_MASS:
            masses += tl.where(above, tl.exp(x - top), 0.0)
    weight = tl.sum(counts, 0)
    if BY_MASS:
        weight = tl.sum(masses, 0)
    return counts, weight


@triton.jit
def _narrow(low, high, lanes, beyond, heavy, pivots, counts, weight, bound):
    """The part of an interval between two neighbouring pivots that holds the threshold; see _search."""
    is_low = weight >= bound
    lanes = tl.minimum(lanes, tl.min(tl.where(is_low[None, :], counts, lanes[:, None]), 1))
    beyond = tl.maximum(beyond, tl.max(tl.where(is_low[None, :], beyond[:, None], counts), 1))
    heavy = tl.maximum(heavy, tl.max(tl.where(is_low, heavy, weight), 0))
    low = tl.maximum(tl.max(tl.where(is_low, pivots, low), 0), low)
    high = tl.minimum(tl.min(tl.where(is_low, high, pivots), 0), high)
    return low, high, lanes, beyond, heavy


@triton.jit
def _search(
    row, size, top, floor, low, high, lanes, beyond, heavy, bound, is_whole, BLOCK: tl.constexpr,
    UNROLL: tl.constexpr, PIVOTS: tl.constexpr, ENOUGH: tl.constexpr, BY_MASS: tl.constexpr,
):  # fmt: skip
    """Narrow the interval of keys that holds the threshold, until at most ENOUGH entries are in it, or above `low`.

    An entry is kept if the weight of those above it is less than `bound`; BY_MASS, `bound` is a share of the weight of
    those above `low`, and becomes that weight. Entries above `low` weigh at least that, those above `high` less, namely
    `heavy`; `lanes` and `beyond` are their numbers by lane. Few entries are below `floor`. `is_whole` says that what is
    above `high` counts as being in the interval. Of an interval that cannot be narrowed all is kept.
    """
    part = tl.arange(0, PIVOTS) + 1
    inside, above = tl.sum(lanes, 0), tl.sum(beyond, 0)
    turn = 0
    while (high > low + 1) & (inside - above > 1) & (tl.where(is_whole, inside, inside - above) > ENOUGH):
        # Values first: keys between two values of different sign or size are mostly far too small. Then keys, which
        # come to an end.
        first, last = tl.maximum(_value(low), floor), _value(high)
        if (turn < 8) & (first < last):
            pivots = _key(first + (last - first) * (part.to(tl.float32) / (PIVOTS + 1)))
            pivots = tl.minimum(tl.maximum(pivots, low), high - 1)
        else:
            pivots = (low + (high.to(tl.int64) - low) * part // (PIVOTS + 1)).to(tl.int32)
        if BY_MASS and turn == 0:
            pivots = tl.where(part == 1, low, pivots)
        counts, weight = _weigh(row, size, top, pivots, BLOCK, UNROLL, PIVOTS, BY_MASS)
        if BY_MASS and turn == 0:
            # The most probable entry stays whatever the share is; a bound of 0 would remove it.
            bound = tl.maximum(bound * tl.max(weight, 0), 1e-30)
        low, high, lanes, beyond, heavy = _narrow(low, high, lanes, beyond, heavy, pivots, counts, weight, bound)
        inside, above = tl.sum(lanes, 0), tl.sum(beyond, 0)
        turn += 1
    return low, high, lanes, beyond, heavy, bound


@triton.jit
def _remove(
    row, size, top, low, high, places, slots, BLOCK: tl.constexpr, UNROLL: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """Write minus infinity over what is not above `low`. With LISTED, list the places of the rest up to `high`.

    Nothing is above the key of `top`, not even what is no number. `slots` says where in the list each lane begins.
    """
    lane = tl.arange(0, UNROLL)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    least, most = _value(low), tl.where(high < _key(top), _value(high), float("inf"))
    for start in range(0, size, UNROLL * BLOCK):
        # A thread takes single entries, not neighbours, in what follows as in the list, whose slots are no neighbours:
        # else the compiler exchanges each block between threads, and all wait for each other.
        at = tl.max_contiguous(start + lane, [1, 1])
        x = tl.load(row + at, mask=at < size, other=float("-inf"))
        above = _is_above(x.to(tl.float32), least)
        tl.store(row + at, tl.where(above, x, float("-inf")), mask=at < size)
        if LISTED:
            is_listed = above & (tl.where(x == x, x.to(tl.float32), float("inf")) <= most)
            number = tl.cumsum(is_listed.to(tl.int32), 0)
            tl.store(places + (slots[None, :] + number - 1), at, mask=is_listed)
            slots += tl.sum(is_listed.to(tl.int32), 0)


@triton.jit
def _sort(keys, SIZE: tl.constexpr):
    """Batcher's bitonic sort, highest first. Triton's own is unrolled, and takes seconds in the interpreter."""
    place = tl.arange(0, SIZE)
    run = 2  # sorted runs of this length, descending and ascending by turns
    while run <= SIZE:
        distance = run // 2
        while distance > 0:
            other = tl.gather(keys, place ^ distance, 0)
            is_higher = ((place & distance) == 0) == ((place & run) == 0)
            keys = tl.where(is_higher, tl.maximum(keys, other), tl.minimum(keys, other))
            distance = distance // 2
        run = run * 2
    return keys


@triton.jit
def _rank(row, places, listed, top, k, p, heavy, bound, CAPACITY: tl.constexpr, HAS_P: tl.constexpr):
    """Apply both limits to the listed entries by sorting their keys; those above the highest of them stay.

    k is how many of the list may stay at most. `heavy` is the mass above the list, `bound` the mass that the nucleus
    has to reach, or 0: the share p of what k leaves of the list.
    """
    nothing: tl.constexpr = -(2**31)  # below every key
    everything: tl.constexpr = 2**31 - 1
    slot = tl.arange(0, CAPACITY)
    place = tl.load(places + slot, mask=slot < listed, other=0)
    x = tl.load(row + place, mask=slot < listed, other=0.0).to(tl.float32)
    key = tl.where(slot < listed, _key(x), nothing)
    ranked = _sort(key, CAPACITY)
    least = tl.max(tl.where(slot >= tl.minimum(k, listed) - 1, ranked, nothing), 0)
    if HAS_P and p < 1.0:
        mass = tl.where(ranked >= least, tl.exp(_value(ranked) - top), 0.0)
        if bound == 0.0:
            bound = tl.maximum(p * tl.sum(mass, 0), 1e-30)
        is_beyond = heavy + tl.cumsum(mass, 0) - mass >= bound
        # Entries of equal logit stay if the first one does.
        least = tl.maximum(least, tl.min(tl.where(is_beyond, everything, ranked), 0))
    gone = tl.full((CAPACITY,), float("-inf"), tl.float32).to(row.dtype.element_ty)
    tl.store(row + place, gone, mask=(slot < listed) & (key < least))


@fast
@triton.jit
def _apply_top_k_top_p(
    logits, top_k, top_p, scratch, size, stride, HAS_K: tl.constexpr, HAS_P: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr, PIVOTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    places = scratch + index * CAPACITY
    k, p, bound = size, 1.0, 0.0
    if HAS_K:
        k = tl.load(top_k + index).to(tl.int32)
        k = tl.where(k > 0, k, size)
    if HAS_P:
        p = tl.load(top_p + index).to(tl.float32)
    if (k < size) | (p < 1.0):
        mean, deviation, floor = _sample(row, size, BLOCK)
        keys = _guess(mean, deviation, k, size, CAPACITY)
        top, lanes, counts = _scan(row, size, keys, BLOCK, UNROLL, HAS_K)
        number = tl.sum(lanes, 0)
        low, high, beyond = _key(float("-inf")), _key(top), 0.0 * lanes
        heavy = tl.full((), 0.0, tl.float32)
        in_list = k
        if HAS_K and k < number:
            limit = k.to(tl.float32)
            low, high, lanes, beyond, heavy = _narrow(
                low, high, lanes, beyond, heavy, keys, counts, tl.sum(counts, 0), limit
            )  # fmt: skip
            low, high, lanes, beyond, heavy, _ = _search(
                row, size, top, floor, low, high, lanes, beyond, heavy, limit, p < 1.0, BLOCK, UNROLL, PIVOTS, CAPACITY,
                False,
            )  # fmt: skip
            in_list = k - heavy.to(tl.int32)
        if HAS_P and p < 1.0:
            if HAS_K:  # the list begins with the highest entry, whose mass counts
                high, beyond, heavy, in_list = _key(top), 0.0 * lanes, 0.0 * heavy, k
            if tl.sum(lanes, 0) > CAPACITY:
                in_list = size
                low, high, lanes, beyond, heavy, bound = _search(
                    row, size, top, floor, low, high, lanes, beyond, heavy, p, False, BLOCK, UNROLL, PIVOTS, CAPACITY,
                    True,
                )  # fmt: skip
        lanes = (lanes - beyond).to(tl.int32)
        listed = tl.sum(lanes, 0)
        if (k < number) | (p < 1.0):
            if listed > CAPACITY:
                _remove(row, size, top, low, high, places, lanes, BLOCK, UNROLL, False)
            elif listed > 0:
                _remove(row, size, top, low, high, places, tl.cumsum(lanes, 0) - lanes, BLOCK, UNROLL, True)
                tl.debug_barrier()  # the list is written before it is read
                _rank(row, places, listed, top, in_list, p, heavy, bound, CAPACITY, HAS_P)


@planned
def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """See :func:`vllm_fl.catalog.sampling.apply_top_k_top_p`."""
    need_unit_stride("logits", logits)
    for name, x in (("top_k", top_k), ("top_p", top_p)):
        if x is not None:
            need_unit_stride(name, x)
    rows, size = logits.shape
    if not rows or size < 2 or (top_k is None and top_p is None):
        return
    block, capacity = (min(power_of_2(size), most) for most in (_SEARCH_BLOCK, _CAPACITY))
    places = logits.new_empty((rows, capacity), dtype=torch.int32)
    _apply_top_k_top_p[(rows,)](
        logits, top_k, top_p, places, size, logits.stride(0), HAS_K=top_k is not None, HAS_P=top_p is not None,
        BLOCK=block, UNROLL=_UNROLL, PIVOTS=_PIVOTS, CAPACITY=capacity, num_warps=warps_for(block, per_warp=_PER_WARP),
    )  # fmt: skip
