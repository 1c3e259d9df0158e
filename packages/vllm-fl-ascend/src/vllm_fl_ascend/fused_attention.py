"""Paged attention on ``npu_fused_infer_attention_score_v2``, for the queries of one step of the engine.

The cache of a layer is used as a pool of half blocks. vLLM gives each block of N tokens and H heads of size D a page
of 2 * N * H * D entries; here the first half of a page holds the keys [N, H, D] and the second half the values. Keys
and values of all blocks are then two contiguous tensors of half blocks that overlap, the second one half block on, as
torch_npu's operators want them; and a page is still what vLLM takes it for when it copies, moves or clears one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .ops.cache import ALL_VALID

#: The operator takes keys and values in blocks of a multiple of it.
BLOCK_SIZE = 128
#: Most entries of the keys of a layer, and most entries of a token in all heads.
MAX_POOL = (1 << 31) - 1
MAX_ROW = 65535
#: Side of the triangular mask that it wants for causal attention of any length.
MASK_SIZE = 2048
#: ``sparse_mode``: no mask; a triangle whose corner is the last query and the last key.
FULL, CAUSAL = 0, 3


class Pool(NamedTuple):
    """The cache of a layer as half blocks.

    Args:
        keys: [P, N, H * D], contiguous.
        values: the same, one half block on in memory.
        step: half blocks from one block of the cache to the next.
    """

    keys: Tensor
    values: Tensor
    step: int

    def as_caches(self, heads: int) -> tuple[Tensor, Tensor]:
        """Keys and values as the operator ``reshape_and_cache`` takes them: [P, H, N, D]."""
        keys, values = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (self.keys, self.values))
        return keys, values


def make_pool(kv_cache: Tensor, head_size: int) -> Pool:
    """The pool of a cache [blocks, H, N, 2 * D] of any memory order with one block after another.

    Raises:
        NotImplementedError: a block is not one piece of memory, or blocks are not whole half blocks apart, or there
            are more entries than the operator counts.
    """
    blocks, heads, size, width = kv_cache.shape
    row = heads * head_size
    half = size * row
    step, rest = divmod(kv_cache.stride(0), half)
    if blocks == 1:
        step, rest = 2, 0
    if width != 2 * head_size or rest or not _is_one_piece(kv_cache[0]):
        raise NotImplementedError(
            f"the Ascend attention has no KV cache of shape {tuple(kv_cache.shape)} and strides {kv_cache.stride()}:"
            " the block has to be the outermost dimension in memory"
        )
    count = (blocks - 1) * step + 1
    if count * half > MAX_POOL or row > MAX_ROW:
        raise NotImplementedError(
            f"torch_npu's attention takes {MAX_POOL} entries a layer, and {MAX_ROW} a token, at most; this KV cache has"
            f" {count * half} and {row}: make it smaller (--num-gpu-blocks-override, --kv-cache-memory-bytes)"
        )
    offset = kv_cache.storage_offset()
    shape, strides = (count, size, row), (half, row, 1)
    return Pool(kv_cache.as_strided(shape, strides, offset), kv_cache.as_strided(shape, strides, offset + half), step)


def _is_one_piece(page: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(page.stride(), page.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class Run(NamedTuple):
    """Neighbouring requests that one call takes: those of one query token, or a single one of more."""

    first: int
    end: int
    token: int
    queries: int


@dataclass
class Step:
    """One packed batch of requests, for all layers that share a block table.

    Args:
        query_ends: for each request, where its query tokens end in the batch.
        seq_lens: for each request, cached tokens and query tokens together.
        block_table: [at least R, blocks], int32.
        slots: [T], slot of each token, none negative.
        causal: whether a query sees the keys up to its own only.
    """

    query_ends: list[int]
    seq_lens: list[int]
    block_table: Tensor
    slots: Tensor
    causal: bool = True
    _addressed: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.query_ends[-1] if self.query_ends else 0

    def addressed(self, step: int, block_size: int) -> tuple[Tensor, Tensor]:
        """Block table [R, blocks] and slots [T] in half blocks of a pool; computed once, kept for the other layers."""
        found = self._addressed.get((step, block_size))
        if found is None:
            table = (self.block_table[: len(self.seq_lens)] * step).contiguous()
            block = torch.div(self.slots, block_size, rounding_mode="floor")
            slots = self.slots + block * ((step - 1) * block_size)
            setattr(slots, ALL_VALID, True)
            found = self._addressed[step, block_size] = (table, slots)
        return found

    def runs(self) -> Iterator[Run]:
        """The calls that the step takes; the requests of one have the same number of query tokens."""
        start = first = token = 0
        for request, end in enumerate(self.query_ends):
            queries = end - start
            if queries != 1:
                if first < request:
                    yield Run(first, request, token, 1)
                if queries:
                    yield Run(request, request + 1, start, queries)
                first, token = request + 1, end
            start = end
        if first < len(self.query_ends):
            yield Run(first, len(self.query_ends), token, 1)


@cache
def causal_mask(device: torch.device) -> Tensor:
    """[2048, 2048] bool, true above the diagonal: what is not seen."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu_(1)


def attend(query: Tensor, pool: Pool, heads: int, scale: float, step: Step, output: Tensor) -> None:
    """Write attention of the step's tokens to `output`.

    One call for the decodes and one for each prefill: the operator's layout for requests of different lengths one after
    another (TND) has no paged cache in the documentation of torch_npu 2.13.

    Args:
        query: [T or more, Hq, D].
        pool: of keys and values of H heads.
        heads: H.
        scale: of the scores.
        step: the batch.
        output: [T or more, Hq, D]; rows past T stay as they are.
    """
    block_size = pool.keys.shape[1]
    table, _ = step.addressed(pool.step, block_size)
    query = query[: step.num_tokens].contiguous()
    for run in step.runs():
        requests = run.end - run.first
        rows = slice(run.token, run.token + requests * run.queries)
        causal = step.causal and run.queries > 1
        out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
            query[rows].unflatten(0, (requests, run.queries)),
            pool.keys,
            pool.values,
            atten_mask=causal_mask(query.device) if causal else None,
            actual_seq_qlen=[run.queries] * requests,
            actual_seq_kvlen=step.seq_lens[run.first : run.end],
            block_table=table[run.first : run.end],
            num_query_heads=query.shape[-2],
            num_key_value_heads=heads,
            softmax_scale=scale,
            input_layout="BSND",
            sparse_mode=CAUSAL if causal else FULL,
            block_size=block_size,
        )
        output[rows].copy_(out.flatten(0, 1))
