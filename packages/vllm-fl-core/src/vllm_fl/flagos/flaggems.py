"""FlagGems behind the catalogue's operators, where it computes what they mean; imported at the first call in a process.

FlagGems initialises the device while it is imported, so that must not happen in a process that starts others. Operators
are called only where the model runs, in the workers, and so is :func:`vllm_fl.flagos.aten.enable_aten`.

An operator refuses (NotImplementedError, before anything is written) what FlagGems' kernel takes without an error and
computes otherwise: layouts that it does not look at, choices that it does not know.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_fl.dispatch.oplist import current_rank
from vllm_fl.logging import get_logger

_GELU = ("none", "tanh")
_MOST_CHOICES = 32  # of experts a token, and of groups
_MOST_EXPERTS = 1024
_INT32 = 2**31 - 1


def gems() -> Any:
    """The module ``flag_gems``.

    Raises:
        NotImplementedError: it cannot be imported, so that another implementation serves the call.
    """
    module = _import()
    if isinstance(module, str):
        raise NotImplementedError(module)
    return module


@functools.cache
def _import() -> Any:
    """The module, or why it cannot be imported; tried once a process."""
    _set_environment()
    try:
        module = importlib.import_module("flag_gems")
    except Exception as error:  # it looks for devices, reads databases and runs programs while it is imported
        reason = f"importing flag_gems raised {type(error).__name__}: {error}"
        get_logger(__name__).warning("FlagGems is not used: %s", reason)
        return reason
    _repair_launches()
    return module


def _set_environment() -> None:
    """Say what FlagGems would otherwise find out by running every vendor's programs, and part the workers' databases.

    It keeps tuned configurations in SQLite without a waiting time: workers that share a file stop each other with
    "database is locked". Variables that are set already stay.
    """
    vendor = _vendor()
    if vendor is not None:
        os.environ.setdefault("GEMS_VENDOR", vendor)
    if "FLAGGEMS_DB_URL" not in os.environ:
        cache = os.environ.get("FLAGGEMS_CACHE_DIR")
        folder = (Path(cache) if cache else Path.home() / ".flaggems") / "config_cache"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["FLAGGEMS_DB_URL"] = f"sqlite:///{folder / f'vllm_fl_rank{current_rank()}.db'}"


def _vendor() -> str | None:
    """The platform's vendor, else that of Triton's driver; FlagGems has them by the same names."""
    from vllm_fl.plugins import resolve_platform

    from .availability import triton_info

    plugin = resolve_platform().plugin
    if plugin is not None and plugin.vendor is not None:
        return plugin.vendor
    info = triton_info()
    return info.drivers[0] if info is not None and info.drivers else None


def _repair_launches() -> None:
    """Have FlagGems pass compile-time constants to Triton 3.7 and later, as it does to 3.3 to 3.6.

    Its launcher (``LibEntry``) leaves them out from 3.7 on, where Triton still counts them: kernels then read their
    arguments from the wrong places. Needed by FlagGems 5.0.2 and its sources of August 2026; recognised by the minor
    version that the launcher decides by; can go when no supported FlagGems needs it (its issue 3353).
    """
    # The package has a function of the same name in the place of the submodule.
    launcher: Any = sys.modules.get("flag_gems.utils.libentry")
    if launcher is not None and getattr(launcher, "major_version", 0) == 3 and launcher.minor_version > 6:
        launcher.minor_version = 6


def silu_and_mul(x: Tensor) -> Tensor:
    """See :func:`vllm_fl.catalog.activation.silu_and_mul`."""
    flag_gems = gems()
    d = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], d))
    if out.numel():
        flag_gems.silu_and_mul_out(x[..., :d], x[..., d:], out)
    return out


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See :func:`vllm_fl.catalog.activation.gelu_and_mul`."""
    _refuse(approximate not in _GELU, f"approximate: {approximate!r} is not one of {', '.join(_GELU)}")
    flag_gems = gems()
    d = x.shape[-1] // 2
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], d))
    return flag_gems.gelu_and_mul(x[..., :d], x[..., d:], approximate).contiguous()


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
) -> Tensor | tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.normalization.rms_norm`."""
    if weight is None:
        raise NotImplementedError("weight: FlagGems needs one")
    flag_gems = gems()
    shape = (x.shape[-1],)
    if residual is None:
        return flag_gems.rms_norm(x, shape, weight, epsilon) if x.numel() else x.new_empty(x.shape)
    # FlagGems works in place, the operator does not.
    out, total = (t.clone(memory_format=torch.contiguous_format) for t in (x, residual))
    if x.numel():
        out, total = flag_gems.fused_add_rms_norm(out, total, shape, weight, epsilon)
    return out, total


def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> tuple[Tensor, Tensor] | Tensor:
    """See :func:`vllm_fl.catalog.rotary.rotary_embedding`."""
    if key is None:
        raise NotImplementedError("key: FlagGems rotates a query only together with a key")
    _refuse(cos.stride(-1) != 1 or sin.stride(-1) != 1, "cos, sin: FlagGems needs contiguous rows")
    flag_gems = gems()
    if query.shape[0] == 0:
        return query.new_empty(query.shape), key.new_empty(key.shape)
    rotated = 2 * cos.shape[-1]
    parts = flag_gems.apply_rotary_pos_emb(
        query[..., :rotated], key[..., :rotated], cos, sin, position_ids.contiguous(), not is_neox_style
    )
    if rotated == query.shape[-1]:
        return parts[0].contiguous(), parts[1].contiguous()
    return torch.cat((parts[0], query[..., rotated:]), -1), torch.cat((parts[1], key[..., rotated:]), -1)


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`vllm_fl.catalog.attention.reshape_and_cache`."""
    heads, size = key.shape[1:]
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        _refuse(rows.shape[2] != size, f"{name}: FlagGems needs keys and values of one size")
        _refuse(rows.dtype != cache.dtype, f"{name}: FlagGems does not convert {rows.dtype} to {cache.dtype}")
        _refuse(rows.stride()[1:] != (size, 1), f"{name}: FlagGems needs the heads of a token one after another")
        # [blocks, H, block_size, D]: FlagGems looks at the stride of a block only.
        token_first = cache.stride()[1:] == (size, heads * size, 1)
        _refuse(not token_first, f"{name}_cache: FlagGems needs blocks of contiguous [block_size, H, D]")
    _refuse(key_cache.stride(0) != value_cache.stride(0), "key_cache, value_cache: FlagGems needs equal strides")
    flag_gems = gems()
    if slot_mapping.numel() and heads:
        flag_gems.reshape_and_cache_flash(
            key, value, key_cache.transpose(1, 2), value_cache.transpose(1, 2), slot_mapping.contiguous(),
            "auto", None, None,
        )  # fmt: skip


def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`vllm_fl.catalog.attention.concat_and_cache_mla`."""
    tile = min(kv_c.shape[1], 512)
    _refuse(tile & (tile - 1) != 0, f"kv_c: latents of {tile} entries, FlagGems takes powers of two or more than 512")
    for name, rows in (("kv_c", kv_c), ("k_pe", k_pe)):
        _refuse(rows.dtype != kv_cache.dtype, f"{name}: FlagGems does not convert {rows.dtype} to {kv_cache.dtype}")
        _refuse(rows.stride(1) != 1, f"{name}: FlagGems needs contiguous rows")
    _refuse(kv_cache.stride(2) != 1, "kv_cache: FlagGems needs contiguous rows")
    flag_gems = gems()
    if slot_mapping.numel():
        one = kv_c.new_ones(1, dtype=torch.float32)  # the scale of a quantised cache
        flag_gems.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping.contiguous(), "auto", one)


def topk_softmax(
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    renormalize: bool = False,
    e_score_correction_bias: Tensor | None = None,
) -> None:
    """See :func:`vllm_fl.catalog.moe.topk_softmax`."""
    experts, topk = gating_output.shape[1], topk_weights.shape[1]
    _refuse(e_score_correction_bias is not None, "e_score_correction_bias: FlagGems takes none")
    _refuse(topk > _MOST_CHOICES, f"topk: {topk}, FlagGems takes at most {_MOST_CHOICES}")
    _refuse(experts > _MOST_EXPERTS, f"gating_output: {experts} experts, FlagGems takes at most {_MOST_EXPERTS}")
    outputs = (topk_weights, topk_indices, token_expert_indices)
    _refuse(not all(t.is_contiguous() for t in outputs), "FlagGems needs contiguous results")
    flag_gems = gems()
    if topk_weights.numel():
        flag_gems.topk_softmax(*outputs, gating_output.contiguous(), renormalize)


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
    _refuse(bias is None, "bias: FlagGems needs one, and scores groups by their two highest experts only")
    _refuse(topk & (topk - 1) != 0 or topk > _MOST_CHOICES, f"topk: {topk}, FlagGems takes 1, 2, 4, 8, 16 or 32")
    _refuse(n_group > _MOST_CHOICES, f"n_group: {n_group}, FlagGems takes at most {_MOST_CHOICES}")
    _refuse(scores.dtype != torch.float32, f"scores: FlagGems rounds biased scores to {scores.dtype}")
    _refuse(scoring_func not in (0, 1, 2), f"scoring_func: {scoring_func} is not one of 0, 1, 2")
    flag_gems = gems()
    if scoring_func:
        scores = scores.sigmoid() if scoring_func == 1 else scores.softmax(-1)
    if scores.shape[0] == 0:
        return scores.new_empty((0, topk)), scores.new_empty((0, topk), dtype=torch.int32)
    weights, ids = flag_gems.grouped_topk(
        scores.contiguous(), n_group, topk_group, topk, renormalize, routed_scaling_factor, bias, 0
    )
    return weights, ids


def moe_align_block_size(
    topk_ids: Tensor,
    block_size: int,
    num_experts: int,
    expert_map: Tensor | None = None,
    pad_sorted_ids: bool = False,
    ignore_invalid_experts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.moe.moe_align_block_size`. FlagGems compiles anew for each number of routes."""
    # With a map vLLM marks routes with -1, and FlagGems' kernels count that as the expert before the first.
    _refuse(expert_map is not None, "expert_map: FlagGems does not leave out experts of other ranks")
    _refuse(not topk_ids.numel(), "topk_ids: FlagGems' kernels cannot be launched without routes")
    flag_gems = gems()
    routes, experts, total = flag_gems.moe_align_block_size(
        topk_ids.contiguous(), block_size, num_experts, None, pad_sorted_ids
    )
    if topk_ids.numel() < num_experts:  # FlagGems does not bound them by one block a route
        length = min(topk_ids.numel() * block_size, routes.shape[0])
        routes, experts = routes[:length], experts[: -(-length // block_size)]
    return routes, experts, total


def moe_sum(input: Tensor, output: Tensor) -> None:
    """See :func:`vllm_fl.catalog.moe.moe_sum`."""
    _refuse(input.stride(-1) != 1 or output.stride(-1) != 1, "FlagGems needs a contiguous last dimension")
    flag_gems = gems()
    if output.numel():
        flag_gems.moe_sum(input, output)


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
    """See :func:`vllm_fl.catalog.moe.fused_experts`."""
    _refuse(hidden_states.dtype == torch.float32, "hidden_states: FlagGems multiplies float32 in TF32")
    _refuse(activation != "silu", f"activation: {activation!r}, FlagGems has 'silu' only")
    # An expert that lives elsewhere has id -1 after the map, and FlagGems' grouping counts it as another one.
    _refuse(expert_map is not None, "expert_map: FlagGems does not leave out experts of other ranks")
    _refuse(w1_bias is not None or w2_bias is not None, "w1_bias, w2_bias: not tried with FlagGems")
    _refuse(w1.stride(-1) != 1 or w2.stride(-1) != 1, "w1, w2: FlagGems needs a contiguous last dimension")
    flag_gems = gems()
    if hidden_states.numel() == 0:
        return hidden_states.new_empty(hidden_states.shape)
    return flag_gems.fused_experts_impl(
        hidden_states.contiguous(), w1, w2, topk_weights.contiguous(), topk_ids.contiguous(),
        inplace=False, activation=activation, apply_router_weight_on_input=apply_router_weight_on_input,
    )  # fmt: skip


def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    """See :func:`vllm_fl.catalog.sampling.apply_repetition_penalties`."""
    _refuse(not logits.is_contiguous(), "logits: FlagGems needs contiguous ones")
    _refuse(logits.numel() > _INT32, f"logits: {logits.numel()} entries, FlagGems counts them in 32 bits")
    flag_gems = gems()
    if logits.numel():
        flag_gems.apply_repetition_penalties(
            logits, prompt_mask.contiguous(), output_mask.contiguous(), repetition_penalties.contiguous()
        )


def per_token_group_quant_fp8(
    x: Tensor, group_size: int, eps: float = 1e-10, column_major_scales: bool = False, use_ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """See :func:`vllm_fl.catalog.quantization.per_token_group_quant_fp8`."""
    _refuse(use_ue8m0, "use_ue8m0: FlagGems rounds scales up by approximate logarithms")
    _refuse(x.numel() > _INT32, f"x: {x.numel()} entries, FlagGems counts them in 32 bits")
    flag_gems = gems()
    # FlagGems takes the second dimension for the last one.
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    column_major = column_major_scales and x.dim() == 2
    if not rows.numel():
        scales = x.new_empty((*x.shape[:-1], x.shape[-1] // group_size), dtype=torch.float32)
        return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales
    q, scales = flag_gems.per_token_group_quant_fp8(rows, group_size, eps, torch.float8_e4m3fn, column_major, False)
    return q.view(x.shape), scales if column_major else scales.view(*x.shape[:-1], -1)


def _refuse(condition: bool, reason: str) -> None:
    if condition:
        raise NotImplementedError(reason)
