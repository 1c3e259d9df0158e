"""The paged cache and the fused attention, with what their documentation asks for."""

from __future__ import annotations

import torch
from torch import Tensor

from .simulated_registry import HALF, require, require_contiguous, require_dtypes, require_one_dtype

_SCATTER = "npu_scatter_pa_kv_cache"
_ATTENTION = "npu_fused_infer_attention_score_v2"
_LARGEST = (1 << 31) - 1


def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Caches of memory order [blocks, block size, heads, size] only."""
    require(_SCATTER, cache_mode in (None, "Norm"), f"the simulation knows cache_mode='Norm', not {cache_mode!r}")
    _scatter(_SCATTER, key, value, key_cache, value_cache, slot_mapping, (torch.int32, torch.int64))


def _npu_reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    _scatter("_npu_reshape_and_cache", key, value, key_cache, value_cache, slot_indices, (torch.int32,))


def _scatter(
    name: str,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    require_dtypes(name, dtypes, slots=slots)
    require_one_dtype(name, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    tensors = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slots": slots}
    require_contiguous(name, **tensors)
    require(name, key.dim() == value.dim() == 3 and slots.dim() == 1, "keys are [T, heads, size], slots [T]")
    require(name, key.shape[:2] == value.shape[:2] and len(key) == len(slots), f"{len(key)} keys, {len(slots)} slots")
    for x, cache in ((key, key_cache), (value, value_cache)):
        require(name, cache.dim() == 4 and cache.shape[2:] == x.shape[1:], f"{tuple(cache.shape)} for {tuple(x.shape)}")
    count = key_cache.shape[0] * key_cache.shape[1]
    require(name, bool(((slots >= 0) & (slots < count)).all()), f"slots are 0 to {count - 1}, not {slots.tolist()}")
    require(name, len(slots.unique()) == len(slots), f"slots repeat: {slots.tolist()}")
    for x, cache in ((key, key_cache), (value, value_cache)):
        cache.view(count, *cache.shape[2:])[slots.long()] = x


def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
) -> tuple[Tensor, Tensor]:
    """Paged, layout BSND, keys as [blocks, block size, heads * size]; full, or causal from the last key."""
    require_dtypes(_ATTENTION, HALF, query=query)
    require_one_dtype(_ATTENTION, query=query, key=key, value=value)
    require_contiguous(_ATTENTION, query=query, key=key, value=value, atten_mask=atten_mask, block_table=block_table)
    kv_heads = num_key_value_heads or num_query_heads
    require(_ATTENTION, query.shape[-2] == num_query_heads <= 256, f"{num_query_heads} heads, {tuple(query.shape)}")
    divides = num_query_heads % kv_heads == 0 and num_query_heads <= 64 * kv_heads
    require(_ATTENTION, divides, f"{num_query_heads} heads on {kv_heads}")
    require(_ATTENTION, inner_precise in (0, 1), f"inner_precise={inner_precise}")
    require(_ATTENTION, actual_seq_kvlen is not None, "paged attention needs actual_seq_kvlen")
    assert actual_seq_kvlen is not None
    size = query.shape[-1]
    require(_ATTENTION, size % 16 == 0 and size <= 512, f"heads of size {size}")
    _check_pool(key, value, block_table, block_size, kv_heads, size, actual_seq_kvlen)
    assert block_table is not None
    queries = _requests(query, input_layout, actual_seq_qlen, len(actual_seq_kvlen))
    longest = query.shape[1]
    require(_ATTENTION, sparse_mode in (0, 3), f"the simulation does not know sparse_mode={sparse_mode}")
    if sparse_mode == 3 and longest > 1:
        _check_mask(atten_mask)
    else:
        require(_ATTENTION, atten_mask is None, "a mask without sparse_mode is not simulated")
    results = []
    for q, length, blocks in zip(queries, actual_seq_kvlen, block_table, strict=True):
        causal = sparse_mode == 3
        require(_ATTENTION, not causal or len(q) <= length, f"{len(q)} queries see {length} keys")
        used = blocks[: -(-length // block_size)].long()
        keys, values = (x[used].view(-1, kv_heads, size)[:length] for x in (key, value))
        results.append(_attend(q, keys, values, softmax_scale, causal))
    out = torch.cat(results).view(query.shape) if results else torch.empty_like(query)
    return out, torch.zeros(1)


def _check_pool(
    key: Tensor, value: Tensor, table: Tensor | None, block_size: int, heads: int, size: int, lengths: list[int]
) -> None:
    require(_ATTENTION, table is not None, "the simulation knows paged attention only")
    assert table is not None
    require_dtypes(_ATTENTION, (torch.int32,), block_table=table)
    require(_ATTENTION, key.shape == value.shape and key.dim() == 3, f"{tuple(key.shape)}, {tuple(value.shape)}")
    require(
        _ATTENTION, tuple(key.shape[1:]) == (block_size, heads * size), f"{tuple(key.shape)}, blocks of {block_size}"
    )
    require(_ATTENTION, 128 <= block_size <= 512 and block_size % 128 == 0, f"block_size={block_size}")
    require(_ATTENTION, heads * size <= 65535 and key.numel() <= _LARGEST, f"{tuple(key.shape)} is too large")
    needed = [-(-length // block_size) for length in lengths]
    require(_ATTENTION, table.dim() == 2 and len(table) == len(lengths), f"block_table {tuple(table.shape)}")
    require(_ATTENTION, table.shape[1] >= max(needed, default=0), f"block_table {tuple(table.shape)} for {lengths}")
    require(_ATTENTION, len(key) >= sum(needed), f"{len(key)} blocks for {lengths}")
    for row, count in zip(table.tolist(), needed, strict=True):
        require(_ATTENTION, all(0 <= block < len(key) for block in row[:count]), f"blocks {row[:count]} of {len(key)}")


def _requests(query: Tensor, layout: str, lengths: list[int] | None, requests: int) -> list[Tensor]:
    """The queries of each request, [S, heads, size]."""
    require(_ATTENTION, layout == "BSND", f"the simulation does not know input_layout={layout!r}")
    require(_ATTENTION, query.dim() == 4 and len(query) == requests, f"query {tuple(query.shape)}")
    require(_ATTENTION, query.shape[2] * query.shape[3] < 65536, f"query {tuple(query.shape)}")
    length = query.shape[1]
    whole = lengths is None or list(lengths) == [length] * requests
    require(_ATTENTION, whole, f"the simulation takes whole queries, not {lengths} of {length}")
    return list(query)


def _check_mask(mask: Tensor | None) -> None:
    require(_ATTENTION, mask is not None, "sparse_mode=3 needs atten_mask")
    assert mask is not None
    require_dtypes(_ATTENTION, (torch.bool, torch.int8, torch.uint8), atten_mask=mask)
    require(_ATTENTION, tuple(mask.shape[-2:]) == (2048, 2048), f"atten_mask is {tuple(mask.shape)}, not 2048 x 2048")
    above = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    require(_ATTENTION, torch.equal(mask.view(2048, 2048).bool(), above), "atten_mask is not the upper triangle")


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * scale
    if causal:
        hidden = torch.ones(len(query), len(keys), dtype=torch.bool).triu(1 + len(keys) - len(query))
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(query.dtype)
