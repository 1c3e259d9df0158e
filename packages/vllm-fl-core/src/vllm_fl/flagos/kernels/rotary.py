"""Rotary position embedding: one program a token and block of heads, query and key in the same launch.

Cosines and sines of a token are loaded once for all heads of a block. Query and key may have any token and head strides
and need not share them; their last dimension, and that of the tables, must be contiguous. Products are in float32. Any
device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import cdiv, need_unit_stride, power_of_2, warps_for
from .launch import fast
from .planned import planned

_TILE = 1024  # pairs of entries, rotated or passed through, of a program


@triton.jit
def _rotate(
    source, target, cos, sin, first_head, num_heads, source_head_stride, half, size,
    HEADS: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of one token from `first_head` on; `source` and `target` point to that token."""
    head = first_head + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    has_head = (head < num_heads)[:, None]
    mask = has_head & (i < half)[None, :]
    c = tl.load(cos + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + i, mask=i < half, other=0.0).to(tl.float32)[None, :]
    read = source + head[:, None] * source_head_stride
    write = target + head[:, None] * size
    if NEOX:
        a = tl.load(read + i[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(read + half + i[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(write + i[None, :], (a * c - b * s).to(target.dtype.element_ty), mask=mask)
        tl.store(write + half + i[None, :], (b * c + a * s).to(target.dtype.element_ty), mask=mask)
    else:
        j = tl.arange(0, 2 * HALF)
        both = has_head & (j < 2 * half)[None, :]
        pairs = tl.load(read + j[None, :], mask=both, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(pairs, (HEADS, HALF, 2)))
        rotated = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (HEADS, 2 * HALF))
        tl.store(write + j[None, :], rotated.to(target.dtype.element_ty), mask=both)
    if PASS > 0:
        rest = 2 * half + tl.arange(0, PASS)
        keep = has_head & (rest < size)[None, :]
        tl.store(write + rest[None, :], tl.load(read + rest[None, :], mask=keep), mask=keep)


@fast
@triton.jit
def _rotary_embedding(
    query, key, query_out, key_out, cos, sin, positions,
    query_heads, key_heads, query_blocks, half, size,
    query_stride, query_head_stride, key_stride, key_head_stride, cos_stride, sin_stride, position_stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, PASS: tl.constexpr, NEOX: tl.constexpr, HAS_KEY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    position = tl.load(positions + token * position_stride).to(tl.int64)
    c, s = cos + position * cos_stride, sin + position * sin_stride
    if block < query_blocks:
        _rotate(
            query + token * query_stride, query_out + token * query_heads * size, c, s, block * HEADS,
            query_heads, query_head_stride, half, size, HEADS, HALF, PASS, NEOX,
        )  # fmt: skip
    elif HAS_KEY:
        _rotate(
            key + token * key_stride, key_out + token * key_heads * size, c, s, (block - query_blocks) * HEADS,
            key_heads, key_head_stride, half, size, HEADS, HALF, PASS, NEOX,
        )  # fmt: skip


@planned
def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> tuple[Tensor, Tensor] | Tensor:
    """See :func:`vllm_fl.catalog.rotary.rotary_embedding`."""
    tokens, query_heads, size = query.shape
    half = cos.shape[-1]
    for name, x in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        if x is not None:
            need_unit_stride(name, x)
    if key is not None and key.shape[-1] != size:
        raise NotImplementedError(f"key: heads of {key.shape[-1]} entries, those of the query have {size}")
    query_out = query.new_empty(query.shape)
    key_out = None if key is None else key.new_empty(key.shape)
    key_heads = 0 if key is None else key.shape[1]
    passed = size - 2 * half
    half_block, pass_block = power_of_2(half), power_of_2(passed) if passed else 0
    per_head = max(half_block, pass_block // 2)
    heads = min(power_of_2(max(query_heads, key_heads)), max(_TILE // per_head, 1))
    query_blocks, key_blocks = cdiv(query_heads, heads), cdiv(key_heads, heads)
    if tokens and query_blocks + key_blocks:
        _rotary_embedding[(tokens, query_blocks + key_blocks)](
            query, key, query_out, key_out, cos, sin, position_ids, query_heads, key_heads, query_blocks, half, size,
            query.stride(0), query.stride(1), 0 if key is None else key.stride(0), 0 if key is None else key.stride(1),
            cos.stride(0), sin.stride(0), position_ids.stride(0),
            HEADS=heads, HALF=half_block, PASS=pass_block, NEOX=is_neox_style,
            HAS_KEY=key is not None, num_warps=warps_for(heads * per_head),
        )  # fmt: skip
    return query_out if key_out is None else (query_out, key_out)
