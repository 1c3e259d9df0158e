"""Attention one request at a time in float64, and random paged caches to try it on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_fl_reference.attention_plan import AttentionStep
from vllm_fl_reference.paged_attention import AttentionOptions

LAYOUTS = ("tokens first", "heads first", "padded blocks", "uneven blocks", "several layers")


@dataclass
class Case:
    """A packed batch with its cache; `sequences` holds each request's whole keys and values, [length, Hkv, D]."""

    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor
    slots: Tensor
    step: AttentionStep
    sequences: list[tuple[Tensor, Tensor]]


def make_cache(blocks: int, heads: int, block_size: int, width: int, dtype: torch.dtype, layout: str) -> Tensor:
    """[blocks, heads, block_size, width] of NaN, in a given memory order."""
    nan = float("nan")
    if layout == "heads first":
        return torch.full((blocks, heads, block_size, width), nan, dtype=dtype)
    if layout == "several layers":
        return torch.full((blocks, 3, block_size, heads, width), nan, dtype=dtype)[:, 1].transpose(1, 2)
    row = heads * width
    to_block = block_size * row
    if layout == "padded blocks":
        to_block += 2 * row
    if layout == "uneven blocks":
        to_block += 2
    memory = torch.full((blocks * to_block,), nan, dtype=dtype)
    return memory.as_strided((blocks, heads, block_size, width), (to_block, width, row, 1))


def make_case(
    requests: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "tokens first",
    causal: bool | list[bool] = True,
    seed: int = 0,
) -> Case:
    """A batch of requests given as (cached tokens, query tokens); the cache holds the cached tokens only."""
    random = torch.Generator().manual_seed(seed)
    query_heads, key_heads = heads
    lengths = [cached + new for cached, new in requests]
    widest = max([-(-length // block_size) for length in lengths], default=1)
    needed = sum(-(-length // block_size) for length in lengths)
    blocks = needed + 3
    table = torch.zeros(len(requests), max(widest, 1) + 1, dtype=torch.int32)
    free = iter((torch.randperm(blocks - 1, generator=random) + 1).tolist())
    cache = make_cache(blocks, key_heads, block_size, 2 * head_size, cache_dtype or dtype, layout)
    query_start, sequences, slots, keys, values = [0], [], [], [], []
    for index, (cached, new) in enumerate(requests):
        length = cached + new
        own = [next(free) for _ in range(-(-length // block_size))]
        table[index, : len(own)] = torch.tensor(own, dtype=torch.int32)
        stored = torch.randn(length, key_heads, 2 * head_size, generator=random).to(cache_dtype or dtype)
        for position in range(cached):
            cache[own[position // block_size], :, position % block_size] = stored[position]
        slots += [own[p // block_size] * block_size + p % block_size for p in range(cached, length)]
        sequences.append((stored[..., :head_size], stored[..., head_size:]))
        keys.append(stored[cached:, :, :head_size].to(dtype))
        values.append(stored[cached:, :, head_size:].to(dtype))
        query_start.append(query_start[-1] + new)
    tokens = query_start[-1]
    empty = torch.empty(0, key_heads, head_size, dtype=dtype)
    return Case(
        query=torch.randn(tokens, query_heads, head_size, generator=random).to(dtype),
        key=torch.cat([empty, *keys]),
        value=torch.cat([empty, *values]),
        cache=cache,
        slots=torch.tensor(slots, dtype=torch.int64),
        step=AttentionStep(query_start, lengths, table, torch.device("cpu"), causal),
        sequences=sequences,
    )


def fill(case: Case) -> None:
    """Write the new tokens into the cache, one by one."""
    size, width = case.cache.shape[2], case.query.shape[-1]
    for token, slot in enumerate(case.slots.tolist()):
        case.cache[slot // size, :, slot % size, :width] = case.key[token]
        case.cache[slot // size, :, slot % size, width:] = case.value[token]


def attention(case: Case, options: AttentionOptions) -> Tensor:
    """[T, Hq, D] float64."""
    output = torch.full(case.query.shape, float("nan"), dtype=torch.float64)
    step = case.step
    group = case.query.shape[1] // case.cache.shape[1]
    for index, pair in enumerate(case.sequences):
        keys, values = (item.double().repeat_interleave(group, 1) for item in pair)  # [length, Hq, D]
        start, end = step.query_start[index], step.query_start[index + 1]
        causal = step.causal[index] if isinstance(step.causal, list) else step.causal
        positions = torch.arange(len(keys) - (end - start), len(keys), dtype=torch.float64)
        distances = torch.arange(len(keys), dtype=torch.float64) - positions[:, None]  # key minus query
        scores = options.scale * torch.einsum("qhd,khd->hqk", case.query[start:end].double(), keys)
        if options.soft_cap is not None:
            scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
        if options.alibi_slopes is not None:
            scores = scores + options.alibi_slopes.double()[:, None, None] * distances
        if causal:
            scores = scores.masked_fill(distances > 0, float("-inf"))
        if options.window is not None:
            scores = scores.masked_fill(distances.abs() >= options.window, float("-inf"))
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True)
        if options.sinks is not None:
            total = total + options.sinks.double().exp()[:, None, None]
        output[start:end] = torch.einsum("hqk,khd->qhd", weights / total, values)
    return output
