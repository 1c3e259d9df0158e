"""Attention over a paged KV cache, batched, in PyTorch operations that run on any device.

One step of the engine is a packed batch: the query tokens of all requests, one request after another, and a block
table that says where the keys and values of each request lie. `AttentionStep` turns it into a few padded batches, once
for all layers; each layer then needs a gather, an attention call and a copy a padded batch.

Shapes: T query tokens, R requests, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D the head size, N the block
size; a padded batch has B sequences, Q queries and L keys each. The cache is [blocks, Hkv, N, 2 * D], keys in the first
half of the last axis; its strides are free, [blocks, N, Hkv, 2 * D] in memory is the fast case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Most scores (B * Q * L) of a padded batch, for each head; a longer prefill is cut into pieces.
MAX_SCORES = 1 << 22
#: Most bytes of gathered keys and values of a padded batch of more than one sequence.
MAX_KEY_BYTES = 64 << 20
#: Masks up to this many elements are kept for the next layer, larger ones are made again.
MAX_KEPT_MASK = 1 << 20
#: Most scores that the explicit softmax holds at once, over all heads.
MAX_EXPLICIT_SCORES = 1 << 24
#: Cost model of the grouping, in scores of one head: gathering one key, and one more padded batch.
KEY_COST = 6
BATCH_COST = 2048


class Segment(NamedTuple):
    """Neighbouring query tokens of one request, with the keys that they may see."""

    request: int
    token: int  #: first query token, a row of the packed batch
    queries: int
    position: int  #: position of the first query token in its sequence
    key_start: int
    key_end: int
    causal: bool

    @property
    def keys(self) -> int:
        return self.key_end - self.key_start


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


def make_segments(
    query_start: Sequence[int], seq_lens: Sequence[int], causal: Sequence[bool], window: int | None = None
) -> list[Segment]:
    """Cut a packed batch into segments of at most MAX_SCORES scores.

    Args:
        query_start: R + 1 token offsets of the requests.
        seq_lens: R lengths, cached tokens and query tokens together.
        causal: R flags.
        window: as in AttentionOptions.

    Returns:
        The segments in the order of the tokens; requests without a query token have none.
    """
    segments = []
    for request, length in enumerate(seq_lens):
        token, end = query_start[request], query_start[request + 1]
        position = length - (end - token)
        step = max(1, MAX_SCORES // max(length, 1))
        while token < end:
            queries = min(step, end - token)
            last = position + queries - 1
            key_start = 0 if window is None else max(0, position - window + 1)
            key_end = length
            if causal[request]:
                key_end = last + 1
            elif window is not None:
                key_end = min(length, last + window)
            segments.append(Segment(request, token, queries, position, key_start, key_end, causal[request]))
            token += queries
            position += queries
    return segments


def group_segments(segments: Sequence[Segment], row_bytes: int) -> list[list[Segment]]:
    """Put segments together into padded batches, as long as that costs less than one more batch.

    A padded batch of B segments costs ``B * max L * (max Q + KEY_COST)``, plus BATCH_COST. Decodes and prefills, short
    and long sequences so part by themselves when their number or length makes the padding expensive.

    Args:
        segments: in any order.
        row_bytes: bytes of one token's keys and values in one layer.

    Returns:
        Groups; in each the segments are in the order of their tokens.
    """
    groups: list[list[Segment]] = []
    group: list[Segment] = []
    keys = cost = 0
    for segment in sorted(segments, key=lambda item: (item.queries, item.keys)):
        size, width = len(group) + 1, max(keys, segment.keys)
        joined = size * width * (segment.queries + KEY_COST)
        alone = segment.keys * (segment.queries + KEY_COST)
        fits = size * width * segment.queries <= MAX_SCORES and size * width * row_bytes <= MAX_KEY_BYTES
        if group and fits and joined <= cost + alone + BATCH_COST:
            group.append(segment)
            keys, cost = width, joined
        else:
            group = [segment]
            groups.append(group)
            keys, cost = segment.keys, alone
    return [sorted(group, key=lambda item: item.token) for group in groups]


class PaddedBatch:
    """Segments computed together, with the index tensors and masks that all layers share.

    Args:
        segments: at least one.
        window: as in AttentionOptions.
        device: where the tensors of the layers live.
    """

    def __init__(self, segments: Sequence[Segment], window: int | None, device: torch.device) -> None:
        self.size = len(segments)
        self.queries = max(item.queries for item in segments)
        self.keys = max(item.keys for item in segments)
        first = segments[0].token
        whole = all(
            item.queries == self.queries and item.token == first + index * self.queries
            for index, item in enumerate(segments)
        )
        #: the packed tokens, where they need no padding
        self.tokens = slice(first, first + self.size * self.queries) if whole else None
        equal = all(item.keys == self.keys for item in segments)
        causal = [item.causal for item in segments]
        self._unmasked = equal and (self.queries == 1 or (window is None and not any(causal)))
        self._triangle = all(causal) and all(
            item.position == 0 and item.key_start == 0 and (window is None or item.keys <= window) for item in segments
        )
        self._window = window
        self._causal = all(causal)
        self._bidirectional = None if self._causal else torch.tensor([not flag for flag in causal], device=device)
        columns = torch.tensor([item[:6] for item in segments], dtype=torch.int64).to(device)
        self._request, self._token, self._count, self._position, self._key_start, self._key_end = columns.unbind(1)
        self._masks: dict[torch.dtype, Tensor] = {}
        self._rows: dict[tuple[int, int], Tensor] = {}
        if self.tokens is None:
            self._pad_tokens(device)

    def _pad_tokens(self, device: torch.device) -> None:
        offset = torch.arange(self.queries, device=device)
        last = (self._count - 1)[:, None]
        padded = (self._token[:, None] + torch.minimum(offset, last)).flatten()
        self._padded = padded
        self._real = (offset <= last).flatten().nonzero().flatten()
        self._target = padded[self._real]

    def take(self, packed: Tensor) -> Tensor:
        """[T, Hq, D] -> [B, Q, Hq, D]; padding repeats the last token of its segment."""
        rows = packed[self.tokens] if self.tokens is not None else packed.index_select(0, self._padded)
        return rows.view(self.size, self.queries, *packed.shape[1:])

    def put(self, result: Tensor, packed: Tensor) -> None:
        """Write [B, Q, Hkv, G, D] to the segments' rows of [T, Hq, D]."""
        if self.tokens is not None:
            packed[self.tokens].view(result.shape).copy_(result)
            return
        rows = result.reshape(self.size * self.queries, *packed.shape[1:]).index_select(0, self._real)
        packed.index_copy_(0, self._target, rows.to(packed.dtype))

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """[B, 1, Q, L] of 0 and -inf, to be added to the scores; None if every query sees every key."""
        if self._unmasked:
            return None
        mask = self._masks.get(dtype)
        if mask is None:
            mask = torch.zeros(self.size, 1, self.queries, self.keys, dtype=dtype, device=self._key_end.device)
            mask.masked_fill_(~self._visible()[:, None], float("-inf"))
            if mask.numel() <= MAX_KEPT_MASK:
                self._masks[dtype] = mask
        return mask

    @property
    def triangle(self) -> bool:
        """Whether query i sees keys 0 to i and nothing else, in each segment; padding then needs no mask."""
        return self._triangle and not self._unmasked

    def distances(self) -> Tensor:
        """[B, Q, L] float32: key position minus query position."""
        query, key = self._positions()
        return (key[:, None, :] - query[:, :, None]).float()

    def cache_rows(self, block_table: Tensor, block_size: int, rows_per_block: int) -> Tensor:
        """[B * L]: where the keys lie, as ``block * rows_per_block + offset``; padding repeats the last key.

        A repeated key is finite wherever the real ones are; a block that was never written might not be.
        """
        index = self._rows.get((block_size, rows_per_block))
        if index is None:
            key = self._key_positions()
            block = block_table[self._request[:, None], key // block_size].long()
            index = (block * rows_per_block + key % block_size).flatten()
            self._rows[block_size, rows_per_block] = index
        return index

    def token_rows(self) -> Tensor:
        """[B * L]: the keys' tokens in the packed batch, for sequences that lie in it whole."""
        index = self._rows.get((0, 0))
        if index is None:
            index = (self._token - self._position)[:, None] + self._key_positions()
            index = self._rows[0, 0] = index.flatten()
        return index

    def _key_positions(self) -> Tensor:
        _, key = self._positions()
        return torch.minimum(key, (self._key_end - 1)[:, None])

    def _positions(self) -> tuple[Tensor, Tensor]:
        """Positions of the queries [B, Q], where padding repeats the last, and of the keys [B, L]."""
        device = self._key_end.device
        offset = torch.minimum(torch.arange(self.queries, device=device), (self._count - 1)[:, None])
        key = self._key_start[:, None] + torch.arange(self.keys, device=device)
        return self._position[:, None] + offset, key

    def _visible(self) -> Tensor:
        query_rows, key_rows = self._positions()
        query, key = query_rows[:, :, None], key_rows[:, None, :]
        visible = key <= query
        if self._bidirectional is not None:
            visible |= self._bidirectional[:, None, None]
        visible &= key < self._key_end[:, None, None]
        if self._window is not None:
            visible &= (key - query).abs() < self._window
        return visible


@dataclass
class AttentionStep:
    """One packed batch of requests, shared by all layers that use the same block table.

    Args:
        query_start: R + 1 token offsets, starting with 0.
        seq_lens: R lengths, cached tokens and query tokens together.
        block_table: [at least R, blocks], integers; None where keys and values are not in a cache.
        device: where the layers' tensors live.
        causal: one flag for all requests, or R flags.
        row_bytes: bytes of one token's keys and values in one layer, for the bound on memory.
    """

    query_start: list[int]
    seq_lens: list[int]
    block_table: Tensor | None
    device: torch.device
    causal: bool | list[bool] = True
    row_bytes: int = 4096
    _batches: dict[int | None, list[PaddedBatch]] = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.query_start[-1]

    def batches(self, window: int | None) -> list[PaddedBatch]:
        """The padded batches for layers with this window; made at the first call, kept for the other layers."""
        batches = self._batches.get(window)
        if batches is None:
            causal = self.causal if isinstance(self.causal, list) else [self.causal] * len(self.seq_lens)
            segments = make_segments(self.query_start, self.seq_lens, causal, window)
            groups = group_segments(segments, self.row_bytes)
            batches = self._batches[window] = [PaddedBatch(group, window, self.device) for group in groups]
        return batches


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
    batch.put(result, output)


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
    result = F.scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups > 1
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
