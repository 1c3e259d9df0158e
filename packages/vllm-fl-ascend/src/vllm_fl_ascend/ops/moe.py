"""Mixture of experts: routing and expert computation."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_ascend.schemas import needs

#: Limits of npu_moe_gating_top_k: experts, also with each group rounded up to 32, and more than 2 experts a group.
MAX_EXPERTS = 2048
#: Limits of npu_grouped_matmul: groups, and entries of the last dimensions.
MAX_GROUPS = 1024
MAX_COLUMNS = 65535
#: Of npu_moe_gating_top_k, ``norm_type``.
SOFTMAX, SIGMOID = 0, 1

_INDICES = (torch.int32, torch.int64)


@needs("npu::npu_moe_gating_top_k_softmax", "npu::npu_moe_gating_top_k")
def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
) -> None:
    """Softmax routing; see the catalogue."""
    k = topk_weights.shape[1]
    _check_outputs(topk_indices, gating_output)
    if gating_output.shape[0] == 0:
        return
    if e_score_correction_bias is None:
        weights, ids, order = torch.ops.npu.npu_moe_gating_top_k_softmax(gating_output.float(), None, k)
    else:
        weights, ids = _gate(gating_output, k, e_score_correction_bias, SOFTMAX)
        order = _order(ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    topk_weights.copy_(weights)
    topk_indices.copy_(ids)
    token_expert_indices.copy_(order)


@needs("npu::npu_moe_gating_top_k")
def topk_sigmoid(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Sigmoid routing; see the catalogue. torch_npu's operator always divides by the sum of the weights."""
    _check_outputs(topk_indices, gating_output)
    _check_sigmoid(renormalize)
    if gating_output.shape[0] == 0:
        return
    weights, ids = _gate(gating_output, topk_weights.shape[1], e_score_correction_bias, SIGMOID)
    topk_weights.copy_(weights * routed_scaling_factor)
    topk_indices.copy_(ids)
    token_expert_indices.copy_(_order(ids))


@needs("npu::npu_moe_gating_top_k")
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
    """Routing limited to groups of experts; see the catalogue. Takes logits, not scores."""
    if scoring_func == 0:
        raise NotImplementedError("npu_moe_gating_top_k takes logits, not scores")
    if scoring_func == 1:
        _check_sigmoid(renormalize)
    if scores.shape[0] == 0:
        shape = (0, topk)
        return scores.new_empty(shape, dtype=torch.float32), scores.new_empty(shape, dtype=torch.int32)
    kind = SIGMOID if scoring_func == 1 else SOFTMAX
    weights, ids = _gate(scores, topk, bias, kind, n_group, topk_group)
    if renormalize and kind == SOFTMAX:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor, ids


def _gate(
    logits: Tensor, k: int, bias: Tensor | None, norm_type: int, groups: int = 1, kept: int = 1
) -> tuple[Tensor, Tensor]:
    """Unscaled weights [T, k] float32 and expert ids [T, k] int32 by falling (biased) score.

    Raises:
        NotImplementedError: more or fewer experts than npu_moe_gating_top_k takes.
    """
    experts = logits.shape[1]
    share = experts // groups
    if share <= 2 or -(-share // 32) * 32 * groups > MAX_EXPERTS or not 1 <= k <= share * kept:
        raise NotImplementedError(
            f"npu_moe_gating_top_k does not choose {k} of {experts} experts in {kept} of {groups} groups: a group has"
            f" more than 2, and with each rounded up to 32 there are at most {MAX_EXPERTS}"
        )
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
        logits.float(),
        k,
        bias=None if bias is None else bias.float(),
        k_group=kept,
        group_count=groups,
        group_select_mode=0 if bias is None else 1,
        norm_type=norm_type,
    )
    return weights, ids


