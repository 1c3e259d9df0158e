"""Multi-head latent attention over vLLM's paged latent cache, and writing to that cache.

All heads share the rows of the cache, so a program takes as many heads as a tile has rows, for one decoded token or for
a block of neighbouring tokens of a request. Otherwise it is the kernel of paged_attention: online softmax in base 2,
splits for few decodes, and nothing that depends on lengths that are known on the device only. A row is read once, as
key and as value.

Products are of the query's dtype with float32 sums (float32: IEEE products, no TF32), scores and weights float32. Rows
of another floating dtype are converted. Any device; latents of at most 512 entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cache import reshape_and_cache
from .common import cdiv, need_unit_stride, power_of_2, shared_memory
from .launch import fast
from .planned import planned
from .splits import choose_splits, join_splits, query_of_block

_MOST_ENTRIES = 512
_LOG2E = tl.constexpr(1.4426950408889634)


class _Tile(NamedTuple):
    rows: int  # query heads of a program, over all its tokens
    keys: int  # rows of the cache that it takes at a time
    warps: int
    stages: int


@fast
@triton.jit(do_not_specialize=["first_request", "requests"])
def _mla_attend(
    query, cache, block_table, seq_lens, query_start_loc, output, partial, maxima, sums, scale, first_request, requests,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_cb, stride_cn, stride_bt,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr, R: tl.constexpr,
    R_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, DECODE: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of a program are tokens times heads; DECODE: request i has one token, which is token i."""
    block, heads, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ROWS: tl.constexpr = BLOCK_Q * BLOCK_H
    row, c, r = tl.arange(0, ROWS), tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    request, begin, query_len, first = query_of_block(
        query_start_loc, block, first_request, requests, BLOCK_Q, DECODE
    )  # fmt: skip
    if first >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    context = seq_len - query_len
    token = first + row // BLOCK_H
    h = heads * BLOCK_H + row % BLOCK_H
    valid = (token < query_len) & (h < HEADS)
    q_at = query + (begin + token).to(tl.int64) * stride_qt + h * stride_qh
    in_latent = c < L
    q = tl.load(q_at[:, None] + c[None, :], mask=valid[:, None] & in_latent[None, :], other=0.0)
    q_rope = q
    if R > 0:
        q_rope = tl.load(q_at[:, None] + L + r[None, :], mask=valid[:, None] & (r < R)[None, :], other=0.0)

    position = context + token
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, L_PAD), tl.float32)
    low = 0
    high = tl.minimum(context + first + BLOCK_Q, seq_len)
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(high, TILE), SPLITS) * TILE
        low = split * share
        high = tl.minimum(low + share, high)
    table = block_table + request.to(tl.int64) * stride_bt
    factor = scale * _LOG2E
    for start in range(low, high, TILE):
        at = start + tl.arange(0, TILE)
        read = at < high
        page = tl.load(table + at // PAGE, mask=read, other=0).to(tl.int64)
        rows = cache + page * stride_cb + (at % PAGE) * stride_cn
        k = tl.load(rows[None, :] + c[:, None], mask=read[None, :] & in_latent[:, None], other=0.0).to(q.dtype)
        s = tl.dot(q, k, input_precision=PRECISION)
        if R > 0:
            k_rope = tl.load(rows[None, :] + L + r[:, None], mask=read[None, :] & (r < R)[:, None], other=0.0)
            s = tl.dot(q_rope, k_rope.to(q.dtype), s, input_precision=PRECISION)
        s = tl.where(read[None, :] & (at[None, :] <= position[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * factor)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * factor - m_safe[:, None])
        alpha = tl.exp2(m - m_safe)
        acc = tl.dot(p.to(q.dtype), tl.trans(k), acc * alpha[:, None], input_precision=PRECISION)
        total = total * alpha + tl.sum(p, 1)
        m = m_new
    mask = valid[:, None] & in_latent[None, :]
    if SPLITS > 1:
        base = ((begin + token) * HEADS + h) * SPLITS + split
        tl.store(partial + base.to(tl.int64)[:, None] * L_PAD + c[None, :], acc, mask=mask)
        tl.store(maxima + base, m, mask=valid)
        tl.store(sums + base, total, mask=valid)
    else:
        acc = acc / tl.maximum(total, 1e-30)[:, None]
        o_at = output + (begin + token).to(tl.int64) * stride_ot + h * stride_oh
        tl.store(o_at[:, None] + c[None, :], acc.to(output.dtype.element_ty), mask=mask)


@planned
def mla_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    kv_lora_rank: int,
    scale: float,
    max_query_len: int,
    num_decodes: int,
) -> Tensor:
    """See :func:`vllm_fl.catalog.attention.mla_attention`.

    Raises:
        NotImplementedError: latents of more than 512 entries, or a stride that is not taken.
    """
    if kv_lora_rank > _MOST_ENTRIES:
        raise NotImplementedError(f"kv_lora_rank: latents of {kv_lora_rank} entries, at most {_MOST_ENTRIES}")
    need_unit_stride("query", query)
    need_unit_stride("kv_cache", kv_cache)
    tokens, num_heads, width = query.shape
    requests = seq_lens.shape[0]
    # Decodes write all of their rows; past other requests there may be rows of padding.
    new = query.new_empty if num_decodes == tokens else query.new_zeros
    output = new((tokens, num_heads, kv_lora_rank))
    if not requests or not tokens:
        return output
    rope = width - kv_lora_rank
    shape = {
        "HEADS": num_heads,
        "L": kv_lora_rank,
        "L_PAD": max(power_of_2(kv_lora_rank), 16),
        "R": rope,
        "R_PAD": max(power_of_2(rope), 16),
        "PAGE": kv_cache.shape[1],
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }
    strides = (*query.stride()[:2], *output.stride()[:2], *kv_cache.stride()[:2], block_table.stride(0))
    tensors = (query, kv_cache, block_table, seq_lens, query_start_loc, output)
    if num_decodes:
        tile = _tile(1, num_heads, query)
        splits, room = choose_splits(num_decodes, num_heads, cdiv(num_heads, tile.rows), shape["L_PAD"], None, query)
        _mla_attend[(num_decodes, cdiv(num_heads, tile.rows), splits)](
            *tensors, *room, scale, 0, num_decodes, *strides, **shape,
            BLOCK_H=tile.rows, BLOCK_Q=1, TILE=tile.keys, DECODE=True, SPLITS=splits,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            join_splits[(num_decodes, num_heads)](
                *room, output, *output.stride()[:2],
                D=kv_lora_rank, D_PAD=shape["L_PAD"], SPLITS=splits, num_warps=4,
            )  # fmt: skip
    if num_decodes < requests:
        tile = _tile(max_query_len, num_heads, query)
        block_h = min(power_of_2(num_heads), tile.rows)
        block_q = tile.rows // block_h
        rest = requests - num_decodes
        # Each request may end in a block that is not full.
        blocks = (tokens - num_decodes) // block_q + rest
        _mla_attend[(blocks, cdiv(num_heads, block_h), 1)](
            *tensors, None, None, None, scale, num_decodes, rest, *strides, **shape,
            BLOCK_H=block_h, BLOCK_Q=block_q, TILE=tile.keys, DECODE=False, SPLITS=1,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return output


def _tile(query_len: int, num_heads: int, like: Tensor) -> _Tile:
    """Not measured: as many rows as the sums of one tile of latents leave registers for."""
    is_large = shared_memory(like.device) >= 160 * 1024
    if like.dtype == torch.float32 or not is_large:
        return _Tile(16, 16, 4, 1)
    if query_len * num_heads <= 16:
        return _Tile(16, 32, 4, 2)
    return _Tile(32, 32, 8, 2)


def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`vllm_fl.catalog.attention.concat_and_cache_mla`."""
    size, cache = kv_c.shape[1], kv_cache.unsqueeze(1)
    reshape_and_cache(kv_c.unsqueeze(1), k_pe.unsqueeze(1), cache[..., :size], cache[..., size:], slot_mapping)
