"""Inputs of the gated delta network's operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from vllm_fl.catalog.spec import Case, InputMaker

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _starts(maker: InputMaker, lengths: Sequence[int]) -> Tensor:
    import torch

    return maker.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def make_slots(maker: InputMaker, count: int, total: int, padding: dict[int, int]) -> Tensor:
    """`count` different slots above 0; `padding` puts 0 or -1 at some places."""
    slots = maker.permutation(total - 1)[:count] + 1
    for place, value in padding.items():
        slots[place] = value
    return slots


def _flags(maker: InputMaker, lengths: Sequence[int]) -> Tensor:
    """Every other sequence has a state, and so has each without tokens."""
    return maker.tensor([i % 2 == 1 or length == 0 for i, length in enumerate(lengths)])


def _conv_states(maker: InputMaker, slots: int, channels: int, width: int, transposed: bool) -> Tensor:
    if transposed:  # vLLM's usual layout keeps channels innermost
        return maker.normal(slots, width, channels).transpose(1, 2)
    return maker.normal(slots, channels, width)


def causal_conv1d_fn(maker: InputMaker) -> Iterator[Case]:
    for name, lengths, channels, width, padding in (
        ("regular", (5, 9, 2), 32, 4, {}),
        ("one token", (1,), 64, 4, {}),
        ("shorter than the window", (1, 2, 3, 1), 24, 4, {}),
        ("odd", (7, 4), 13, 3, {}),
        ("window of two", (3, 6), 16, 2, {}),
        ("empty sequences", (0, 5, 0, 0, 2, 0), 16, 4, {}),
        ("padding slots", (3, 4, 2, 1), 16, 4, {0: -1, 2: 0}),
        ("only padding", (3, 4), 16, 4, {0: -1, 1: 0}),
        ("large", (300, 65, 1, 40), 256, 4, {}),
        ("no tokens", (0, 0), 16, 4, {}),
    ):
        x, weight = maker.normal(sum(lengths), channels), maker.normal(channels, width, scale=0.5)
        bias, flags = maker.normal(channels), _flags(maker, lengths)
        starts, slots = _starts(maker, lengths), make_slots(maker, len(lengths), 12, padding)
        for transposed in (False, True):
            states = _conv_states(maker, 12, channels, width - 1, transposed)
            layout = "channels last" if transposed else "channels first"
            yield Case(f"{name}, {layout}", (x, weight, None, states, starts, slots, flags))
        yield Case(f"{name}, bias, no activation", (x, weight, bias, states, starts, slots, flags, None))
    x, weight = maker.normal(9, 40)[:, 5:21], maker.normal(16, 4)
    starts, slots = _starts(maker, (4, 5)), make_slots(maker, 2, 6, {})
    states = _conv_states(maker, 6, 16, 5, True)
    yield Case("strided x, wide state", (x, weight, None, states, starts, slots, maker.tensor([True, True])))
    yield Case("no initial states", (x, weight, None, states, starts, slots, None, "swish"))
    yield Case("no sequences", (x[:0], weight, None, states, starts[:1], slots[:0], None))


def causal_conv1d_update(maker: InputMaker) -> Iterator[Case]:
    for name, count, channels, width, padding in (
        ("regular", 5, 32, 4, {}),
        ("one token", 1, 64, 4, {}),
        ("odd", 3, 13, 3, {}),
        ("window of two", 4, 16, 2, {}),
        ("padding slots", 6, 16, 4, {0: 0, 3: -1, 4: 0}),
        ("only padding", 2, 16, 4, {0: -1, 1: 0}),
        ("large", 32, 1024, 4, {}),
        ("no tokens", 0, 16, 4, {}),
    ):
        x, weight = maker.normal(count, channels), maker.normal(channels, width, scale=0.5)
        slots = make_slots(maker, count, 40, padding)
        for transposed in (False, True):
            states = _conv_states(maker, 40, channels, width - 1, transposed)
            yield Case(f"{name}, channels {'last' if transposed else 'first'}", (x, weight, None, states, slots))
        yield Case(f"{name}, bias, no activation", (x, weight, maker.normal(channels), states, slots, None))
    x, states = maker.normal(3, 40)[:, 5:21], _conv_states(maker, 6, 16, 5, True)
    yield Case("strided x, wide state", (x, maker.normal(16, 4), None, states, make_slots(maker, 3, 6, {}), "swish"))


def fused_gdn_gating(maker: InputMaker) -> Iterator[Case]:
    import torch

    for name, tokens, heads in (
        ("regular", 7, 8),
        ("one token", 1, 32),
        ("odd", 3, 5),
        ("large", 300, 32),
        ("no tokens", 0, 8),
    ):
        a_log = maker.uniform(-2.0, 2.7, heads, dtype=torch.promote_types(maker.dtype, torch.float32))
        args = (maker.normal(tokens, heads, scale=2.0), maker.normal(tokens, heads, scale=2.0), maker.normal(heads))
        yield Case(name, (a_log, *args))
    wide = maker.normal(6, 20, scale=15.0)
    yield Case("large values, strided", (a_log[:8], wide[:, :8], wide[:, 9:17], maker.normal(8)))


def make_delta_inputs(
    maker: InputMaker, tokens: int, heads: tuple[int, int], sizes: tuple[int, int]
) -> tuple[Tensor, ...]:
    """q, k, v, g and beta; some decays are steep, and neighbouring keys are alike, as in trained models."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, sizes
    wide = _wide(maker)
    base = maker.normal(1, key_heads, key_dim)
    return (
        maker.normal(tokens, key_heads, key_dim),
        maker.normal(tokens, key_heads, key_dim) + base,
        maker.normal(tokens, value_heads, value_dim),
        -(maker.uniform(0.0, 1.0, tokens, value_heads, dtype=wide) ** 4) * 8,
        maker.uniform(0.0, 1.0, tokens, value_heads),
    )


