"""Mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from .simulated_registry import FLOATING, require, require_contiguous, require_dtypes, require_one_dtype

_GATE = "npu_moe_gating_top_k"
_ROUTE = "npu_moe_init_routing_v2"
_MATMUL = "npu_grouped_matmul"
_GATHER = "npu_moe_token_unpermute"


def _top(scores: Tensor, k: int) -> Tensor:
    """Columns of the k highest scores of each row; of equal ones the lower column first."""
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]


def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    name = "npu_moe_gating_top_k_softmax"
    require_dtypes(name, FLOATING, x=x)
    require(name, x.dim() == 2 and finished is None, "the simulation knows 2 dimensions, no finished rows")
    require(name, 0 < k <= min(x.shape[-1], 1024), f"k={k} of {x.shape[-1]}")
    scores = x.float().softmax(-1)
    ids = _top(scores, k)
    order = torch.arange(ids.numel(), dtype=torch.int32).reshape(k, len(x)).t().contiguous()
    return scores.gather(-1, ids).to(x.dtype), ids.int(), order


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    require_dtypes(_GATE, FLOATING, x=x)
    experts = x.shape[-1]
    share = experts // group_count
    require(_GATE, x.dim() == 2 and experts <= 2048, f"x is {tuple(x.shape)}")
    fits = experts % group_count == 0 and share > 2 and -(-share // 32) * 32 * group_count <= 2048
    require(_GATE, fits, f"{group_count} groups of {experts} experts")
    require(_GATE, 1 <= k_group <= group_count and 1 <= k <= share * k_group, f"k={k}, k_group={k_group}")
    require(_GATE, renorm == 0 and norm_type in (0, 1) and group_select_mode in (0, 1), "an option has no such value")
    original = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    scores = original
    if bias is not None:
        require_one_dtype(_GATE, x=x, bias=bias)
        require(_GATE, tuple(bias.shape) == (experts,), f"bias is {tuple(bias.shape)}")
        scores = scores + bias.float()
    groups = scores.view(len(x), group_count, share)
    rank = groups.amax(-1) if group_select_mode == 0 else groups.topk(2, -1).values.sum(-1)
    kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, _top(rank, k_group), True)
    ids = _top(groups.masked_fill(~kept[..., None], float("-inf")).view(len(x), experts), k)
    weights = original.gather(-1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    weights = weights * routed_scaling_factor
    return weights.to(x.dtype), ids.int(), original if out_flag else torch.empty(0)


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: list[int],
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Without quantisation and dropping, all experts active, counts, and gather indices."""
    require_dtypes(_ROUTE, FLOATING, x=x)
    require_dtypes(_ROUTE, (torch.int32,), expert_idx=expert_idx)
    require(_ROUTE, x.dim() == expert_idx.dim() == 2 and len(x) == len(expert_idx), f"{tuple(x.shape)}")
    require(_ROUTE, active_num == expert_idx.numel(), f"active_num={active_num}, there are {expert_idx.numel()} routes")
    plain = drop_pad_mode == 0 and quant_mode == -1 and row_idx_type == 0
    require(_ROUTE, plain and expert_tokens_num_type == 1 and expert_tokens_num_flag, "an option is not simulated")
    require(_ROUTE, list(active_expert_range) == [0, expert_num], f"active_expert_range={active_expert_range}")
    inside = bool(((expert_idx >= 0) & (expert_idx < expert_num)).all())
    require(_ROUTE, inside, f"experts are 0 to {expert_num - 1}")
    flat = expert_idx.flatten()
    order = flat.argsort(stable=True)
    where = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    counts = torch.bincount(flat, minlength=expert_num)
    return x[order // expert_idx.shape[1]], where.int(), counts, torch.empty(0)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
) -> list[Tensor]:
    """One tensor of rows, one of weights, one result, groups of rows by count."""
    options = (split_item in (2, 3), group_type == 0, group_list_type == 1, len(x) == len(weight) == 1)
    require(_MATMUL, all(options), "the simulation knows one x and one weight, split_item 2, groups of rows by count")
    assert group_list is not None
    rows, matrices = x[0], weight[0]
    require_dtypes(_MATMUL, FLOATING, x=rows)
    require_one_dtype(_MATMUL, x=rows, weight=matrices)
    require_contiguous(_MATMUL, x=rows)
    require(_MATMUL, rows.dim() == 2 and matrices.dim() == 3, f"{tuple(rows.shape)}, {tuple(matrices.shape)}")
    plain = matrices.is_contiguous() or matrices.transpose(1, 2).is_contiguous()
    require(_MATMUL, plain, f"weight is neither contiguous nor transposed: strides {matrices.stride()}")
    require(_MATMUL, max(*rows.shape[1:], *matrices.shape[1:]) < 65536, "a last dimension is too large")
    require_dtypes(_MATMUL, (torch.int64,), group_list=group_list)
    counts = group_list.tolist()
    require(_MATMUL, 1 < len(counts) == len(matrices) <= 1024, f"{len(counts)} groups, {len(matrices)} matrices")
    require(_MATMUL, min(counts) >= 0 and sum(counts) == len(rows), f"groups of {counts} for {len(rows)} rows")
    parts = rows.split(counts)
    results = [(part.float() @ matrix.float()).to(rows.dtype) for part, matrix in zip(parts, matrices, strict=True)]
    return [torch.cat(results)]


def npu_moe_token_unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None) -> Tensor:
    require_dtypes(_GATHER, FLOATING, permuted_tokens=permuted_tokens)
    require_dtypes(_GATHER, (torch.int32,), sorted_indices=sorted_indices)
    require(_GATHER, probs is not None, "the simulation needs probs")
    assert probs is not None
    require_dtypes(_GATHER, FLOATING, probs=probs)
    tokens, k = probs.shape
    routes = tokens * k
    require(_GATHER, tuple(sorted_indices.shape) == (routes,) and k <= 512, f"{tuple(sorted_indices.shape)}, k={k}")
    require(_GATHER, len(permuted_tokens) == routes, f"{len(permuted_tokens)} rows for {routes} routes")
    permutation = torch.equal(sorted_indices.long().sort().values, torch.arange(routes))
    require(_GATHER, permutation, "sorted_indices is no permutation")
    rows = permuted_tokens[sorted_indices.long()].float().view(tokens, k, -1)
    return (rows * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)
