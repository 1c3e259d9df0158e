"""Attention over vLLM's paged KV cache, for batches of decodes, prefills (also chunked), and both; and without a cache.

A program takes the query heads that share a KV head, for one decoded token or for a block of neighbouring tokens of a
request, and walks over the context with a running maximum and sum (online softmax, in base 2). Where the decodes are
too few to fill the device, the context of each is cut into splits, whose results a second kernel joins. The number of
splits follows from the number of requests; a split beyond the end of a short context has nothing to do. Nothing depends
on lengths that are known on the device only, so that a captured graph serves any lengths. Encoders have no cache: their
keys and values are those of the step, and a token sees those after it as well.

Products are of the query's dtype with float32 sums (float32: IEEE products, no TF32), scores and weights float32. Keys
and values of another floating dtype are converted. Any device; heads of at most 256 entries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import need_unit_stride, power_of_2, shared_memory
from .launch import fast
from .planned import planned
from .splits import Scratch, choose_splits, join_splits, query_of_block

__all__ = ["Scratch", "encoder_attention", "paged_attention"]

#: Whether longer queries take the keys that all their tokens see in a loop of its own, without masks; with wide heads
#: it would spill.
_TWO_LOOPS = True
_LOG2E = tl.constexpr(1.4426950408889634)


class _Tile(NamedTuple):
    rows: int  # query heads of a program, over all its tokens
    keys: int  # keys that it takes at a time
    warps: int
    stages: int


@triton.jit
def _take_tile(
    q, k_head, v_head, table, position, m, total, acc, start, high, factor, soft_cap,
    stride_kb, stride_kn, stride_vb, stride_vn,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DECODE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Running maximum, sum and result after the keys from `start`; MASKED: some may be past the end, or not seen."""
    at, d = start + tl.arange(0, TILE), tl.arange(0, D_PAD)
    read = tl.full((TILE,), True, tl.int1)
    if MASKED:
        read = at < high
    page, within = tl.full((TILE,), 0, tl.int64), at
    if PAGE > 0:
        page = tl.load(table + at // PAGE, mask=read, other=0).to(tl.int64)
        within = at % PAGE
    k_at = page * stride_kb + within * stride_kn
    k = tl.load(k_head + k_at[None, :] + d[:, None], mask=read[None, :] & (d < D)[:, None], other=0.0)
    s = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
    if SOFT_CAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        s = (2.0 * tl.sigmoid(2.0 * s * factor / (soft_cap * _LOG2E)) - 1.0) * (soft_cap * _LOG2E)
        factor = 1.0
    if MASKED:
        keep = read[None, :]
        if CAUSAL and not DECODE:
            keep = keep & (at[None, :] <= position[:, None])
        if WINDOW > 0:
            keep = keep & (at[None, :] > position[:, None] - WINDOW)
            if not CAUSAL:
                keep = keep & (at[None, :] < position[:, None] + WINDOW)
        s = tl.where(keep, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * factor)
    m_safe = m_new
    if MASKED:
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * factor - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    v_at = page * stride_vb + within * stride_vn
    v = tl.load(v_head + v_at[:, None] + d[None, :], mask=read[:, None] & (d < D)[None, :], other=0.0)
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
    return m_new, total * alpha + tl.sum(p, 1), acc


@triton.jit
def _seen_by(position, COUNT: tl.constexpr, seq_len, WINDOW: tl.constexpr, CAUSAL: tl.constexpr):
    """The first key that the token at `position` or one of the next COUNT - 1 sees, and the one behind the last."""
    low = 0
    high = seq_len
    if CAUSAL:
        high = tl.minimum(position + COUNT, seq_len)
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
        high = tl.minimum(position + COUNT - 1 + WINDOW, high)
    return low, high


@fast
@triton.jit(do_not_specialize=["first_request", "requests"])
def _attend(
    query, key_cache, value_cache, block_table, seq_lens, query_start_loc, sinks, output, partial, maxima, sums,
    scale, soft_cap, first_request, requests,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_bt,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr,
    DECODE: tl.constexpr, CAUSAL: tl.constexpr, SPLITS: tl.constexpr, TWO_LOOPS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of a program are tokens times heads of the group; DECODE: request i has one token, which is token i.

    PAGE 0: keys and values are not in a cache, but lie one after the other as the tokens of the query do.
    """
    block, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = BLOCK_Q * GROUP_PAD
    row, d = tl.arange(0, ROWS), tl.arange(0, D_PAD)
    request, begin, query_len, first = query_of_block(
        query_start_loc, block, first_request, requests, BLOCK_Q, DECODE
    )  # fmt: skip
    if first >= query_len:
        return
    seq_len = query_len
    if PAGE > 0:
        seq_len = tl.load(seq_lens + request)
    context = seq_len - query_len
    token = first + row // GROUP_PAD
    inner = row % GROUP_PAD
    valid = (token < query_len) & (inner < GROUP)
    h = head * GROUP + inner
    in_head = d < D
    q_at = (begin + token)[:, None] * stride_qt + h[:, None] * stride_qh + d[None, :]
    mask = valid[:, None] & in_head[None, :]
    q = tl.load(query + q_at, mask=mask, other=0.0)

    position = context + token
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D_PAD), tl.float32)
    if SINKS:
        sink = tl.load(sinks + h, mask=valid, other=0.0).to(tl.float32) * _LOG2E
        m = tl.where(split == 0, sink, m)
        total += tl.where(split == 0, 1.0, 0.0)

    low, high = _seen_by(context + first, BLOCK_Q, seq_len, WINDOW, CAUSAL)
    low = low // TILE * TILE
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(high - low, TILE), SPLITS) * TILE
        low = low + split * share
        high = tl.minimum(low + share, high)
    table = block_table
    k_head = key_cache + head * stride_kh
    v_head = value_cache + head * stride_vh
    if PAGE > 0:
        table = block_table + request.to(tl.int64) * stride_bt
    else:
        k_head += begin.to(tl.int64) * stride_kn
        v_head += begin.to(tl.int64) * stride_vn
    factor = scale * _LOG2E
    # Up to `seen` every token sees every key: no masks.
    seen = low
    if TWO_LOOPS:
        seen = seq_len // TILE * TILE
        if CAUSAL:
            seen = tl.maximum((context + first + 1) // TILE * TILE, 0)
        for start in range(low, seen, TILE):
            m, total, acc = _take_tile(
                q, k_head, v_head, table, position, m, total, acc, start, high, factor, soft_cap,
                stride_kb, stride_kn, stride_vb, stride_vn,
                D, D_PAD, PAGE, TILE, WINDOW, SOFT_CAP, DECODE, CAUSAL, False, PRECISION,
            )  # fmt: skip
    for start in range(seen, high, TILE):
        m, total, acc = _take_tile(
            q, k_head, v_head, table, position, m, total, acc, start, high, factor, soft_cap,
            stride_kb, stride_kn, stride_vb, stride_vn,
            D, D_PAD, PAGE, TILE, WINDOW, SOFT_CAP, DECODE, CAUSAL, True, PRECISION,
        )  # fmt: skip
    if SPLITS > 1:
        heads = tl.num_programs(1) * GROUP
        base = ((begin + token) * heads + h) * SPLITS + split
        tl.store(partial + base[:, None] * D_PAD + d[None, :], acc, mask=mask)
        tl.store(maxima + base, m, mask=valid)
        tl.store(sums + base, total, mask=valid)
    else:
        acc = acc / tl.maximum(total, 1e-30)[:, None]
        o_at = (begin + token)[:, None] * stride_ot + h[:, None] * stride_oh + d[None, :]
        tl.store(output + o_at, acc.to(output.dtype.element_ty), mask=mask)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    output: Tensor,
    scale: float,
    max_query_len: int,
    num_decodes: int,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    scratch: Scratch | None = None,
) -> None:
    """Causal attention of a batch of requests whose keys and values are in the cache.

    The query of request r are tokens ``query_start_loc[r]`` to ``query_start_loc[r + 1]``, the last ones of its
    sequence. Query head h has KV head ``h * Hkv // H``. Rows of `output` without a request are left as they are.

    Args:
        query: [at least T, H, D], float32, float16 or bfloat16.
        key_cache: [blocks, Hkv, block size, D], any strides but the last, which is 1.
        value_cache: as `key_cache`.
        block_table: [at least R, max blocks], int32.
        seq_lens: [R], int32: tokens of each request, its query included; 0 for padding.
        query_start_loc: [R + 1], int32, rising.
        output: as `query`; written.
        scale: applied to the scores.
        max_query_len: upper bound of the lengths of the queries, on which the tile depends.
        num_decodes: the first so many requests have one token each, or are padding that has a row in `query`.
        window: a token sees so many last tokens, itself counted; 0 is no limit.
        soft_cap: ``soft_cap * tanh(score / soft_cap)`` replaces a score; 0 is none.
        sinks: [H], floating: a score for each head that takes weight and has no value; or None.
        scratch: for splits; they are limited to what fits in. None allocates.

    Raises:
        NotImplementedError: heads of more than 256 entries, or a stride that is not taken.
    """
    values, maxima, sums = scratch or (None, None, None)
    _attend_batch(
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc, output,
        scale, max_query_len, num_decodes, window, soft_cap, sinks, values, maxima, sums,
    )  # fmt: skip


@planned
def _attend_batch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    output: Tensor,
    scale: float,
    max_query_len: int,
    num_decodes: int,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    values: Tensor | None,
    maxima: Tensor | None,
    sums: Tensor | None,
) -> None:
    shape = _shape(query, key_cache, value_cache, output, window, soft_cap, sinks)
    requests = seq_lens.shape[0]
    if not requests or not query.shape[0]:
        return
    num_heads, head_size = query.shape[1:]
    kv_heads = key_cache.shape[1]
    shape |= {"PAGE": key_cache.shape[2], "CAUSAL": True}
    strides = (
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        *key_cache.stride()[:3], *value_cache.stride()[:3], block_table.stride(0),
    )  # fmt: skip
    tensors = (query, key_cache, value_cache, block_table, seq_lens, query_start_loc, sinks, output)
    if num_decodes:
        tile = _tile(1, shape["D_PAD"], shape["GROUP_PAD"], query)
        scratch = None if values is None or maxima is None or sums is None else Scratch(values, maxima, sums)
        splits, room = choose_splits(num_decodes, num_heads, kv_heads, shape["D_PAD"], scratch, query)
        _attend[(num_decodes, kv_heads, splits)](
            *tensors, *room, scale, soft_cap, 0, num_decodes, *strides, **shape,
            BLOCK_Q=tile.rows // shape["GROUP_PAD"], TILE=tile.keys, DECODE=True, SPLITS=splits, TWO_LOOPS=False,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            join_splits[(num_decodes, num_heads)](
                *room, output, output.stride(0), output.stride(1),
                D=head_size, D_PAD=shape["D_PAD"], SPLITS=splits, num_warps=2,
            )  # fmt: skip
    if num_decodes < requests:
        _attend_queries(tensors, strides, shape, scale, soft_cap, max_query_len, num_decodes, requests - num_decodes)


@planned
def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    output: Tensor,
    scale: float,
    max_query_len: int,
    window: int = 0,
    soft_cap: float = 0.0,
) -> None:
    """Attention of each request's tokens to each other, before and after, without a cache.

    Args:
        query, output, query_start_loc, scale, max_query_len, soft_cap: as for :func:`paged_attention`.
        key: [at least T, Hkv, D], any strides but the last, which is 1.
        value: as `key`.
        window: a token sees those less than so many tokens away; 0 is no limit.

    Raises:
        NotImplementedError: heads of more than 256 entries, or a stride that is not taken.
    """
    shape = _shape(query, key, value, output, window, soft_cap, None)
    requests = query_start_loc.shape[0] - 1
    if requests < 1 or not query.shape[0]:
        return
    shape |= {"PAGE": 0, "CAUSAL": False}
    strides = (
        *query.stride()[:2], *output.stride()[:2], 0, key.stride(1), key.stride(0), 0, value.stride(1), value.stride(0),
        0,
    )  # fmt: skip
    tensors = (query, key, value, None, None, query_start_loc, None, output)
    _attend_queries(tensors, strides, shape, scale, soft_cap, max_query_len, 0, requests)


def _shape(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, window: int, soft_cap: float, sinks: Tensor | None
) -> dict[str, Any]:
    """Constants of the kernel; keys have their heads in the second dimension."""
    num_heads, head_size = query.shape[1:]
    if head_size > 256:
        raise NotImplementedError(f"query: heads of {head_size} entries, at most 256")
    for name, x in (("query", query), ("key", key), ("value", value), ("output", output)):
        need_unit_stride(name, x)
    group = num_heads // key.shape[1]
    return {
        "GROUP": group,
        "GROUP_PAD": power_of_2(group),
        "D": head_size,
        "D_PAD": max(power_of_2(head_size), 16),
        "WINDOW": window,
        "SOFT_CAP": soft_cap > 0,
        "SINKS": sinks is not None,
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def _attend_queries(
    tensors: tuple[Any, ...],
    strides: tuple[int, ...],
    shape: dict[str, Any],
    scale: float,
    soft_cap: float,
    max_query_len: int,
    first_request: int,
    requests: int,
) -> None:
    """Queries of any lengths; the tokens before them are those of requests that have one each."""
    query, key = tensors[:2]
    tile = _tile(max_query_len, shape["D_PAD"], shape["GROUP_PAD"], query)
    block_q = tile.rows // shape["GROUP_PAD"]
    # Each request may end in a block that is not full.
    blocks = (query.shape[0] - first_request) // block_q + requests
    _attend[(blocks, key.shape[1], 1)](
        *tensors, None, None, None, scale, soft_cap, first_request, requests, *strides, **shape,
        BLOCK_Q=block_q, TILE=tile.keys, DECODE=False, SPLITS=1,
        TWO_LOOPS=_TWO_LOOPS and not shape["WINDOW"] and shape["D_PAD"] <= 128,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _tile(query_len: int, d_pad: int, group_pad: int, like: Tensor) -> _Tile:
    """Measured on an H200 with heads of 128: 256 rows are faster than 128 although they spill.

    Devices with less shared memory have no instructions for products of such tiles either.
    """
    is_wide, is_large = d_pad > 128, shared_memory(like.device) >= 200 * 1024
    few = max(16, group_pad)
    if like.dtype == torch.float32:
        return _Tile(few, 16 if is_wide else 32, 4, 1)
    if query_len <= 32:
        if is_wide and is_large:
            return _Tile(few, 64, 4, 3)
        return _Tile(few, 32 if is_wide else 64, 2, 3)
    rows = (256 if is_large else 128) // (2 if is_wide else 1)
    rows = max(min(64 * group_pad, rows), group_pad)
    stages = 3 if is_large and not is_wide else 2
    return _Tile(rows, 64 if is_large else 32, 8 if is_wide or rows > 64 else 4, stages)
