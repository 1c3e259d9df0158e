"""Mixture of experts: routing, grouping by expert, expert computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .inputs import moe as inputs
from .inputs import sized
from .spec import operator

if TYPE_CHECKING:
    from torch import Tensor

_ROUTER_OUTPUTS = ("topk_weights", "topk_indices", "token_expert_indices")


@operator(called_from="FusedTopKRouter", mutates=_ROUTER_OUTPUTS, cases=inputs.topk_softmax, sized=sized.topk_softmax)
def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
) -> None:
    """Softmax routing: the `topk` experts of highest score for each token.

    Scores are the softmax of the logits in float32. A bias moves the choice only: the weights are the unbiased
    scores of the chosen experts. Weights come in order of falling (biased) score.

    Args:
        topk_weights: [T, topk], float32; written.
        topk_indices: [T, topk], int32, int64 or uint32; written.
        token_expert_indices: [T, topk], int32; written: ``k * T + t`` for choice k of token t.
        gating_output: [T, E], floating.
        renormalize: divide the weights by their sum.
        e_score_correction_bias: [E], or None.
    """


@operator(
    called_from="FusedTopKRouter, FusedTopKBiasRouter",
    mutates=_ROUTER_OUTPUTS,
    cases=inputs.topk_sigmoid,
    sized=sized.topk_sigmoid,
)
def topk_sigmoid(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Sigmoid routing: as topk_softmax, with the sigmoid of each logit as its score.

    Args:
        topk_weights: [T, topk], float32; written.
        topk_indices: [T, topk], int32, int64 or uint32; written.
        token_expert_indices: [T, topk], int32; written: ``k * T + t`` for choice k of token t.
        gating_output: [T, E], floating.
        renormalize: divide the weights by their sum.
        e_score_correction_bias: [E], or None.
        routed_scaling_factor: applied to the weights last.
    """


@operator(called_from="GroupedTopKRouter", cases=inputs.grouped_topk, sized=sized.grouped_topk, dtypes=("float32",))
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
    """Routing limited to groups of experts (DeepSeek V2 and V3).

    Experts fall into `n_group` groups of neighbours. With a bias a group's score is the sum of its two highest biased
    scores, without one its highest score. Experts outside the best `topk_group` groups are out of the choice.

    Args:
        scores: [T, E], floating: scores already (scoring_func 0), or logits.
        n_group: divides E.
        topk_group: groups kept.
        topk: experts chosen a token.
        renormalize: divide the weights by their sum.
        routed_scaling_factor: applied to the weights last.
        bias: [E] or None; moves the choice, never the weights.
        scoring_func: 0 takes `scores` as they are, 1 applies the sigmoid, 2 the softmax.

    Returns:
        weights [T, topk] float32 (float64 for float64 scores) and expert ids [T, topk] int32, by falling (biased)
        score.
    """
    import torch

    shape = (scores.shape[0], topk)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    return scores.new_empty(shape, dtype=dtype), scores.new_empty(shape, dtype=torch.int32)


def _routes_in_order(arguments: Mapping[str, Any], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results of moe_align_block_size with each expert's routes in rising order, and padding where nobody looks."""
    import torch

    routes, labels, total = results
    ids, experts, table = arguments["topk_ids"], arguments["num_experts"], arguments.get("expert_map")
    found = ids[(ids >= 0) & (ids < experts)].flatten().long()
    if table is not None and arguments.get("ignore_invalid_experts", False):
        found = table[found].long()
        found = found[found >= 0]
    counts = torch.bincount(found, minlength=experts)
    block_size, padding = arguments["block_size"], ids.numel()
    ends = ((counts + block_size - 1) // block_size * block_size).cumsum(0)
    slots = torch.arange(len(routes), device=routes.device)
    owner = torch.searchsorted(ends, slots, right=True)
    order = (owner * (padding + 1) + routes.clamp(0, padding)).argsort()
    blocks = torch.arange(len(labels), device=labels.device)
    return routes[order].where(slots < ends[-1], padding), labels.where(blocks * block_size < ends[-1], -1), total


@operator(
    called_from="TritonExperts",
    cases=inputs.moe_align_block_size,
    sized=sized.moe_align_block_size,
    canonical=_routes_in_order,
    dtypes=("float32",),
)
def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the routes by expert and pad each expert's share to whole blocks.

    Args:
        topk_ids: [T, topk], integers: the chosen experts. Route r is ``topk_ids.flatten()[r]``.
        block_size: routes a block.
        num_experts: E, all experts.
        expert_map: [E], int32: local id of each expert, -1 where it lives on another rank; None is the identity.
        pad_sorted_ids: round the length of the first result up to whole blocks.
        ignore_invalid_experts: leave out routes to experts that `expert_map` maps to -1.

    Returns:
        sorted_token_ids [L] int32: route numbers, experts in rising order, of their local ids where routes are left out
        (the order among one expert's routes is free), padding is ``T * topk``; L is ``numel + E * (block_size - 1)``,
        and at most ``numel * block_size`` if numel is below E;
        expert_ids [ceil(L / block_size)] int32: the (local) expert of each block;
        num_tokens_post_pad [1] int32: routes plus padding. What is past it, in either, is never read.
    """
    import torch

    numel = topk_ids.numel()
    length = numel + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    if numel < num_experts:
        length = min(numel * block_size, length)
    sizes = (length, -(-length // block_size), 1)
    first, second, third = (topk_ids.new_empty((size,), dtype=torch.int32) for size in sizes)
    return first, second, third


@operator(called_from="TritonExperts", mutates=("output",), cases=inputs.moe_sum, sized=sized.moe_sum)
def moe_sum(input: Tensor, output: Tensor) -> None:
    """Sum over the chosen experts of each token, in float32.

    Args:
        input: [T, topk, H], floating.
        output: [T, H]; written.
    """


@operator(
    called_from="UnquantizedFusedMoEMethod",
    cases=inputs.fused_experts,
    sized=sized.fused_experts,
    # Twice the defaults: both projections and the activation round to the dtype before the next step.
    tolerances={"float16": (4e-3, 2e-3), "bfloat16": (3.2e-2, 2e-2)},
)
def fused_experts(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Tensor | None = None,
    w1_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """The experts' gated MLPs, weighted and summed over each token's choices.

    ``sum_k weight_k * (act(x W1_k^T + b1_k) W2_k^T + b2_k)``.

    Args:
        hidden_states: [T, H], floating.
        w1: [E, 2 * I, H], gate rows first, for ``swigluoai`` too, whose checkpoints have gate and up rows in turn;
            [E, I, H] for an activation without a gate.
        w2: [E, H, I].
        topk_weights: [T, topk], floating.
        topk_ids: [T, topk], integers.
        activation: ``silu``, ``gelu``, ``gelu_tanh`` or ``swigluoai`` (gated), or ``silu_no_mul``, ``gelu_no_mul``,
            ``gelu_tanh_no_mul`` or ``relu2_no_mul``. ``swigluoai`` is gpt-oss's ``(u + 1) * g * sigmoid(1.702 * g)``
            with ``g = min(gate, 7)`` and ``u = clamp(up, -7, 7)``.
        apply_router_weight_on_input: multiply the expert's input instead of its output; needs topk 1.
        expert_map: [global E], int32: row of `w1` and `w2`, -1 for experts elsewhere; None is the identity.
        w1_bias: [E, 2 * I], or None.
        w2_bias: [E, H], or None.

    Returns:
        [T, H], dtype of `hidden_states`.
    """
    return hidden_states.new_empty(hidden_states.shape)
