"""How the chunked delta rule lays out a packed batch of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """The chunks of a batch: chunk 0 of all live sequences, then chunk 1 of those that have one, and so on.

    Live sequences have tokens and a slot above 0. They are ordered by falling length, so those that take part in a step
    are the first ones of the step before.

    Args:
        size: tokens a chunk.
        sequences: numbers of the live sequences.
        slots: their state slots.
        firsts: first token of each chunk.
        lengths: tokens of each chunk.
        steps: range of chunks of each step.
    """

    size: int
    sequences: list[int]
    slots: list[int]
    firsts: list[int]
    lengths: list[int]
    steps: list[tuple[int, int]]

    @classmethod
    def of(cls, starts: list[int], slots: list[int], size: int) -> Chunks:
        lengths = [end - start for start, end in pairwise(starts)]
        live = [n for n, slot in enumerate(slots) if slot > 0 and lengths[n] > 0]
        live.sort(key=lambda n: -lengths[n])
        chunks = cls(size, live, [slots[n] for n in live], [], [], [])
        for offset in range(0, lengths[live[0]] if live else 0, size):
            active = [n for n in live if lengths[n] > offset]
            done = len(chunks.firsts)
            chunks.firsts.extend(starts[n] + offset for n in active)
            chunks.lengths.extend(min(size, lengths[n] - offset) for n in active)
            chunks.steps.append((done, done + len(active)))
        return chunks

    def index(self, device: torch.device) -> ChunkIndex:
        place = torch.arange(self.size)
        firsts, lengths = torch.tensor(self.firsts)[:, None], torch.tensor(self.lengths)[:, None]
        real = (place < lengths).flatten()
        tokens = (firsts + place.clamp(max=lengths - 1)).flatten()
        return ChunkIndex(
            self.size,
            tokens.to(device),
            None if bool(real.all()) else real.nonzero().squeeze(1).to(device),
            (~real).nonzero().squeeze(1).to(device),
        )


@dataclass(frozen=True)
class ChunkIndex:
    """Token of each place of the chunks, and which places are real; on the device.

    Args:
        size: tokens a chunk.
        tokens: [chunks * size]: token of each place; places past a sequence's end repeat its last token.
        real: places with a token of their own, None for all.
        empty: the other places.
    """

    size: int
    tokens: Tensor
    real: Tensor | None
    empty: Tensor

    def pack(self, x: Tensor) -> Tensor:
        """[T, ...] to [chunks, size, ...], zeros in empty places."""
        packed = x.index_select(0, self.tokens)
        if self.real is not None:
            packed.index_fill_(0, self.empty, 0)
        return packed.unflatten(0, (-1, self.size))

    def unpack(self, x: Tensor, out: Tensor) -> None:
        """Write [chunks, size, ...] into the tokens of `out`, [T, ...]."""
        x, tokens = x.flatten(0, 1), self.tokens
        if self.real is not None:
            x, tokens = x.index_select(0, self.real), tokens.index_select(0, self.real)
        out.index_copy_(0, tokens, x)
