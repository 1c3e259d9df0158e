"""What attention kernels share: the request of a block of queries, and decodes whose context is cut into splits."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import multiprocessors
from .launch import fast

#: Splits of a decode's context at most.
MAX_SPLITS = 16
#: A multiprocessor runs about two programs of the decode kernel at once.
_PROGRAMS_PER_MULTIPROCESSOR = 2


class Scratch(NamedTuple):
    """Room for the results of splits: `values` [n, padded head size], `maxima` and `sums` [n], float32, contiguous;
    n counts tokens times heads times splits, and any shapes of that many entries will do."""

    values: Tensor
    maxima: Tensor
    sums: Tensor


@triton.jit
def request_of_block(query_start_loc, block, first, requests, origin, BLOCK_Q: tl.constexpr):
    """The request of a query block: request ``first + i`` begins at block ``(its start - origin) // BLOCK_Q + i``."""
    low, high = 0, requests
    while low < high:
        middle = (low + high) // 2
        if (tl.load(query_start_loc + first + middle) - origin) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def query_of_block(query_start_loc, block, first_request, requests, BLOCK_Q: tl.constexpr, DECODE: tl.constexpr):
    """The request of a program, where its query begins, how long that is, and the program's first token in it.

    DECODE: request i has one token, which is token i.
    """
    request = block
    begin = block
    query_len = 1
    first = 0
    if not DECODE:
        origin = tl.load(query_start_loc + first_request)
        index = request_of_block(query_start_loc, block, first_request, requests, origin, BLOCK_Q)
        request = first_request + index
        begin = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - begin
        first = (block - ((begin - origin) // BLOCK_Q + index)) * BLOCK_Q
    return request, begin, query_len, first


@fast
@triton.jit
def join_splits(
    partial, maxima, sums, output, stride_ot, stride_oh, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """One program a token and head."""
    token, head = tl.program_id(0), tl.program_id(1)
    base = (token * tl.num_programs(1) + head) * SPLITS
    s, d = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    m = tl.load(maxima + base + s)
    weight = tl.exp2(m - tl.maximum(tl.max(m, 0), -1e30))
    total = tl.sum(weight * tl.load(sums + base + s), 0)
    acc = tl.load(partial + (base + s)[:, None] * D_PAD + d[None, :], mask=d[None, :] < D, other=0.0)
    acc = tl.sum(acc * weight[:, None], 0) / tl.maximum(total, 1e-30)
    tl.store(output + token * stride_ot + head * stride_oh + d, acc.to(output.dtype.element_ty), mask=d < D)


def choose_splits(
    requests: int, num_heads: int, kv_heads: int, d_pad: int, scratch: Scratch | None, like: Tensor
) -> tuple[int, Scratch | tuple[None, None, None]]:
    """Splits of each decode, a power of two, and where their results go."""
    programs, entries = requests * kv_heads, requests * num_heads
    most = MAX_SPLITS
    if scratch is not None:
        most = min(most, scratch.maxima.numel() // entries, scratch.values.numel() // (entries * d_pad))
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(like.device)
    splits = 1
    while programs * splits < wanted and 2 * splits <= most:
        splits *= 2
    if splits == 1:
        return 1, (None, None, None)
    if scratch is None:
        new = functools.partial(like.new_empty, dtype=torch.float32)
        scratch = Scratch(new((entries * splits, d_pad)), new((entries * splits,)), new((entries * splits,)))
    return splits, scratch
