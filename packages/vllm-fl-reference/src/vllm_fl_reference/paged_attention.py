"""Attention over a paged KV cache, batched, in PyTorch operations that run on any device.

For each padded batch of a step (see attention_plan, also for the names of the axes) a layer needs a gather, an
attention call and a copy. The cache is [blocks, Hkv, N, 2 * D] with block size N, keys in the first half of the last
axis; its strides are free, [blocks, N, Hkv, 2 * D] in memory is the fast case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_plan import AttentionStep, PaddedBatch

#: Most scores that the explicit softmax holds at once, over all heads.
MAX_EXPLICIT_SCORES = 1 << 24


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks of attention besides its tensors.

    Args:
        scale: multiplies the scores.
        window: a query sees this many positions, itself included; None sees all. Where attention is not causal
            it reaches as far to both sides.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; None leaves them.
        sinks: [Hq], logits of a key without a value, which only takes its share of the softmax (gpt-oss); or None.
        alibi_slopes: [Hq], float32: ``slope * (key position - query position)`` is added to the scores; or None.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether scaled_dot_product_attention covers it."""
        return self.soft_cap is None and self.sinks is None and self.alibi_slopes is None


class CacheRows:
    """Reads rows of one layer's paged cache.

    Where a token's keys and values lie together in memory and blocks are whole numbers of tokens apart, the cache is a
    matrix of tokens and a gather is one index_select; any other strides work through advanced indexing.

    Args:
        cache: [blocks, Hkv, N, 2 * D].
    """

    def __init__(self, cache: Tensor) -> None:
        blocks, heads, self.block_size, width = cache.shape
        to_block, to_head, to_token, to_element = cache.stride()
        together = to_element == 1 and (heads == 1 or to_head == width) and to_token >= heads * width
        self._cache = cache
        self._matrix: Tensor | None = None
        self.rows_per_block = self.block_size
        if together and to_block % to_token == 0 and to_block > 0:
            self.rows_per_block = to_block // to_token
            rows = (blocks - 1) * self.rows_per_block + self.block_size
            self._matrix = cache.as_strided((rows, heads * width), (to_token, 1))

    def gather(self, index: Tensor) -> Tensor:
        """[n] rows as ``block * rows_per_block + offset`` -> [n, Hkv, 2 * D]."""
        _, heads, _, width = self._cache.shape
        if self._matrix is not None:
            return self._matrix.index_select(0, index).view(-1, heads, width)
        return self._cache[index // self.rows_per_block, :, index % self.rows_per_block]


def paged_attention(
    query: Tensor, cache: CacheRows, output: Tensor, step: AttentionStep, options: AttentionOptions
) -> None:
    """Attention of the step's query tokens to the keys and values in a paged cache.

    Args:
        query: [at least T, Hq, D], floating.
        cache: of the layer; holds the query tokens' keys and values too. May be of another floating dtype.
        output: [at least T, Hq, D]; rows 0 to T - 1 are written.
        step: needs its block table.
        options: of the layer.

    Raises:
        ValueError: the step has no block table.
    """
    table = step.block_table
    if table is None:
        raise ValueError("attention over a cache needs a block table")
    head_size = query.shape[-1]
    for batch in step.batches(options.window):
        rows = cache.gather(batch.cache_rows(table, cache.block_size, cache.rows_per_block))
        rows = rows.to(query.dtype).view(batch.size, batch.keys, *rows.shape[1:])
        _attend(query, rows[..., :head_size], rows[..., head_size:], output, batch, options)


def latent_attention(
    query: Tensor, cache: CacheRows, block_table: Tensor, output: Tensor, step: AttentionStep, scale: float
) -> None:
    """Causal attention whose heads share a key, a row of the cache, and a value, the beginning of that row.

    Args:
        query: [at least T, H, C], floating.
        cache: of [blocks, 1, N, C].
        block_table: [at least R, blocks], integers; that of the step is not read, which may serve other tables.
        output: [at least T, H, Dv], Dv at most C; rows 0 to T - 1 are written.
        step: the batch.
        scale: multiplies the scores.
    """
    options = AttentionOptions(scale)
    for batch in step.batches(None):
        index = batch.find_cache_rows(block_table, cache.block_size, cache.rows_per_block)
        rows = cache.gather(index).to(query.dtype).view(batch.size, batch.keys, 1, query.shape[-1])
        # As values the rows keep their whole width, which PyTorch's fused kernel wants to be that of the keys.
        _attend(query, rows, rows, output, batch, options)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, step: AttentionStep, options: AttentionOptions
) -> None:
    """Attention within the step's tokens alone, without a cache (encoders).

    Args:
        query: [at least T, Hq, D], floating.
        key: [at least T, Hkv, D].
        value: [at least T, Hkv, Dv].
        output: [at least T, Hq, Dv]; rows 0 to T - 1 are written.
        step: every request's sequence is its query tokens.
        options: of the layer.
    """
    for batch in step.batches(options.window):
        rows = batch.token_rows()
        shape = (batch.size, batch.keys)
        keys = key.index_select(0, rows).view(*shape, *key.shape[1:])
        values = value.index_select(0, rows).view(*shape, *value.shape[1:])
        _attend(query, keys, values, output, batch, options)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, batch: PaddedBatch, options: AttentionOptions
) -> None:
    padded = batch.take(query)
    if options.plain:
        triangle = batch.triangle
        mask = None if triangle else batch.mask(query.dtype)
        result = fused_attention(padded, key, value, mask, triangle, options.scale)
    else:
        distances = None if options.alibi_slopes is None else batch.distances()
        result = explicit_attention(padded, key, value, batch.mask(torch.float32), options, distances)
    batch.put(result[..., : output.shape[-1]], output)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> Tensor:
    """scaled_dot_product_attention of a padded batch, with grouped heads laid out so that no key is copied.

    Args:
        query: [B, Q, Hq, D].
        key: [B, L, Hkv, D], any strides with the last axis dense.
        value: [B, L, Hkv, Dv], likewise.
        mask: [B, 1, Q, L], added to the scores, in the dtype of the query; or None.
        is_causal: query i sees keys 0 to i; excludes a mask.
        scale: multiplies the scores.

    Returns:
        [B, Q, Hkv, G, Dv], any strides.
    """
    size, queries, _, head_size = query.shape
    heads = key.shape[2]
    grouped = query.view(size, queries, heads, -1, head_size)
    groups = grouped.shape[3]
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if queries == 1:  # the G queries of a key head take the place of Q
        rows = grouped.squeeze(1)
        result = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
        return result.unsqueeze(1)
    if size == 1:  # the key heads take the place of B, and their G queries that of the heads
        rows = grouped[0].permute(1, 2, 0, 3)
        repeated = (item[0].unsqueeze(1).expand(-1, groups, -1, -1) for item in (key, value))
        result = F.scaled_dot_product_attention(rows, *repeated, attn_mask=mask, is_causal=is_causal, scale=scale)
        return result.permute(2, 0, 1, 3).unsqueeze(0)
    rows = query.transpose(1, 2)
    if heads == 1:  # repeated without a copy
        key, value = key.expand(-1, groups, -1, -1), value.expand(-1, groups, -1, -1)
    result = F.scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups > 1 and heads > 1
    )
    return result.transpose(1, 2).unflatten(2, (heads, groups))


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    distances: Tensor | None = None,
) -> Tensor:
    """Attention of a padded batch in float32, with soft cap, sinks and ALiBi.

    Args:
        query: [B, Q, Hq, D].
        key: [B, L, Hkv, D].
        value: [B, L, Hkv, Dv].
        mask: [B, 1, Q, L] float32, added to the scores after the soft cap; or None.
        options: scale, soft_cap, sinks, alibi_slopes.
        distances: [B, Q, L] float32, key position minus query position; needed with alibi_slopes.

    Returns:
        [B, Q, Hkv, G, Dv] float32.
    """
    size, queries, _, head_size = query.shape
    keys, heads = key.shape[1:3]
    grouped = query.view(size, queries, heads, -1, head_size).permute(0, 2, 3, 1, 4)  # B, Hkv, G, Q, D
    groups = grouped.shape[2]
    result = torch.empty(size, queries, heads, groups, value.shape[-1], dtype=torch.float32, device=query.device)
    chunk = max(1, MAX_EXPLICIT_SCORES // max(1, size * groups * queries * keys))
    for start in range(0, heads, chunk):
        part = slice(start, start + chunk)
        rows = grouped[:, part].reshape(size, -1, groups * queries, head_size).float() * options.scale
        scores = rows @ key[:, :, part].permute(0, 2, 3, 1).float()
        scores = scores.view(size, -1, groups, queries, keys)
        if options.soft_cap is not None:
            scores = (scores / options.soft_cap).tanh_().mul_(options.soft_cap)
        if options.alibi_slopes is not None and distances is not None:
            scores += options.alibi_slopes.view(heads, groups, 1, 1)[part] * distances[:, None, None]
        if mask is not None:
            scores += mask.unsqueeze(1)
        weights = _softmax(scores, options.sinks, heads, part).view(size, -1, groups * queries, keys)
        values = weights @ value[:, :, part].permute(0, 2, 1, 3).float()
        result[:, :, part] = values.view(size, -1, groups, queries, values.shape[-1]).permute(0, 3, 1, 2, 4)
    return result


def _softmax(scores: Tensor, sinks: Tensor | None, heads: int, part: slice) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(1, heads, -1, 1, 1)[:, part].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
