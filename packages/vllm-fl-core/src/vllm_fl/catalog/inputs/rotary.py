"""Inputs of the rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.catalog.spec import Case, InputMaker

if TYPE_CHECKING:
    from torch import Tensor

#: name -> (tokens, query heads, key heads, head size, rotated entries); no key heads: the key is None
_SHAPES = {
    "regular": (7, 4, 4, 64, 64),
    "grouped heads": (33, 9, 3, 64, 64),
    "partial": (5, 4, 2, 64, 16),
    "one pair": (3, 2, 1, 6, 2),
    "one token": (1, 8, 1, 128, 128),
    "no key": (6, 3, 0, 32, 32),
    "no key, partial": (6, 3, 0, 40, 24),
    "large": (150, 16, 2, 128, 128),
    "no tokens": (0, 4, 2, 32, 32),
}
_POSITIONS = 512


def make_tables(maker: InputMaker, rotated: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, [P, R / 2], as the halves of one cache."""
    import torch

    frequencies = 10000.0 ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    angles = torch.outer(torch.arange(_POSITIONS, dtype=torch.float64), frequencies)
    cache = torch.cat((angles.cos(), angles.sin()), 1).to(maker.dtype).to(maker.device)
    return cache[:, : rotated // 2], cache[:, rotated // 2 :]


def rotary_embedding(maker: InputMaker) -> Iterator[Case]:
    import torch

    tables = {rotated: make_tables(maker, rotated) for rotated in {shape[4] for shape in _SHAPES.values()}}
    for name, (tokens, heads, key_heads, size, rotated) in _SHAPES.items():
        query = maker.normal(tokens, heads, size)
        key = maker.normal(tokens, key_heads, size) if key_heads else None
        positions = maker.integers(0, _POSITIONS, tokens, dtype=torch.int64)
        for neox in (True, False):
            style = "NeoX" if neox else "interleaved"
            yield Case(f"{name}, {style}", (query, key, *tables[rotated], positions, neox))
    packed = maker.normal(9, (6 + 2 + 2) * 32)
    query, key = packed[:, : 6 * 32].unflatten(1, (6, 32)), packed[:, 6 * 32 : 8 * 32].unflatten(1, (2, 32))
    for neox in (True, False):
        yield Case(
            f"packed projection, {'NeoX' if neox else 'interleaved'}",
            (query, key, *tables[32], maker.integers(0, _POSITIONS, 9), neox),
        )
