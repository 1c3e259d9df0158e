"""Inputs of the gated activations."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_fl.catalog.spec import Case, InputMaker

_SHAPES = {
    "regular": (7, 2 * 64),
    "one token": (1, 2 * 1536),
    "odd": (3, 2 * 17),
    "one column": (5, 2),
    "large": (83, 2 * 2816),
    "three dimensions": (2, 3, 2 * 24),
    "no tokens": (0, 2 * 64),
}


def silu_and_mul(maker: InputMaker) -> Iterator[Case]:
    for name, shape in _SHAPES.items():
        yield Case(name, (maker.normal(*shape),))
    yield Case("large values", (maker.normal(4, 2 * 32, scale=100.0),))
    yield Case("rows of a wider tensor", (maker.normal(6, 200)[:, 10 : 10 + 2 * 40],))
    yield Case("transposed", (maker.normal(2 * 20, 9).t(),))


def gelu_and_mul(maker: InputMaker) -> Iterator[Case]:
    for approximate in ("none", "tanh"):
        for case in silu_and_mul(maker):
            yield Case(f"{case.name}, {approximate}", (*case.args, approximate))
