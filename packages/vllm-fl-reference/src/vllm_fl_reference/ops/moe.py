"""Mixture of experts: routing, and grouping the routes by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import compute_dtype


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
) -> None:
    """Softmax routing: the experts of highest (biased) score for each token."""
    scores = gating_output.softmax(-1, dtype=compute_dtype(gating_output.dtype))
    weights, indices = _choose(scores, topk_weights.shape[1], e_score_correction_bias, renormalize)
    _store(topk_weights, topk_indices, token_expert_indices, weights, indices)


def topk_sigmoid(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Sigmoid routing: the experts of highest (biased) score for each token."""
    scores = gating_output.to(compute_dtype(gating_output.dtype)).sigmoid()
    weights, indices = _choose(scores, topk_weights.shape[1], e_score_correction_bias, renormalize)
    _store(topk_weights, topk_indices, token_expert_indices, weights * routed_scaling_factor, indices)


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
    """Routing limited to the best groups of experts.

    Raises:
        ValueError: an unknown `scoring_func`.
    """
    scores = _score(scores.to(compute_dtype(scores.dtype)), scoring_func)
    choice = scores if bias is None else scores + bias
    groups = choice.unflatten(-1, (n_group, -1))
    best = 1 if bias is None else min(2, groups.shape[-1])
    group_scores = groups.topk(best).values.sum(-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, group_scores.topk(topk_group).indices, True)
    allowed = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)
    indices = allowed.topk(topk).indices
    weights = scores.gather(-1, indices)
    if renormalize:
        weights = _normalize(weights)
    return weights * routed_scaling_factor, indices.to(torch.int32)


def _score(scores: Tensor, scoring_func: int) -> Tensor:
    if scoring_func == 0:
        return scores
    if scoring_func == 1:
        return scores.sigmoid()
    if scoring_func == 2:
        return scores.softmax(-1)
    raise ValueError(
        f"grouped_topk: scoring_func {scoring_func!r}; it must be 0 (scores as they are), 1 (sigmoid) or 2 (softmax)"
    )


def _choose(scores: Tensor, topk: int, bias: Tensor | None, renormalize: bool) -> tuple[Tensor, Tensor]:
    if bias is None:
        weights, indices = scores.topk(topk)
    else:
        indices = (scores + bias).topk(topk).indices
        weights = scores.gather(-1, indices)
    return (_normalize(weights) if renormalize else weights), indices


def _normalize(weights: Tensor) -> Tensor:
    """Weights over their sum; all zeros, as from logits of minus infinity, stay zeros."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _store(
    topk_weights: Tensor, topk_indices: Tensor, token_expert_indices: Tensor, weights: Tensor, indices: Tensor
) -> None:
    topk_weights.copy_(weights)
    topk_indices.copy_(indices)
    tokens, topk = token_expert_indices.shape
    token_expert_indices.copy_(torch.arange(tokens * topk, device=indices.device).view(topk, tokens).t())


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the routes by expert and pad each expert's share to whole blocks.

    The order among one expert's routes is that of their numbers. Ids outside ``[0, num_experts)`` are left out.
    """
    routes, device = topk_ids.numel(), topk_ids.device
    length = _sorted_length(routes, block_size, num_experts, pad_sorted_ids)
    expert = topk_ids.flatten().to(torch.int64)
    left_out = (expert < 0) | (expert >= num_experts)
    if expert_map is not None and ignore_invalid_experts:
        expert = expert_map[expert.masked_fill(left_out, 0)].to(torch.int64)
        left_out |= expert < 0
    expert = expert.masked_fill(left_out, num_experts)

    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, expert, torch.ones_like(expert))
    firsts = counts.cumsum(0) - counts
    ends = ((counts[:num_experts] + block_size - 1) // block_size * block_size).cumsum(0)
    starts = torch.cat((ends.new_zeros(1), ends))  # the last entry is the start of what is left out

    order = expert.argsort(stable=True)
    expert = expert[order]
    target = starts[expert] + torch.arange(routes, device=device) - firsts[expert]
    target = target.masked_fill(expert == num_experts, length)
    sorted_ids = torch.full((length + 1,), routes, dtype=torch.int32, device=device)
    sorted_ids[target] = order.to(torch.int32)

    block_starts = torch.arange(0, length, block_size, device=device)
    block = torch.searchsorted(ends, block_starts, right=True)
    beyond = block == num_experts
    if expert_map is not None and not ignore_invalid_experts:
        block = expert_map[block.masked_fill(beyond, 0)]
    return sorted_ids[:length], block.to(torch.int32).masked_fill(beyond, -1), ends[-1:].to(torch.int32)


def _sorted_length(routes: int, block_size: int, num_experts: int, whole_blocks: bool) -> int:
    length = routes + num_experts * (block_size - 1)
    if whole_blocks:
        length = -(-length // block_size) * block_size
    return min(routes * block_size, length) if routes < num_experts else length


def moe_sum(input: Tensor, output: Tensor) -> None:
    """Sum over the chosen experts of each token; PyTorch's reductions of half-precision inputs add in float32."""
    output.copy_(input.sum(1))
