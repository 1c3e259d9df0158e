"""Inputs of the attention operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.catalog.spec import Case, InputMaker

if TYPE_CHECKING:
    from torch import Tensor


def attention_backend(maker: InputMaker) -> Iterator[Case]:
    yield Case("dense", (False, False))


def _caches(
    maker: InputMaker, layout: str, blocks: int, heads: int, block_size: int, sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Views [blocks, H, block_size, D] of a cache that holds keys and values side by side, as vLLM's does."""
    key_size, both = sizes[0], sum(sizes)
    if layout == "NHD":
        cache = maker.normal(blocks, block_size, heads, both).transpose(1, 2)
    else:
        cache = maker.normal(blocks, heads, block_size, both)
    return cache[..., :key_size], cache[..., key_size:]


def reshape_and_cache(maker: InputMaker) -> Iterator[Case]:
    import torch

    def slots(*values: int) -> Tensor:
        return maker.tensor(values, dtype=torch.int64)

    for layout in ("NHD", "HND"):
        for name, (tokens, heads, block_size, sizes) in {
            "regular": (7, 2, 16, (32, 32)),
            "one token": (1, 8, 16, (128, 128)),
            "odd": (5, 3, 7, (17, 9)),
            "large": (120, 4, 32, (64, 64)),
        }.items():
            key, value = maker.normal(tokens, heads, sizes[0]), maker.normal(tokens, heads, sizes[1])
            caches = _caches(maker, layout, 9, heads, block_size, sizes)
            chosen = maker.permutation(9 * block_size, dtype=torch.int64)[:tokens]
            yield Case(f"{name}, {layout}", (key, value, *caches, chosen))
        key, value = maker.normal(6, 2, 8), maker.normal(6, 2, 8)
        for name, mapping in {
            "padding slots": slots(9, -1, 0, -1, 30, 17),
            "padding first": slots(-1, -1, 5, 6, 7, 0),
            "only padding": slots(-1, -1, -1, -1, -1, -1),
            "fewer slots than tokens": slots(3, 40, -1),
            "no slots": slots(),
        }.items():
            yield Case(f"{name}, {layout}", (key, value, *_caches(maker, layout, 5, 2, 10, (8, 8)), mapping))
        packed = maker.normal(4, 3 * 2 * 8)
        heads_of = [packed[:, i * 16 : (i + 1) * 16].unflatten(1, (2, 8)) for i in (1, 2)]
        yield Case(
            f"packed projection, {layout}", (*heads_of, *_caches(maker, layout, 5, 2, 4, (8, 8)), slots(1, 2, 3, 9))
        )
    separate = maker.normal(5, 2, 4, 8), maker.normal(5, 2, 4, 8)
    yield Case("two caches", (maker.normal(3, 2, 8), maker.normal(3, 2, 8), *separate, slots(19, 0, 7)))
    yield Case("no tokens", (maker.normal(0, 2, 8), maker.normal(0, 2, 8), *separate, slots()))


def compute_slot_mapping(maker: InputMaker) -> Iterator[Case]:
    import torch

    for name, lengths, block_size, extra in (
        ("regular", (3, 1, 5), 16, 0),
        ("one token", (1,), 16, 0),
        ("decodes, padded", (1,) * 6, 32, 10),
        ("odd block", (4, 0, 7, 0), 7, 3),
        ("long", (300, 1, 45), 16, 6),
        ("no tokens", (0, 0), 8, 4),
        ("no requests", (), 8, 4),
        ("nothing", (), 8, 0),
    ):
        starts, positions = [0], []
        for index, length in enumerate(lengths):
            starts.append(starts[-1] + length)
            positions += [7 * index + i for i in range(length)]
        width = max(positions, default=0) // block_size + 2
        blocks = maker.permutation((len(lengths) + 2) * width).view(-1, width)
        # Positions and blocks past the last token hold what an earlier batch left there.
        stale = maker.integers(0, 10_000, extra, dtype=torch.int64)
        yield Case(
            name,
            (
                maker.tensor(starts, dtype=torch.int32),
                torch.cat((maker.tensor(positions, dtype=torch.int64), stale)),
                blocks,
                maker.tensor([-7] * (len(positions) + extra), dtype=torch.int64),
                block_size,
            ),
        )
