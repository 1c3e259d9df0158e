"""Routing: the experts of highest score for each token (topk_softmax, topk_sigmoid, grouped_topk).

One warp holds the scores of a row, or of several if there are few experts, and takes the best one `topk` times; equal
scores go by the number of the expert. Without a bias it looks at the logits, whose order is that of the scores, and
turns only the chosen ones into weights. Scores and weights are float32. Up to 1,024 experts and 32 choices; any device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import cdiv, need_unit_stride, power_of_2
from .launch import fast
from .planned import planned

MAX_EXPERTS, MAX_CHOICES = 1024, 32
_ENTRIES = 256  # scores that a warp holds, if a row has not more
_TINY = tl.constexpr(1.1754943508222875e-38)  # the least normal float32


@triton.jit
def _select(choice, score, K: tl.constexpr, K_PAD: tl.constexpr, BIASED: tl.constexpr):
    """Columns of the `K` largest entries of each row of `choice`, and their entries of `score`."""
    column = tl.arange(0, choice.shape[1])[None, :]
    slot = tl.arange(0, K_PAD)[None, :]
    columns = tl.zeros((choice.shape[0], K_PAD), tl.int32)
    values = tl.zeros((choice.shape[0], K_PAD), tl.float32)
    for i in range(K):
        value, at = tl.max(choice, 1, return_indices=True)
        here = column == at[:, None]
        if BIASED:
            value = tl.sum(tl.where(here, score, 0.0), 1)
        columns = tl.where(slot == i, at[:, None], columns)
        values = tl.where(slot == i, value[:, None], values)
        choice = tl.where(here, float("-inf"), choice)
    return columns, values


@triton.jit
def _finish(weights, K: tl.constexpr, K_PAD: tl.constexpr, RENORMALIZE: tl.constexpr):
    """The first `K` weights of each row, over their sum if asked."""
    weights = tl.where((tl.arange(0, K_PAD) < K)[None, :], weights, 0.0)
    if RENORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, 1), _TINY)[:, None]
    return weights


@fast
@triton.jit(do_not_specialize=["tokens"])
def _topk(
    weights, indices, order, logits, bias, tokens, experts, factor, stride_w, stride_i, stride_o, stride_l,
    SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, BIASED: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, slot = tl.arange(0, COLUMNS), tl.arange(0, K_PAD)
    live = (token < tokens)[:, None]
    mask = live & (column < experts)[None, :]
    at = logits + token[:, None].to(tl.int64) * stride_l + column[None, :]
    x = tl.load(at, mask=mask, other=float("-inf")).to(tl.float32)
    if not SIGMOID:
        top = tl.max(x, 1)[:, None]
        total = tl.sum(tl.exp(x - top), 1)[:, None]
    if BIASED:
        score = tl.sigmoid(x) if SIGMOID else tl.exp(x - top) / total
        b = tl.load(bias + column, mask=column < experts, other=0.0).to(tl.float32)
        choice = tl.where(mask, score + b[None, :], float("-inf"))
        columns, chosen = _select(choice, score, K, K_PAD, True)
    else:
        columns, chosen = _select(x, x, K, K_PAD, False)
        chosen = tl.sigmoid(chosen) if SIGMOID else tl.exp(chosen - top) / total
    chosen = _finish(chosen, K, K_PAD, RENORMALIZE) * factor
    write = live & (slot < K)[None, :]
    row = token[:, None].to(tl.int64)
    tl.store(weights + row * stride_w + slot[None, :], chosen.to(weights.dtype.element_ty), mask=write)
    tl.store(indices + row * stride_i + slot[None, :], columns.to(indices.dtype.element_ty), mask=write)
    tl.store(order + row * stride_o + slot[None, :], slot[None, :] * tokens + token[:, None], mask=write)


@planned
def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
) -> None:
    """See :func:`vllm_fl.catalog.moe.topk_softmax`."""
    outputs = (topk_weights, topk_indices, token_expert_indices)
    _launch(outputs, gating_output, renormalize, e_score_correction_bias, 1.0, is_sigmoid=False)


@planned
def topk_sigmoid(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> None:
    """See :func:`vllm_fl.catalog.moe.topk_sigmoid`."""
    outputs = (topk_weights, topk_indices, token_expert_indices)
    _launch(outputs, gating_output, renormalize, e_score_correction_bias, routed_scaling_factor, is_sigmoid=True)


def _launch(
    outputs: tuple[Tensor, Tensor, Tensor],
    logits: Tensor,
    renormalize: bool,
    bias: Tensor | None,
    factor: float,
    *,
    is_sigmoid: bool,
) -> None:
    (tokens, experts), topk = logits.shape, outputs[0].shape[1]
    _check_sizes(experts, topk)
    names = ("topk_weights", "topk_indices", "token_expert_indices", "gating_output")
    for name, x in zip(names, (*outputs, logits), strict=True):
        need_unit_stride(name, x)
    if bias is not None:
        need_unit_stride("e_score_correction_bias", bias)
    if not tokens or not topk:
        return
    columns = power_of_2(experts)
    rows = max(_ENTRIES // columns, 1)
    _topk[(cdiv(tokens, rows),)](
        *outputs, logits, bias, tokens, experts, float(factor),
        *(x.stride(0) for x in outputs), logits.stride(0),
        SIGMOID=is_sigmoid, RENORMALIZE=renormalize, BIASED=bias is not None,
        K=topk, K_PAD=power_of_2(topk), ROWS=rows, COLUMNS=columns, num_warps=1,
    )  # fmt: skip


def _check_sizes(experts: int, topk: int) -> None:
    if experts > MAX_EXPERTS:
        raise NotImplementedError(f"{experts} experts, at most {MAX_EXPERTS}")
    if topk > min(experts, MAX_CHOICES):
        raise NotImplementedError(f"topk: {topk} of {experts} experts, at most {min(experts, MAX_CHOICES)}")


@fast
@triton.jit
def _grouped_topk(
    weights, indices, scores, bias, factor, stride, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, BIASED: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    GROUPS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr,
):  # fmt: skip
    """One program a token, its scores in a row a group."""
    token = tl.program_id(0).to(tl.int64)
    group, member, slot = tl.arange(0, GROUPS_PAD), tl.arange(0, SIZE_PAD), tl.arange(0, K_PAD)
    mask = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    expert = group[:, None] * SIZE + member[None, :]
    score = tl.load(scores + token * stride + expert, mask=mask, other=float("-inf")).to(tl.float32)
    if SCORING == 1:
        score = tl.sigmoid(score)
    elif SCORING == 2:
        score = tl.exp(score - tl.max(score))
        score = score / tl.sum(score)
    choice = score
    if BIASED:
        choice = score + tl.load(bias + expert, mask=mask, other=0.0).to(tl.float32)
    choice = tl.where(mask, choice, float("-inf"))
    group_score, best = tl.max(choice, 1, return_indices=True)
    if BIASED and SIZE > 1:
        group_score += tl.max(tl.where(member[None, :] == best[:, None], float("-inf"), choice), 1)
    if KEPT < GROUPS:
        kept = tl.zeros((GROUPS_PAD,), tl.int1)
        for _ in range(KEPT):
            _, at = tl.max(group_score, 0, return_indices=True)
            kept = kept | (group == at)
            group_score = tl.where(group == at, float("-inf"), group_score)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    flat: tl.constexpr = GROUPS_PAD * SIZE_PAD
    columns, chosen = _select(tl.reshape(choice, (1, flat)), tl.reshape(score, (1, flat)), K, K_PAD, True)
    chosen = _finish(chosen, K, K_PAD, RENORMALIZE) * factor
    ids = columns // SIZE_PAD * SIZE + columns % SIZE_PAD
    at = token * K + slot[None, :]
    tl.store(weights + at, chosen, mask=slot[None, :] < K)
    tl.store(indices + at, ids, mask=slot[None, :] < K)


@planned
def grouped_topk(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor | None = None,
    scoring_func: int = 0,
) -> tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.moe.grouped_topk`."""
    tokens, experts = scores.shape
    _check_sizes(experts, topk)
    if scoring_func not in (0, 1, 2):
        raise NotImplementedError(f"scoring_func: {scoring_func} is not one of 0, 1, 2")
    if scores.dtype == torch.float64:
        raise NotImplementedError("scores: float64 is computed in float32 here")
    need_unit_stride("scores", scores)
    if bias is not None:
        need_unit_stride("bias", bias)
    weights = scores.new_empty((tokens, topk), dtype=torch.float32)
    indices = scores.new_empty((tokens, topk), dtype=torch.int32)
    if not tokens or not topk:
        return weights, indices
    size = experts // n_group
    _grouped_topk[(tokens,)](
        weights, indices, scores, bias, float(routed_scaling_factor), scores.stride(0),
        GROUPS=n_group, SIZE=size, KEPT=topk_group, SCORING=scoring_func, RENORMALIZE=renormalize,
        BIASED=bias is not None, K=topk, K_PAD=power_of_2(topk),
        GROUPS_PAD=power_of_2(n_group), SIZE_PAD=power_of_2(size), num_warps=1,
    )  # fmt: skip
    return weights, indices
