"""Routing and bookkeeping of mixtures of experts by vLLM's compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKENS = "vLLM's kernel cannot be launched without tokens"
_SCORING_NONE = 0
_MOST_BIASED = 512  # experts of a kernel of their own number


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
) -> None:
    """See :func:`vllm_fl.catalog.moe.topk_softmax`."""
    from vllm import _custom_ops

    if not gating_output.shape[0]:
        return
    bias = _as_bias(e_score_correction_bias)
    _custom_ops.topk_softmax(
        topk_weights, topk_indices, token_expert_indices, gating_output.contiguous(), renormalize, bias
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
    """See :func:`vllm_fl.catalog.moe.topk_sigmoid`."""
    from vllm import _custom_ops

    if not gating_output.shape[0]:
        return
    bias = _as_bias(e_score_correction_bias)
    _custom_ops.topk_sigmoid(
        topk_weights,
        topk_indices,
        token_expert_indices,
        gating_output.contiguous(),
        renormalize,
        bias,
        routed_scaling_factor,
    )


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
    """See :func:`vllm_fl.catalog.moe.grouped_topk`.

    Raises:
        NotImplementedError: no tokens, no bias, softmax scores, groups of one expert, or more groups or choices than
            the kernel takes.
    """
    from vllm import _custom_ops

    if not scores.shape[0]:
        raise NotImplementedError(NO_TOKENS)
    if n_group == scores.shape[1]:
        raise NotImplementedError("vLLM's grouped_topk scores a group by two experts; these groups have one")
    if bias is None or scoring_func not in (_SCORING_NONE, 1) or n_group > 32 or topk > 32:
        raise NotImplementedError(
            "vLLM's grouped_topk wants a bias, scores as they are or through the sigmoid, at most 32 groups and choices"
        )
    weights, ids = _custom_ops.grouped_topk(
        scores.contiguous(),
        n_group,
        topk_group,
        topk,
        renormalize,
        routed_scaling_factor,
        bias.to(scores.dtype),
        scoring_func,
    )
    return weights, ids.to(torch.int32)


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.moe.moe_align_block_size`.

    Raises:
        NotImplementedError: no tokens.
    """
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size as kernel

    if not topk_ids.numel():
        raise NotImplementedError(NO_TOKENS)
    first, second, third = kernel(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids, ignore_invalid_experts)
    return first, second, third


def moe_sum(input: Tensor, output: Tensor) -> None:
    """See :func:`vllm_fl.catalog.moe.moe_sum`.

    Raises:
        NotImplementedError: the kernel wants contiguous tensors of one dtype.
    """
    from vllm import _custom_ops

    if input.dtype != output.dtype or not (input.is_contiguous() and output.is_contiguous()):
        raise NotImplementedError("vLLM's moe_sum wants contiguous tensors of one dtype")
    if input.numel():
        _custom_ops.moe_sum(input, output)


def _as_bias(bias: Tensor | None) -> Tensor | None:
    """`bias` as the kernels read it."""
    if bias is None:
        return None
    experts = bias.shape[0]
    if experts & (experts - 1) or experts > _MOST_BIASED:
        # The kernel for other numbers takes -1 for "none yet": an expert whose biased score is below is never chosen.
        raise NotImplementedError(
            f"vLLM's kernel chooses by biased scores among 2^n experts up to {_MOST_BIASED}, not among {experts}"
        )
    return bias.float()
