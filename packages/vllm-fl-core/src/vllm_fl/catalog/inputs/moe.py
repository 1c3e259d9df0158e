"""Inputs of the mixture-of-experts operators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.catalog.spec import Case, InputMaker

if TYPE_CHECKING:
    from torch import Tensor

#: name -> (tokens, experts, choices)
_ROUTING = {
    "regular": (7, 8, 2),
    "one token": (1, 64, 8),
    "one choice": (5, 16, 1),
    "odd": (3, 13, 5),
    "all experts": (4, 6, 6),
    "large": (40, 512, 10),
    "no tokens": (0, 128, 8),
}


def make_logits(maker: InputMaker, tokens: int, experts: int) -> Tensor:
    """[T, E] in about [-4, 4]: a permutation of equally spaced numbers that bfloat16 has, so that in every dtype all
    implementations choose the same experts."""
    import torch

    step = 2.0 ** -max(0, math.ceil(math.log2(experts / 8)))
    numbers = maker.uniform(0.0, 1.0, tokens, experts, dtype=torch.float64).cpu().argsort(-1) - experts // 2
    return (numbers * step).to(maker.dtype).to(maker.device)


def _router(maker: InputMaker) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Names and the first four arguments of topk_softmax."""
    import torch

    for name, (tokens, experts, topk) in _ROUTING.items():
        outputs = (
            maker.full(-1.0, tokens, topk, dtype=torch.promote_types(maker.dtype, torch.float32)),
            maker.full(-1, tokens, topk, dtype=torch.int64 if name == "odd" else torch.int32),
            maker.full(-1, tokens, topk, dtype=torch.int32),
        )
        yield name, (*outputs, make_logits(maker, tokens, experts))


def make_bias(maker: InputMaker, experts: int) -> Tensor:
    """[E] float32, wide enough to decide most choices."""
    import torch

    return maker.normal(experts, scale=1.5, dtype=torch.promote_types(maker.dtype, torch.float32))


def topk_softmax(maker: InputMaker) -> Iterator[Case]:
    for name, args in _router(maker):
        yield Case(name, args)
        yield Case(f"{name}, renormalised", (*args, True))
        yield Case(f"{name}, bias", (*args, True, make_bias(maker, args[3].shape[1])))
        yield Case(f"{name}, bias, not renormalised", (*args, False, make_bias(maker, args[3].shape[1])))


def topk_sigmoid(maker: InputMaker) -> Iterator[Case]:
    yield from topk_softmax(maker)
    for name, args in _router(maker):
        yield Case(f"{name}, scaled", (*args, False, None, 2.5))
        yield Case(f"{name}, renormalised, bias, scaled", (*args, True, make_bias(maker, args[3].shape[1]), 2.5))


def grouped_topk(maker: InputMaker) -> Iterator[Case]:
    for name, (tokens, experts, groups, kept, topk) in {
        "regular": (7, 64, 8, 3, 6),
        "DeepSeek-V3": (20, 256, 8, 4, 8),
        "one token": (1, 32, 4, 1, 8),
        "one group": (5, 16, 1, 1, 4),
        "all groups": (5, 24, 3, 3, 4),
        "groups of one": (6, 8, 8, 4, 3),
        "no tokens": (0, 64, 8, 3, 6),
    }.items():
        logits, bias = make_logits(maker, tokens, experts), make_bias(maker, experts)
        for scoring, number in (("scores", 0), ("sigmoid", 1), ("softmax", 2)):
            scores = logits.sigmoid() if number == 0 else logits
            yield Case(f"{name}, {scoring}", (scores, groups, kept, topk, False, 1.0, None, number))
            yield Case(f"{name}, {scoring}, bias", (scores, groups, kept, topk, True, 2.5, bias, number))


def make_routes(maker: InputMaker, tokens: int, experts: int, topk: int) -> Tensor:
    """[T, topk] int32: different experts for each token; low numbers are more popular, so that some stay idle."""
    import torch

    popularity = torch.arange(experts) * (3.0 / experts)
    noise = maker.uniform(0.0, 1.0, tokens, experts, dtype=torch.float32).cpu()  # one logarithm for all devices
    return (noise.log().neg().log() + popularity).argsort(-1)[:, :topk].to(torch.int32).to(maker.device)


def _map(maker: InputMaker, experts: int, local: int) -> Tensor:
    """[E] int32: `local` experts live here, in shuffled rows; -1 for the others."""
    import torch

    table = maker.full(-1, experts, dtype=torch.int32)
    table[maker.permutation(experts, dtype=torch.int64)[:local]] = maker.permutation(local)
    return table


