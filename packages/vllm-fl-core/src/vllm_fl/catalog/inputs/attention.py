"""Inputs of the attention operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
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
    apart = [maker.normal(5, 10, 2, 8).transpose(1, 2) for _ in range(2)]
    yield Case("two caches, NHD", (maker.normal(3, 2, 8), maker.normal(3, 2, 8), *apart, slots(41, 0, 7)))


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


def concat_and_cache_mla(maker: InputMaker) -> Iterator[Case]:
    import torch

    def slots(*values: int) -> Tensor:
        return maker.tensor(values, dtype=torch.int64)

    for name, (tokens, block_size, sizes) in {
        "regular": (7, 16, (32, 16)),
        "one token": (1, 16, (512, 64)),
        "odd": (5, 7, (17, 9)),
        "large": (60, 32, (256, 32)),
    }.items():
        rows = [maker.normal(tokens, size) for size in sizes]
        chosen = maker.permutation(9 * block_size, dtype=torch.int64)[:tokens]
        yield Case(name, (*rows, maker.normal(9, block_size, sum(sizes)), chosen))
    rows = [maker.normal(6, 8), maker.normal(6, 4)]
    for name, mapping in {
        "padding slots": slots(9, -1, 0, -1, 30, 17),
        "only padding": slots(-1, -1, -1, -1, -1, -1),
        "fewer slots than tokens": slots(3, 40, -1),
        "no slots": slots(),
    }.items():
        yield Case(name, (*rows, maker.normal(5, 10, 12), mapping))
    _, *parts = maker.normal(4, 6 + 8 + 4).split((6, 8, 4), 1)
    layers = maker.normal(5, 3, 4, 12)
    yield Case("packed projection, cache of several layers", (*parts, layers[:, 1], slots(1, 9, 2, 5)))
    yield Case("no tokens", (rows[0][:0], rows[1][:0], maker.normal(5, 10, 12), slots()))


def make_latent_batch(
    maker: InputMaker,
    requests: Sequence[tuple[int, int]],
    heads: int,
    sizes: tuple[int, int],
    block_size: int,
    padding: int = 0,
) -> tuple[Tensor, ...]:
    """The tensors of `mla_attention` for requests of (tokens before the query, tokens of the query).

    `padding` requests without a token follow, and as many rows of the query.
    """
    import torch

    lengths = [before + new for before, new in requests] + [0] * padding
    starts = [0, *accumulate(new for _, new in requests)]
    width = max(lengths, default=0) // block_size + 1
    table = maker.permutation((len(lengths) + 1) * width).view(-1, width)
    return (
        maker.normal(starts[-1] + padding, heads, sum(sizes)),
        maker.normal(table.numel(), block_size, sum(sizes)),
        table,
        maker.tensor(lengths, dtype=torch.int32),
        maker.tensor(starts + starts[-1:] * padding, dtype=torch.int32),
    )


def mla_attention(maker: InputMaker) -> Iterator[Case]:
    for name, decodes, requests, heads, sizes, block_size, padding in (
        ("decodes", 4, [(15, 1), (16, 1), (0, 1), (70, 1)], 4, (32, 16), 16, 0),
        ("one token", 1, [(40, 1)], 16, (32, 16), 16, 0),
        ("whole prompts", 0, [(0, 9), (0, 33), (0, 1)], 4, (32, 16), 16, 0),
        ("mixed", 2, [(5, 1), (33, 1), (0, 5), (40, 9), (16, 2)], 4, (32, 16), 16, 0),
        ("odd", 1, [(9, 1), (17, 6)], 3, (20, 6), 7, 0),
        ("large", 1, [(90, 1), (40, 9)], 16, (512, 64), 32, 0),
        ("no positions", 1, [(9, 1), (0, 3)], 2, (24, 0), 8, 0),
        ("padding", 2, [(9, 1), (3, 1), (11, 4)], 4, (16, 8), 8, 3),
        ("padding among decodes", 4, [(9, 1), (3, 1)], 4, (16, 8), 8, 2),
        ("no requests", 0, [], 4, (32, 16), 16, 0),
    ):
        batch = make_latent_batch(maker, requests, heads, sizes, block_size, padding)
        longest = max((new for _, new in requests), default=0)
        yield Case(name, (*batch, sizes[0], sum(sizes) ** -0.5, longest, decodes))
    query, cache, *rest = make_latent_batch(maker, [(9, 1), (3, 1), (11, 4)], 4, (16, 8), 8)
    wide, layers = maker.normal(6, 5, 32), maker.normal(len(cache), 3, 8, 24)
    wide[:, :4, :24], layers[:, 1] = query, cache
    yield Case("strided query, cache of several layers", (wide[:, :4, :24], layers[:, 1], *rest, 16, 0.2, 4, 2))
