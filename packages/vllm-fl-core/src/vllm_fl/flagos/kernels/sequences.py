"""Packed batches on the device: which piece of which sequence a program takes, without asking the host.

A sequence of L tokens has ceil(L / SIZE) pieces. N sequences of T tokens together have at most T // SIZE + N of them,
which is how many programs a launcher asks for; those that find no piece have nothing to do. What follows the last
sequence counts as one more, number N, of slot 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: Sequences that a program looks at together.
SEQUENCES = 128


@triton.jit
def _pieces(starts, sequence, sequences, tokens, SIZE: tl.constexpr):
    """Number of pieces of each sequence up to number `sequences`, and 0 for those beyond."""
    begin = tl.load(starts + sequence, mask=sequence <= sequences, other=0)
    end = tl.load(starts + sequence + 1, mask=sequence < sequences, other=0)
    end = tl.where(sequence < sequences, end, tl.where(sequence == sequences, tokens, 0))
    return (end - begin + SIZE - 1) // SIZE


@triton.jit
def locate(starts, piece, sequences, tokens, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The sequence that has piece number `piece` of the batch, and the number of that piece within the sequence.

    The sequence is `sequences` + 1 for a piece beyond the last one.
    """
    found, before, total = 0, 0, 0
    for first in range(0, sequences + 1, BLOCK):
        sequence = first + tl.arange(0, BLOCK)
        pieces = _pieces(starts, sequence, sequences, tokens, SIZE)
        is_before = (total + tl.cumsum(pieces, 0) <= piece) & (sequence <= sequences)
        found += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, pieces, 0), 0)
        total += tl.sum(pieces, 0)
    return found, piece - before


@triton.jit
def pieces_before(starts, sequence, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The number, in the batch, of the first piece of a sequence."""
    before = 0
    for first in range(0, sequence, BLOCK):
        earlier = first + tl.arange(0, BLOCK)
        pieces = _pieces(starts, earlier, sequence, 0, SIZE)
        before += tl.sum(tl.where(earlier < sequence, pieces, 0), 0)
    return before


@triton.jit
def bounds(starts, slots, slot_stride, sequence, sequences, tokens):
    """First token of a sequence, the token behind its last, and its slot."""
    begin = tl.load(starts + sequence)
    end, slot = tokens, tl.full((), 0, tl.int64)
    if sequence < sequences:
        end = tl.load(starts + sequence + 1).to(end.dtype)
        slot = tl.load(slots + sequence * slot_stride).to(tl.int64)
    return begin, end, slot


def need_unit_starts(query_start_loc: Tensor) -> None:
    """Refuse token ranges whose entries are not neighbours."""
    if query_start_loc.shape[0] > 1 and query_start_loc.stride(0) != 1:
        raise NotImplementedError(f"query_start_loc: stride {query_start_loc.stride(0)}, expected 1")
