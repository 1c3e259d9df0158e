"""A stand-in for FlagGems 5.0.2: the functions that the wrappers call, with its signatures, in PyTorch on any device.

Where FlagGems' kernels make an assumption about layouts, these make it too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from kernel_inputs import reference
from torch import Tensor
from torch.nn import functional


def silu_and_mul_out(A: Tensor, B: Tensor, out: Tensor) -> Tensor:
    return out.copy_(functional.silu(A.float()) * B)


def gelu_and_mul(x: Tensor, y: Tensor, approximate: str = "none") -> Tensor:
    return (functional.gelu(x.float(), approximate=approximate) * y).to(x.dtype)


def rms_norm(x: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, eps: float = 1e-5) -> Tensor:
    return reference("rms_norm")(x, None, weight, eps)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous()
    assert residual.is_contiguous()
    out, total = reference("rms_norm")(x, residual, weight, eps)
    return x.copy_(out), residual.copy_(total)


def apply_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    rotary_interleaved: bool = False,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    assert cos.shape[-1] * 2 == q.shape[-1] == k.shape[-1]
    return reference("rotary_embedding")(q, k, cos, sin, position_ids, not rotary_interleaved)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """Blocks are taken to be [block_size, H, D] in memory, rows to be [H, D]."""
    heads, size = key.shape[1:]
    block_size, block_stride = key_cache.shape[1], key_cache.stride(0)
    for rows, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.as_strided((cache.shape[0], block_size, heads * size), (block_stride, heads * size, 1))
        source = rows.as_strided((len(slot_mapping), heads * size), (rows.stride(0), 1))
        for index, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                flat[slot // block_size, slot % block_size] = source[index]


def concat_and_cache_mla(
    kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str, scale: Tensor
) -> None:
    """Rows are taken to be contiguous, and their length a power of two or more than 512."""
    tile = min(kv_c.shape[1], 512)
    assert tile & (tile - 1) == 0
    assert kv_cache.dtype == kv_c.dtype
    assert (kv_cache_dtype, scale.numel()) == ("auto", 1)
    flat = kv_cache.as_strided(kv_cache.shape, (kv_cache.stride(0), kv_cache.stride(1), 1))
    parts = [rows.as_strided((len(slot_mapping), rows.shape[1]), (rows.stride(0), 1)) for rows in (kv_c, k_pe)]
    for index, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            flat[slot // kv_cache.shape[1], slot % kv_cache.shape[1]] = torch.cat([rows[index] for rows in parts])


def topk_softmax(
    topk_weights: Tensor, topk_indices: Tensor, token_expert_indices: Tensor, gating_output: Tensor, renormalize: bool
) -> None:
    reference("topk_softmax")(topk_weights, topk_indices, token_expert_indices, gating_output, renormalize)


def grouped_topk(
    scores: Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Tensor,
    scoring_func: int = 0,
) -> tuple[Tensor, Tensor]:
    assert bias.numel() == scores.shape[1]
    return reference("grouped_topk")(
        scores, n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func
    )


def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None = None, pad_sorted_ids: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for a whole block of each expert, however few routes there are; unused blocks are marked with 0."""
    assert expert_map is None
    assert topk_ids.numel()
    routes, experts, total = reference("moe_align_block_size")(topk_ids, block_size, num_experts, None, pad_sorted_ids)
    length = topk_ids.numel() + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    blocks = -(-length // block_size)
    routes = functional.pad(routes, (0, length - len(routes)), value=topk_ids.numel())
    return routes, functional.pad(experts.clamp(min=0), (0, blocks - len(experts))), total


def moe_sum(input: Tensor, output: Tensor) -> None:
    output.copy_(input.float().sum(1))


def fused_experts_impl(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    **rest: Any,
) -> Tensor:
    assert not inplace
    assert not rest
    assert hidden_states.is_contiguous()
    return reference("fused_experts")(
        hidden_states, w1, w2, topk_weights, topk_ids, activation, apply_router_weight_on_input
    )


def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    assert all(t.is_contiguous() for t in (logits, prompt_mask, output_mask, repetition_penalties))
    assert prompt_mask.dtype == output_mask.dtype == torch.bool
    assert logits.numel()
    reference("apply_repetition_penalties")(logits, prompt_mask, output_mask, repetition_penalties)


def per_token_group_quant_fp8(
    x: Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    scale_ue8m0: bool = False,
) -> tuple[Tensor, Tensor]:
    """The second dimension is taken to be the last one."""
    assert dtype == torch.float8_e4m3fn
    assert not scale_ue8m0
    assert x.stride(-1) == 1
    rows = x.as_strided((x.numel() // x.shape[1], x.shape[1]), (x.stride(0), 1))
    return reference("per_token_group_quant_fp8")(rows, group_size, eps, column_major_scales, False)


def _functions(*names: str) -> dict[str, Any]:
    made = {}
    for name in names:

        def function(*args: Any) -> None: ...

        function.__name__ = name
        made[name] = function
    return made


ATEN = _functions("mm", "mm_out", "addmm", "addmm_out", "add", "zeros", "full", "ones", "softmax", "rms_norm_aten")
#: As FlagGems' table: (ATen overload, function[, condition]).
FULL_CONFIG = (
    ("mm", ATEN["mm"]),
    ("mm.out", ATEN["mm_out"]),
    ("addmm", ATEN["addmm"]),
    ("addmm.out", ATEN["addmm_out"]),
    ("add.Tensor", ATEN["add"]),
    ("zeros", ATEN["zeros"]),
    ("full", ATEN["full"]),
    ("ones", ATEN["ones"], lambda: True),
    ("_softmax", ATEN["softmax"]),
    ("rms_norm", ATEN["rms_norm_aten"]),
)


def make() -> ModuleType:
    """The module; ``registered`` lists the functions that it was told to register with ATen."""
    module: Any = ModuleType("flag_gems")
    for function in (
        *(silu_and_mul_out, gelu_and_mul, rms_norm, fused_add_rms_norm, apply_rotary_pos_emb),
        *(reshape_and_cache_flash, topk_softmax, grouped_topk, moe_align_block_size, moe_sum, fused_experts_impl),
        *(concat_and_cache_mla, apply_repetition_penalties, per_token_group_quant_fp8),
    ):
        setattr(module, function.__name__, function)
    module._FULL_CONFIG = FULL_CONFIG
    module.registered = []

    def register(keep: Any) -> None:
        module.registered += [entry[1].__name__ for entry in FULL_CONFIG if keep(entry[1].__name__)]

    module.enable = lambda unused=(): register(lambda name: name not in unused)
    module.only_enable = lambda include=(): register(lambda name: name in include)
    module.all_registered_ops = lambda: module.registered
    return module
