"""The experts by vLLM's Triton grouped product with its tuned launch tables; the steps around it go through dispatch.

So alignment, activation and sum can each be another implementation than vLLM's compiled kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel, try_get_optimal_moe_config
from vllm.triton_utils import tl

from vllm_fl.dispatch import bind

_moe_align_block_size = bind("moe_align_block_size")
_moe_sum = bind("moe_sum")
_silu_and_mul = bind("silu_and_mul")
_gelu_and_mul = bind("gelu_and_mul")

_COMPUTE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NOT_QUANTIZED = dict.fromkeys(("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"), False)


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
    """See :func:`vllm_fl.catalog.moe.fused_experts`.

    Raises:
        NotImplementedError: an activation other than silu, gelu and gelu_tanh.
    """
    if activation not in ("silu", "gelu", "gelu_tanh"):
        raise NotImplementedError(f"vLLM's Triton experts are offered with silu, gelu and gelu_tanh, not {activation}")
    out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    if not topk_ids.numel():
        return out.zero_()
    tokens, topk = topk_ids.shape
    rows, hidden = w1.shape[1], w2.shape[1]
    config = try_get_optimal_moe_config(tuple(w1.shape), tuple(w2.shape), topk, None, tokens)
    experts = w1.shape[0] if expert_map is None else expert_map.shape[0]
    routes = _moe_align_block_size.fn(topk_ids, config["BLOCK_SIZE_M"], experts, expert_map, False, True)
    memory = hidden_states.new_empty(tokens * topk * max(rows, hidden))
    first = memory[: tokens * topk * rows].view(tokens, topk, rows)
    last = memory[: tokens * topk * hidden].view(tokens, topk, hidden)
    weights = topk_weights.contiguous()
    x, on_input = hidden_states.contiguous(), apply_router_weight_on_input
    _product(x, w1, first, weights, routes, on_input, topk, config, w1_bias)
    middle = _activated(first.view(-1, rows), activation)
    if expert_map is not None:
        last.zero_()  # routes to experts elsewhere are not computed
    _product(middle, w2, last, weights, routes, not on_input, 1, config, w2_bias)
    _moe_sum.fn(last, out)
    return out


def _activated(x: Tensor, activation: str) -> Any:
    if activation == "silu":
        return _silu_and_mul.fn(x)
    return _gelu_and_mul.fn(x, "tanh" if activation == "gelu_tanh" else "none")


def _product(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    weights: Tensor,
    routes: tuple[Tensor, Tensor, Tensor],
    weighted: bool,
    topk: int,
    config: dict[str, Any],
    bias: Tensor | None,
) -> None:
    """Multiply each route's row of `a` (its token's row if `topk` > 1) with its expert's matrix of `b`, into `out`."""
    invoke_fused_moe_triton_kernel(
        a,
        b,
        out,
        None,
        None,
        weights,
        *routes,
        weighted,
        topk,
        config,
        compute_type=_COMPUTE[a.dtype],
        **_NOT_QUANTIZED,
        per_channel_quant=False,
        block_shape=None,
        B_bias=bias,
    )
