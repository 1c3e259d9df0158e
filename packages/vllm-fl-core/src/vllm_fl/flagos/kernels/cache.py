"""The paged KV cache: writing keys and values into their slots, and finding the slots.

Slots and addresses are 64-bit; caches, keys and values may have any strides. Values are converted to the cache's dtype.
Any device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .common import cdiv, power_of_2, warps_for
from .launch import fast
from .planned import planned

_TILE = 2048  # entries of a key or value that a program copies at a time
_BLOCK = 1024  # tokens that a program places at a time


@triton.jit
def _copy(
    source, cache, token, block, offset, head, heads, size, s_token, s_head, s_entry, c_block, c_head, c_offset,
    c_entry, SIZE: tl.constexpr,
):  # fmt: skip
    entry = tl.arange(0, SIZE)
    mask = (head < heads)[:, None] & (entry < size)[None, :]
    read = source + token * s_token + head[:, None] * s_head + entry[None, :] * s_entry
    write = cache + block * c_block + offset * c_offset + head[:, None].to(tl.int64) * c_head + entry[None, :] * c_entry
    tl.store(write, tl.load(read, mask=mask).to(cache.dtype.element_ty), mask=mask)


@fast
@triton.jit
def _reshape_and_cache(
    key, value, key_cache, value_cache, slots, slot_stride, heads, key_size, value_size, block_size,
    k_token, k_head, k_entry, v_token, v_head, v_entry,
    kc_block, kc_head, kc_offset, kc_entry, vc_block, vc_head, vc_offset, vc_entry,
    HEADS: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_stride).to(tl.int64)
    if slot >= 0:
        block, offset = slot // block_size, slot % block_size
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        _copy(
            key, key_cache, token, block, offset, head, heads, key_size, k_token, k_head, k_entry,
            kc_block, kc_head, kc_offset, kc_entry, KEY_SIZE,
        )  # fmt: skip
        _copy(
            value, value_cache, token, block, offset, head, heads, value_size, v_token, v_head, v_entry,
            vc_block, vc_head, vc_offset, vc_entry, VALUE_SIZE,
        )  # fmt: skip


@planned
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`vllm_fl.catalog.attention.reshape_and_cache`."""
    tokens, heads = slot_mapping.shape[0], key.shape[1]
    if not tokens or not heads or not key_cache.numel():
        return
    key_size, value_size = power_of_2(key.shape[2]), power_of_2(value.shape[2])
    per_program = min(power_of_2(heads), max(_TILE // max(key_size, value_size), 1))
    _reshape_and_cache[(tokens, cdiv(heads, per_program))](
        key, value, key_cache, value_cache, slot_mapping, slot_mapping.stride(0),
        heads, key.shape[2], value.shape[2], key_cache.shape[2],
        *key.stride(), *value.stride(), *key_cache.stride(), *value_cache.stride(),
        HEADS=per_program, KEY_SIZE=key_size, VALUE_SIZE=value_size,
        num_warps=warps_for(per_program * max(key_size, value_size)),
    )  # fmt: skip


@fast
@triton.jit(do_not_specialize=["requests", "size"])
def _compute_slot_mapping(
    query_start_loc, positions, block_table, slots, requests, size, table_stride, block_size, BLOCK: tl.constexpr
):  # fmt: skip
    """One program a request, and one for what lies beyond the last token."""
    request = tl.program_id(0)
    begin = tl.load(query_start_loc + request)
    end = size
    if request < requests:
        end = tl.load(query_start_loc + request + 1).to(end.dtype)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        mask = token < end
        slot = tl.full((BLOCK,), -1, tl.int64)
        if request < requests:
            position = tl.load(positions + token, mask=mask, other=0).to(tl.int64)
            row = block_table + request.to(tl.int64) * table_stride
            block = tl.load(row + position // block_size, mask=mask, other=0).to(tl.int64)
            slot = block * block_size + position % block_size
        tl.store(slots + token, slot.to(slots.dtype.element_ty), mask=mask)


@planned
def compute_slot_mapping(
    query_start_loc: Tensor, positions: Tensor, block_table: Tensor, slot_mapping: Tensor, block_size: int
) -> None:
    """See :func:`vllm_fl.catalog.attention.compute_slot_mapping`."""
    for name, x in (("query_start_loc", query_start_loc), ("positions", positions), ("slot_mapping", slot_mapping)):
        if x.stride(0) != 1 and x.shape[0] > 1:
            raise NotImplementedError(f"{name}: stride {x.stride(0)}, expected 1")
    if block_table.stride(1) != 1 and block_table.shape[1] > 1:
        raise NotImplementedError(f"block_table: the last dimension has stride {block_table.stride(1)}, expected 1")
    size = slot_mapping.shape[0]
    if not size:
        return
    requests = query_start_loc.shape[0] - 1
    _compute_slot_mapping[(requests + 1,)](
        query_start_loc, positions, block_table, slot_mapping, requests, size, block_table.stride(0), block_size,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
