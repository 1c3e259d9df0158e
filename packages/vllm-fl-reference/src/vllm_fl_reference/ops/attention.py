"""The attention backend, and writing to the paged key-value cache."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from vllm_fl_reference.attention_plan import AttentionStep
from vllm_fl_reference.paged_attention import CacheRows, latent_attention


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """The paged attention of this distribution, or for latent attention the backend that calls `mla_attention`."""
    if use_sparse:
        raise NotImplementedError("the PyTorch reference has no backend for sparse attention")
    return "vllm_fl.integration.mla.MLABackend" if use_mla else "vllm_fl_reference.attention.PagedAttentionBackend"


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value into its slot of the paged cache; negative slots are skipped."""
    count = slot_mapping.shape[0]
    if count == 0:
        return
    key, value = key[:count], value[:count]
    if torch.compiler.is_compiling() or slot_mapping.device.type != "cpu":
        slot_mapping, key, value = _without_skipped(slot_mapping, key, value, key_cache, value_cache)
    elif int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        slot_mapping, key, value = slot_mapping[kept], key[kept], value[kept]
    _write(key_cache, slot_mapping, key)
    _write(value_cache, slot_mapping, value)


def _without_skipped(
    slots: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Slots and rows of unchanged number in which no token is skipped, found without waiting for the device.

    A skipped token repeats the write of the first one that is not skipped. If all are, slot 0 is given back its own
    contents.
    """
    valid = slots >= 0
    source = torch.where(valid, torch.arange(slots.shape[0], device=slots.device), valid.int().argmax())
    some = valid.any()
    key = torch.where(some, key[source], key_cache[0, :, 0].to(key.dtype))
    value = torch.where(some, value[source], value_cache[0, :, 0].to(value.dtype))
    return slots[source].clamp(min=0), key, value


def _write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """``cache[slot // block_size, :, slot % block_size] = row``; `cache` is [num_blocks, H, block_size, D]."""
    blocks = cache.transpose(1, 2)
    block_size = blocks.shape[1]
    rows = rows.to(cache.dtype)
    if blocks.stride(0) == block_size * blocks.stride(1):  # token by token in memory: one dimension of slots
        blocks.flatten(0, 1).index_copy_(0, slots.long(), rows)
    else:
        blocks.index_put_((slots // block_size, slots % block_size), rows)


def compute_slot_mapping(
    query_start_loc: Tensor, positions: Tensor, block_table: Tensor, slot_mapping: Tensor, block_size: int
) -> None:
    """The cache slot of each token of a batch of requests; -1 past the last token."""
    count = min(positions.shape[0], slot_mapping.shape[0])
    if not torch.compiler.is_compiling() and query_start_loc.device.type == "cpu":
        count = min(count, int(query_start_loc[-1]))  # reading it waits for the device elsewhere
    slot_mapping[count:].fill_(-1)
    if count == 0 or block_table.numel() == 0:
        slot_mapping[:count].fill_(-1)
        return
    token = torch.arange(count, device=positions.device, dtype=query_start_loc.dtype)
    request = torch.searchsorted(query_start_loc, token, right=True) - 1
    real = token < query_start_loc[-1]
    position = positions[:count].to(torch.int64).masked_fill(~real, 0)
    block = block_table[request.clamp(max=block_table.shape[0] - 1), position // block_size].to(torch.int64)
    slot_mapping[:count] = torch.where(real, block * block_size + position % block_size, -1)


def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's latent and rotated key into its slot of the paged latent cache; negative slots are skipped."""
    size, cache = kv_c.shape[1], kv_cache.unsqueeze(1)
    reshape_and_cache(kv_c.unsqueeze(1), k_pe.unsqueeze(1), cache[..., :size], cache[..., size:], slot_mapping)


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
    """Latent attention in padded batches. It reads the lengths on the host, and plans a batch once for all layers."""
    row_bytes = kv_cache.shape[-1] * kv_cache.element_size()
    step = _plan(tuple(query_start_loc.tolist()), tuple(seq_lens.tolist()), query.device, row_bytes)
    output = query.new_zeros((*query.shape[:2], kv_lora_rank))
    latent_attention(query, CacheRows(kv_cache.unsqueeze(1)), block_table, output, step, scale)
    return output


@functools.lru_cache(maxsize=1)
def _plan(
    query_start: tuple[int, ...], seq_lens: tuple[int, ...], device: torch.device, row_bytes: int
) -> AttentionStep:
    """A batch of these lengths, whatever its block table; the layers of a step ask for it one after the other."""
    return AttentionStep(list(query_start), list(seq_lens), None, device, row_bytes=row_bytes)
