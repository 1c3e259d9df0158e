"""Inputs of the normalisations."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_fl.catalog.spec import Case, InputMaker

_EPSILON = 1e-6
_SHAPES = {
    "regular": (7, 64),
    "one token": (1, 2048),
    "odd": (5, 33),
    "one column": (3, 1),
    "large": (67, 3072),
    "heads": (6, 4, 128),
    "no tokens": (0, 64),
}


def _residual_norm(maker: InputMaker) -> Iterator[Case]:
    for name, shape in _SHAPES.items():
        x, residual, weight = maker.normal(*shape), maker.normal(*shape), maker.normal(shape[-1])
        yield Case(name, (x, None, weight, _EPSILON))
        yield Case(f"{name}, residual", (x, residual, weight, _EPSILON))
    # Squares of 300 are past float16's largest number.
    weight = maker.normal(96)
    yield Case("large values", (maker.normal(4, 96, scale=300.0), None, weight, _EPSILON))
    yield Case(
        "large values, residual", (maker.normal(4, 96, scale=300.0), maker.normal(4, 96, scale=300.0), weight, _EPSILON)
    )
    # Epsilon counts: the mean of squares is about as small.
    yield Case("small values", (maker.normal(4, 96, scale=1e-3), None, weight, _EPSILON))
    yield Case("zeros, large epsilon", (maker.full(0.0, 2, 40), None, maker.normal(40), 1e-2))
    packed = maker.normal(6, 4 * 32 + 50)[:, 7 : 7 + 4 * 32]
    yield Case("heads of a packed projection", (packed.unflatten(1, (4, 32)), None, maker.normal(32), _EPSILON))
    yield Case(
        "rows of a wider tensor, residual", (packed, maker.normal(6, 300)[:, : 4 * 32], maker.normal(128), _EPSILON)
    )
    yield Case("transposed", (maker.normal(48, 5).t(), None, maker.normal(48), _EPSILON))


def rms_norm(maker: InputMaker) -> Iterator[Case]:
    yield from _residual_norm(maker)
    yield Case("no weight", (maker.normal(5, 72), None, None, _EPSILON))
    yield Case("no weight, residual", (maker.normal(5, 72), maker.normal(5, 72), None, _EPSILON))


def gemma_rms_norm(maker: InputMaker) -> Iterator[Case]:
    yield from _residual_norm(maker)


def rms_norm_gated(maker: InputMaker) -> Iterator[Case]:
    for name, shape in _SHAPES.items():
        yield Case(name, (maker.normal(*shape), maker.normal(*shape), maker.normal(shape[-1]), _EPSILON))
    x, gate, weight = maker.normal(9, 96), maker.normal(9, 96), maker.normal(96)
    yield Case("no gate", (x, None, weight, _EPSILON))
    for norm_before_gate in (True, False):
        for activation in ("silu", "swish", "sigmoid"):
            for group_size in (None, 96, 32, 3):
                name = f"group {group_size}, {activation}, norm {'first' if norm_before_gate else 'last'}"
                yield Case(name, (x, gate, weight, _EPSILON, group_size, norm_before_gate, activation))
    yield Case("no gate, groups", (x, None, weight, _EPSILON, 24))
    large = maker.normal(3, 64, scale=300.0)
    yield Case("large values", (large, maker.normal(3, 64), maker.normal(64), _EPSILON))
    yield Case("small values", (maker.normal(3, 64, scale=1e-3), maker.normal(3, 64), maker.normal(64), _EPSILON))
    wide = maker.normal(6, 2, 4, 32)
    yield Case("halves of a projection", (wide[:, 0], wide[:, 1], maker.normal(32), _EPSILON))