def _wide(maker: InputMaker) -> torch.dtype:
    import torch

    return torch.promote_types(maker.dtype, torch.float32)


def make_states(maker: InputMaker, slots: int, heads: int, sizes: tuple[int, int]) -> Tensor:
    return maker.normal(slots, heads, sizes[1], sizes[0], scale=0.3, dtype=_wide(maker))


def chunk_gated_delta_rule(maker: InputMaker) -> Iterator[Case]:
    for name, lengths, heads, sizes, padding in (
        ("regular", (10, 70), (2, 4), (16, 16), {}),
        ("one token", (1,), (2, 4), (32, 32), {}),
        ("chunk bounds", (63, 64, 65, 128, 129), (1, 2), (16, 16), {}),
        ("mixed lengths", (300, 1, 0, 37, 200, 2), (1, 3), (16, 24), {}),
        ("as many key heads", (33, 5), (3, 3), (17, 9), {}),
        ("padding slots", (6, 80, 3, 70), (1, 2), (16, 16), {0: -1, 3: 0}),
        ("only padding", (6, 80), (1, 2), (16, 16), {0: -1, 1: 0}),
        ("large", (100, 190), (4, 8), (128, 128), {}),
        ("no tokens", (0, 0), (2, 4), (16, 16), {}),
    ):
        args = make_delta_inputs(maker, sum(lengths), heads, sizes)
        state = make_states(maker, 9, heads[1], sizes)
        starts, slots = _starts(maker, lengths), make_slots(maker, len(lengths), 9, padding)
        yield Case(name, (*args, state, starts, slots, _flags(maker, lengths)))
    args, state = make_delta_inputs(maker, 75, (2, 4), (16, 16)), make_states(maker, 5, 4, (16, 16))
    starts, slots = _starts(maker, (70, 5)), make_slots(maker, 2, 5, {})
    flags = maker.tensor([True, True])
    yield Case("no initial states", (*args, state, starts, slots, None))
    yield Case("scale", (*args, state, starts, slots, flags, 0.3))
    short = (args[0] * 0.2, args[1] * 0.2, *args[2:])
    yield Case("keys as they are", (*short, state, starts, slots, flags, 1.0, False))
    yield Case("state of the activations' dtype", (*args, state.to(maker.dtype), starts, slots, flags))
    strided = make_states(maker, 5, 9, (16, 16))[:, 2:6]
    packed = maker.normal(75, 2 * 2 * 16 + 4 * 16)
    parts = packed.split([32, 32, 64], 1)
    qkv = [part.unflatten(1, (-1, 16)) for part in parts]
    yield Case("strided", (*qkv, *args[3:], strided, starts, slots, flags))
    yield Case("no sequences", (*(x[:0] for x in args), state, starts[:1], slots[:0], None))


def fused_recurrent_gated_delta_rule(maker: InputMaker) -> Iterator[Case]:
    for name, count, heads, sizes, padding in (
        ("regular", 5, (2, 4), (16, 16), {}),
        ("one token", 1, (4, 8), (128, 128), {}),
        ("odd", 3, (1, 3), (17, 9), {}),
        ("as many key heads", 2, (3, 3), (32, 16), {}),
        ("padding slots", 6, (2, 4), (16, 16), {0: 0, 3: -1, 4: 0}),
        ("only padding", 2, (2, 4), (16, 16), {0: -1, 1: 0}),
        ("large", 20, (4, 8), (48, 48), {}),
        ("no tokens", 0, (2, 4), (16, 16), {}),
    ):
        state, slots = make_states(maker, count + 3, heads[1], sizes), make_slots(maker, count, count + 3, padding)
        yield Case(name, (*make_delta_inputs(maker, count, heads, sizes), state, slots))
    args, state = make_delta_inputs(maker, 4, (2, 4), (16, 16)), make_states(maker, 7, 4, (16, 16))
    slots = make_slots(maker, 4, 7, {})
    yield Case("scale", (*args, state, slots, 0.3))
    yield Case("keys as they are", (args[0], args[1] * 0.2, *args[2:], state, slots, 1.0, False))
    yield Case("state of the activations' dtype", (*args, state.to(maker.dtype), slots))
    yield Case("strided state", (*args, make_states(maker, 7, 9, (16, 16))[:, 2:6], slots))