def moe_align_block_size(maker: InputMaker) -> Iterator[Case]:
    import torch

    for name, (tokens, experts, topk, block_size) in {
        "regular": (7, 8, 2, 16),
        "one token": (1, 64, 8, 16),
        "blocks of one": (5, 6, 2, 1),
        "odd block": (9, 5, 3, 7),
        "fewer routes than experts": (3, 128, 4, 64),
        "large": (150, 64, 8, 32),
        "no tokens": (0, 8, 2, 16),
    }.items():
        ids = make_routes(maker, tokens, experts, topk)
        table = _map(maker, experts, max(1, experts // 2))
        for padded in (False, True):
            suffix = ", padded" if padded else ""
            yield Case(f"{name}{suffix}", (ids, block_size, experts, None, padded, False))
            yield Case(f"{name}{suffix}, map", (ids, block_size, experts, table, padded, False))
            yield Case(f"{name}{suffix}, map, ignored", (ids, block_size, experts, table, padded, True))
    ids = make_routes(maker, 6, 8, 3).to(torch.int64)
    yield Case("long ids", (ids, 4, 8))
    yield Case("all elsewhere", (ids, 4, 8, maker.full(-1, 8, dtype=torch.int32), False, True))


def moe_sum(maker: InputMaker) -> Iterator[Case]:
    for name, (tokens, topk, hidden) in {
        "regular": (7, 2, 64),
        "one token": (1, 8, 2048),
        "one choice": (3, 1, 40),
        "odd": (5, 7, 33),
        "large": (90, 8, 1024),
        "no tokens": (0, 4, 64),
    }.items():
        yield Case(name, (maker.normal(tokens, topk, hidden), maker.full(7.0, tokens, hidden)))
    strided = maker.normal(6, 40, 3).transpose(1, 2)
    yield Case("strided", (strided, maker.full(7.0, 6, 100)[:, :40]))


def fused_experts(maker: InputMaker) -> Iterator[Case]:
    def weights(experts: int, hidden: int, inner: int, gated: bool) -> tuple[Tensor, Tensor]:
        rows = 2 * inner if gated else inner
        return maker.normal(experts, rows, hidden, scale=hidden**-0.5), maker.normal(
            experts, hidden, inner, scale=inner**-0.5
        )

    def inputs(tokens: int, hidden: int, experts: int, topk: int) -> tuple[Tensor, Tensor, Tensor]:
        x, ids = maker.normal(tokens, hidden), make_routes(maker, tokens, experts, topk)
        return x, make_shares(maker, tokens, topk), ids

    for name, (tokens, hidden, inner, experts, topk) in {
        "regular": (7, 64, 32, 8, 2),
        "one token": (1, 128, 64, 16, 8),
        "odd": (5, 33, 17, 5, 3),
        "one choice": (6, 40, 24, 4, 1),
        "large": (64, 256, 96, 32, 6),
        "no tokens": (0, 64, 32, 8, 2),
    }.items():
        x, shares, ids = inputs(tokens, hidden, experts, topk)
        yield Case(name, (x, *weights(experts, hidden, inner, True), shares, ids))

    x, shares, ids = inputs(9, 48, 8, 3)
    gated, plain = weights(8, 48, 24, True), weights(8, 48, 24, False)
    biases = maker.normal(8, 48, scale=0.5), maker.normal(8, 48, scale=0.5)
    for activation in ("silu", "gelu", "gelu_tanh", "swigluoai"):
        yield Case(activation, (x, *gated, shares, ids, activation))
        yield Case(f"{activation}, biases", (x, *gated, shares, ids, activation, False, None, *biases))
    for activation in ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"):
        yield Case(activation, (x, *plain, shares, ids, activation))
    yield Case("no gate, biases", (x, *plain, shares, ids, "silu_no_mul", False, None, biases[0][:, :24], biases[1]))

    table = _map(maker, 16, 8)
    x, shares, ids = inputs(9, 48, 16, 4)
    yield Case("expert map", (x, *gated, shares, ids, "silu", False, table))
    yield Case("expert map, biases", (x, *gated, shares, ids, "silu", False, table, *biases))
    yield Case("all experts elsewhere", (x, *gated, shares, ids, "silu", False, table.clamp(max=-1)))
    x, shares, ids = inputs(9, 48, 8, 1)
    yield Case("router weight on the input", (x, *gated, shares, ids, "silu", True))
    wide = maker.normal(9, 100)[:, :48]
    rows = maker.normal(8, 60, 48, scale=48**-0.5)[:, :48], maker.normal(8, 48, 30, scale=24**-0.5)[..., :24]
    yield Case("strided", (wide, *rows, shares, ids))


def make_shares(maker: InputMaker, tokens: int, topk: int) -> Tensor:
    """[T, topk] float32: weights that add up to 1."""
    import torch

    shares = maker.uniform(0.1, 1.0, tokens, topk, dtype=torch.promote_types(maker.dtype, torch.float32))
    return shares / shares.sum(-1, keepdim=True)
