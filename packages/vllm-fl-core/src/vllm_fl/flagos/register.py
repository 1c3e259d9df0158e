"""Registers the implementations of kind flagos; the modules that hold them are imported at their first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.types import Availability, BackendImplKind, BackendPriority, OpImpl
from vllm_fl.plugins import load_at_first_call

from . import availability
from .parameters import BUCKETS, PARAMETERS

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpRegistry

Probe = Callable[[], Availability]

TRITON = "flagos.triton"
FLAGGEMS = "flagos.flaggems"
#: Where both have an operator ours is tried first: its launches cost the host less, and it takes more layouts.
FLAGGEMS_PRIORITY = BackendPriority.DEFAULT - 10

#: Operator -> module of our kernel, below this package.
TRITON_OPERATORS = {
    "silu_and_mul": "kernels.activation",
    "gelu_and_mul": "kernels.activation",
    "rms_norm": "kernels.normalization",
    "gemma_rms_norm": "kernels.normalization",
    "rms_norm_gated": "kernels.normalization",
    "rotary_embedding": "kernels.rotary",
    "attention_backend": "backends",
    "reshape_and_cache": "kernels.cache",
    "compute_slot_mapping": "kernels.cache",
    "concat_and_cache_mla": "kernels.mla",
    "mla_attention": "kernels.mla",
    "topk_softmax": "kernels.moe_routing",
    "topk_sigmoid": "kernels.moe_routing",
    "grouped_topk": "kernels.moe_routing",
    "moe_align_block_size": "kernels.moe_align",
    "moe_sum": "kernels.moe_sum",
    "fused_experts": "kernels.fused_moe",
    "causal_conv1d_fn": "kernels.causal_conv1d",
    "causal_conv1d_update": "kernels.causal_conv1d",
    "fused_gdn_gating": "kernels.gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "kernels.gated_delta_rule",
    "chunk_gated_delta_rule": "kernels.gated_delta_chunk",
    "apply_repetition_penalties": "kernels.sampling",
    "apply_top_k_top_p": "kernels.sampling",
    "per_token_group_quant_fp8": "kernels.quantization",
    "scaled_mm": "kernels.quantization",
}

#: Operator -> whether FlagGems' one can be used. Those that are missing here FlagGems lacks, or has with another
#: meaning: docs/flaggems.md says which and why.
FLAGGEMS_OPERATORS: dict[str, Probe] = {
    "silu_and_mul": availability.flaggems_pointwise,
    "gelu_and_mul": availability.flaggems_pointwise,
    "rms_norm": availability.flaggems_raw,
    "rotary_embedding": availability.flaggems_raw,
    "reshape_and_cache": availability.flaggems_raw,
    "concat_and_cache_mla": availability.flaggems_raw,
    "topk_softmax": availability.flaggems_raw,
    "grouped_topk": availability.flaggems_raw,
    "moe_align_block_size": availability.flaggems_raw,
    "moe_sum": availability.flaggems_raw,
    "fused_experts": availability.flaggems_pointwise,
    "apply_repetition_penalties": availability.flaggems_raw,
    "per_token_group_quant_fp8": availability.flaggems_raw,
}

_FLOATING = frozenset({"float32", "float16", "bfloat16"})
#: Operator -> dtypes of its first tensor where these are not the floating ones.
_DTYPES: dict[str, frozenset[str] | None] = {
    "attention_backend": None,
    "compute_slot_mapping": None,
    "moe_align_block_size": None,
    "scaled_mm": frozenset({"float8_e4m3fn", "float8_e5m2", "int8"}),
}


def register(registry: OpRegistry) -> None:
    """Register our Triton kernels and the wrappers around FlagGems."""
    package = __package__ or "vllm_fl.flagos"
    for name, module in TRITON_OPERATORS.items():
        target = f"{package}.{module}:{name}"
        probe = availability.triton_attention if name == "attention_backend" else availability.triton_kernels
        registry.register_impl(_implementation(name, TRITON, target, probe, BackendPriority.DEFAULT))
    for name, probe in FLAGGEMS_OPERATORS.items():
        target = f"{package}.flaggems:{name}"
        registry.register_impl(_implementation(name, FLAGGEMS, target, probe, FLAGGEMS_PRIORITY))


def _implementation(name: str, impl_id: str, target: str, probe: Probe, priority: int) -> OpImpl:
    parameters = PARAMETERS.get(name, ()) if impl_id == TRITON else ()
    return OpImpl(
        op_name=name,
        impl_id=impl_id,
        kind=BackendImplKind.DEFAULT,
        fn=load_at_first_call(name, target, probe, parameters),
        priority=priority,
        supported_dtypes=_DTYPES.get(name, _FLOATING),
        supports=_no_bfloat16 if availability.is_interpreted() else None,
        opaque=name != "attention_backend",  # its result is no tensor
        parameters=parameters,
        buckets=BUCKETS.get(name, ()) if parameters else (),
    )


def _no_bfloat16(*args: Any, **kwargs: Any) -> bool | str:
    """In the interpreter only: it keeps bfloat16 as integers, and computes with those."""
    dtypes = [str(getattr(value, "dtype", "")) for value in (*args, *kwargs.values())]
    return "Triton's interpreter computes bfloat16 wrongly" if "torch.bfloat16" in dtypes else True