def _check_outputs(topk_indices: Tensor, logits: Tensor) -> None:
    if topk_indices.dtype not in _INDICES:
        raise NotImplementedError(f"expert ids are written as int32 or int64, not {topk_indices.dtype}")
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise NotImplementedError(f"torch_npu routes by float32, float16 or bfloat16, not {logits.dtype}")


def _check_sigmoid(renormalize: bool) -> None:
    if not renormalize:
        raise NotImplementedError("npu_moe_gating_top_k divides sigmoid weights by their sum, asked or not")


def _order(ids: Tensor) -> Tensor:
    """``j * T + t`` for choice j of token t: [T, k], int32."""
    tokens, k = ids.shape
    return torch.arange(tokens * k, dtype=torch.int32, device=ids.device).view(k, tokens).t()


@needs(
    "npu::npu_moe_init_routing_v2",
    "npu::npu_grouped_matmul",
    "npu::npu_swiglu",
    "npu::npu_geglu",
    "npu::npu_moe_token_unpermute",
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
    """The experts' gated MLPs, weighted and summed over each token's choices; see the catalogue.

    A route to an expert elsewhere is computed by the first expert here, with weight 0: torch_npu's operators have no
    routes that are left out.
    """
    _check_experts(hidden_states, w1, w2, activation, w1_bias is not None or w2_bias is not None)
    tokens, k = topk_ids.shape
    if tokens == 0:
        return hidden_states.new_empty(hidden_states.shape)
    ids, shares = topk_ids, topk_weights.float()
    if expert_map is not None:
        ids = expert_map[ids.long()]
        shares = shares.masked_fill(ids < 0, 0)
        ids = ids.clamp(min=0)
    x = hidden_states
    if apply_router_weight_on_input:
        if k != 1:
            raise ValueError(f"apply_router_weight_on_input needs one choice a token, not {k}")
        x = (x * shares).to(x.dtype)
        shares = torch.ones_like(shares)
    rows, where, counts = _sorted_by_expert(x.contiguous(), ids.to(torch.int32).contiguous(), w1.shape[0])
    inner = _activate(_grouped_matmul(rows, w1, counts), activation)
    return torch.ops.npu.npu_moe_token_unpermute(_grouped_matmul(inner, w2, counts), where, shares)


def _check_experts(x: Tensor, w1: Tensor, w2: Tensor, activation: str, biased: bool) -> None:
    experts = w1.shape[0]
    if activation not in ("silu", "gelu", "gelu_tanh"):
        raise NotImplementedError(f"torch_npu has no experts with the activation {activation!r} here")
    if biased:
        raise NotImplementedError("npu_grouped_matmul takes no bias for each expert")
    if not (w1.is_contiguous() and w2.is_contiguous()):
        raise NotImplementedError("npu_grouped_matmul would copy weights that are not contiguous")
    if not {w1.dtype, w2.dtype} == {x.dtype}:
        raise NotImplementedError(f"npu_grouped_matmul needs one dtype, not {x.dtype}, {w1.dtype} and {w2.dtype}")
    if not 1 < experts <= MAX_GROUPS:
        raise NotImplementedError(f"npu_grouped_matmul takes 2 to {MAX_GROUPS} experts, not {experts}")
    if max(*w1.shape[1:], *w2.shape[1:]) > MAX_COLUMNS:
        raise NotImplementedError(f"npu_grouped_matmul takes at most {MAX_COLUMNS} rows and columns an expert")


def _sorted_by_expert(x: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of `x` once for each route, by expert; where each route is among them; routes of each expert."""
    rows, where, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=ids.numel(),
        expert_num=experts,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, experts],
        row_idx_type=0,
    )
    return rows, where, counts


def _grouped_matmul(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each expert's rows times its ``weight[e].T``; `weight` is [E, out, in], and taken as it lies in memory."""
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [rows], [weight.transpose(1, 2)], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )
    return out


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.ops.npu.npu_swiglu(x, -1)
    return torch.ops.npu.npu_geglu(x, -1, 1 if activation == "gelu_tanh" else 0, True)[0]
