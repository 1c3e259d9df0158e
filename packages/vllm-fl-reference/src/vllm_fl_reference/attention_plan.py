"""How a step's requests become padded batches for attention.

One step of the engine is a packed batch: the query tokens of all requests, one request after another, and a block
table that says where the keys and values of each request lie. `AttentionStep` turns it into a few padded batches, once
for all layers.

Shapes: T query tokens, R requests, Hq query heads, Hkv key and value heads, G = Hq / Hkv, D the head size; a padded
batch has B segments of requests, Q queries and L keys each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

#: Most scores (B * Q * L) of a padded batch, for each head; a longer prefill is cut into pieces.
MAX_SCORES = 1 << 22
#: Most bytes of gathered keys and values of a padded batch of more than one segment.
MAX_KEY_BYTES = 64 << 20
#: Masks up to this many elements are kept for the next layer, larger ones are made again.
MAX_KEPT_MASK = 1 << 20
#: The tiles of PyTorch's fused kernel for CUDA hold this many queries, or a multiple.
TILE_QUERIES = 32
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


def padded_queries(queries: int, device: torch.device) -> int:
    """The Q of a padded batch: one more, on a device, where the last tile of the fused kernel would hold one query.

    Where heads share their keys, the kernel takes such a tile for a decode of all heads, which has no masks of its own.
    """
    return queries + int(device.type != "cpu" and queries > 1 and queries % TILE_QUERIES == 1)


class PaddedBatch:
    """Segments computed together, with the index tensors and masks that all layers share.

    Args:
        segments: at least one.
        window: as in AttentionOptions.
        device: where the tensors of the layers live.
    """

    def __init__(self, segments: Sequence[Segment], window: int | None, device: torch.device) -> None:
        self.size = len(segments)
        self.queries = padded_queries(max(item.queries for item in segments), device)
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
        """What `find_cache_rows` gives, kept for the other layers with this block table."""
        index = self._rows.get((block_size, rows_per_block))
        if index is None:
            index = self.find_cache_rows(block_table, block_size, rows_per_block)
            self._rows[block_size, rows_per_block] = index
        return index

    def find_cache_rows(self, block_table: Tensor, block_size: int, rows_per_block: int) -> Tensor:
        """[B * L]: where the keys lie, as ``block * rows_per_block + offset``; padding repeats the last key.

        A repeated key is finite wherever the real ones are; a block that was never written might not be.
        """
        key = self._key_positions()
        block = block_table[self._request[:, None], key // block_size].long()
        return (block * rows_per_block + key % block_size).flatten()

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
