"""Literal float64 forms of the mixture-of-experts operators; see :mod:`ops_oracles`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from ops_oracles import Array, Integers, gelu, sigmoid, silu


def softmax(row: Array) -> Array:
    weights = np.exp(row - row.max())
    out: Array = weights / weights.sum()
    return out


def _route(
    scores: Array, topk: int, renormalize: bool, bias: Array | None, factor: float
) -> tuple[list[int], list[float]]:
    biased = scores if bias is None else scores + bias
    chosen = sorted(range(len(scores)), key=lambda e: -biased[e])[:topk]
    total = sum(scores[e] for e in chosen) if renormalize else 1.0
    return chosen, [scores[e] / total * factor for e in chosen]


def _topk(
    outputs: tuple[Array, Integers, Integers],
    scores: list[Array],
    renormalize: bool,
    bias: Array | None,
    factor: float,
) -> None:
    weights, indices, token_expert_indices = outputs
    tokens, topk = weights.shape
    for t in range(tokens):
        indices[t], weights[t] = _route(scores[t], topk, renormalize, bias, factor)
        token_expert_indices[t] = [k * tokens + t for k in range(topk)]


def topk_softmax(
    topk_weights: Array,
    topk_indices: Integers,
    token_expert_indices: Integers,
    gating_output: Array,
    renormalize: bool = False,
    e_score_correction_bias: Array | None = None,
) -> None:
    outputs = topk_weights, topk_indices, token_expert_indices
    _topk(outputs, [softmax(row) for row in gating_output], renormalize, e_score_correction_bias, 1.0)


def topk_sigmoid(
    topk_weights: Array,
    topk_indices: Integers,
    token_expert_indices: Integers,
    gating_output: Array,
    renormalize: bool = False,
    e_score_correction_bias: Array | None = None,
    routed_scaling_factor: float = 1.0,
) -> None:
    outputs, scores = (topk_weights, topk_indices, token_expert_indices), [sigmoid(row) for row in gating_output]
    _topk(outputs, scores, renormalize, e_score_correction_bias, routed_scaling_factor)


def grouped_topk(
    scores: Array,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Array | None = None,
    scoring_func: int = 0,
) -> tuple[Array, Integers]:
    tokens, experts = scores.shape
    size = experts // n_group
    weights, ids = np.empty((tokens, topk)), np.empty((tokens, topk), dtype=np.int64)
    for t in range(tokens):
        row = (scores[t], sigmoid(scores[t]), softmax(scores[t]) if experts else scores[t])[scoring_func]
        biased = row if bias is None else row + bias
        marks = []
        for group in range(n_group):
            members = sorted(biased[group * size : (group + 1) * size], reverse=True)
            marks.append(members[0] if bias is None else sum(members[:2]))
        best = sorted(range(n_group), key=lambda g: -marks[g])[:topk_group]
        allowed = [e for e in range(experts) if e // size in best]
        ids[t] = sorted(allowed, key=lambda e: -biased[e])[:topk]
        total = sum(row[e] for e in ids[t]) if renormalize else 1.0
        weights[t] = [row[e] / total * routed_scaling_factor for e in ids[t]]
    return weights, ids


def moe_align_block_size(
    topk_ids: Integers,
    block_size: int,
    num_experts: int,
    expert_map: Integers | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Integers, Integers, Integers]:
    routes = topk_ids.ravel().tolist()
    length = len(routes) + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    if len(routes) < num_experts:
        length = min(length, len(routes) * block_size)
    local = list(range(num_experts)) if expert_map is None else expert_map.tolist()
    order = [e for e in range(num_experts) if not (ignore_invalid_experts and local[e] < 0)]
    if ignore_invalid_experts:
        order.sort(key=lambda e: local[e])
    ids: list[int] = []
    blocks: list[int] = []
    for expert in order:
        share = [r for r, e in enumerate(routes) if e == expert]
        share += [len(routes)] * (-len(share) % block_size)
        ids += share
        blocks += [local[expert]] * (len(share) // block_size)
    count = len(ids)
    ids += [len(routes)] * (length - len(ids))
    blocks += [-1] * (-(-length // block_size) - len(blocks))
    return np.array(ids, dtype=np.int64), np.array(blocks, dtype=np.int64), np.array([count])


def moe_sum(input: Array, output: Array) -> None:
    for t in range(input.shape[0]):
        output[t] = sum(input[t, k] for k in range(input.shape[1]))


def _activate(x: Array, name: str) -> Array:
    d = len(x) // 2
    gate, up = x[:d], x[d:]
    if name == "swigluoai":
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return (up + 1.0) * gate * sigmoid(1.702 * gate)
    if name == "relu2_no_mul":
        return np.maximum(x, 0.0) ** 2
    functions: dict[str, Callable[[Array], Array]] = {
        "silu": silu,
        "gelu": gelu,
        "gelu_tanh": lambda v: gelu(v, "tanh"),
    }
    function = functions[name.removesuffix("_no_mul")]
    return function(x) if name.endswith("_no_mul") else function(gate) * up


def fused_experts(
    hidden_states: Array,
    w1: Array,
    w2: Array,
    topk_weights: Array,
    topk_ids: Integers,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    expert_map: Integers | None = None,
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
) -> Array:
    out = np.zeros_like(hidden_states)
    for (t, k), expert in np.ndenumerate(topk_ids):
        row = int(expert) if expert_map is None else int(expert_map[expert])
        if row < 0:
            continue
        weight = topk_weights[t, k]
        x = hidden_states[t] * (weight if apply_router_weight_on_input else 1.0)
        h = w1[row] @ x + (0.0 if w1_bias is None else w1_bias[row])
        y = w2[row] @ _activate(h, activation) + (0.0 if w2_bias is None else w2_bias[row])
        out[t] += y if apply_router_weight_on_input else weight * y
    return out


__all__ = [
    "fused_experts",
    "grouped_topk",
    "moe_align_block_size",
    "moe_sum",
    "topk_sigmoid",
    "topk_softmax",
]
