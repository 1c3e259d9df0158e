"""vLLM's compiled kernels, and its Triton kernels for experts, under the catalogue's signatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_fl.catalog import CATALOG
from vllm_fl.dispatch.types import Availability, BackendImplKind, BackendPriority, OpImpl
from vllm_fl.flagos.availability import triton_attention
from vllm_fl.plugins import load_at_first_call
from vllm_fl_nvidia import kernels

IMPL_ID = "vendor.nvidia"
#: FlashAttention for steps with prompts, this project's Triton kernel for decodes.
FLASH_TRITON_ID = "vendor.nvidia.flash_triton"

_HALF = frozenset({"float16", "bfloat16"})
_FLOATING = frozenset({"float32", *_HALF})


@dataclass(frozen=True)
class _Kernel:
    """Where an implementation is, and when it can serve."""

    module: str
    available: Callable[[], Availability] = kernels.compiled
    dtypes: frozenset[str] | None = _FLOATING
    min_arch: int | None = None


OPERATORS = {
    "silu_and_mul": _Kernel("activation"),
    "gelu_and_mul": _Kernel("activation"),
    "rms_norm": _Kernel("normalization"),
    "rotary_embedding": _Kernel("rotary"),
    "attention_backend": _Kernel("attention", dtypes=None),
    "reshape_and_cache": _Kernel("attention"),
    "topk_softmax": _Kernel("moe", kernels.compiled_moe),
    "topk_sigmoid": _Kernel("moe", kernels.compiled_moe),
    "grouped_topk": _Kernel("moe", kernels.compiled_moe),
    "moe_align_block_size": _Kernel("moe", kernels.compiled_moe, dtypes=None),
    "moe_sum": _Kernel("moe", kernels.compiled_moe),
    "fused_experts": _Kernel("experts", kernels.compiled_moe, dtypes=_HALF),  # it multiplies float32 in TF32
    "apply_repetition_penalties": _Kernel("sampling"),
    "per_token_group_quant_fp8": _Kernel("quantization", dtypes=_FLOATING, min_arch=89),
    "scaled_mm": _Kernel("quantization", dtypes=frozenset({"float8_e4m3fn", "int8"}), min_arch=89),
}

#: Operators that vLLM computes inside a layer of its own, with buffers and fusions that the catalogue's signature does
#: not have. Choosing the vendor for all operators of such a layer leaves it vLLM's; called directly, each refuses.
IN_LAYERS = (
    "gemma_rms_norm",
    "rms_norm_gated",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "fused_gdn_gating",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "apply_top_k_top_p",  # in vLLM's sampler
)
ONLY_IN_LAYERS = "vLLM has it inside its own layer only"


def implementations() -> list[OpImpl]:
    """One implementation for each operator that vLLM has a kernel for; modules are imported at the first call."""
    callable_ones = [
        OpImpl(
            op_name=name,
            impl_id=IMPL_ID,
            kind=BackendImplKind.VENDOR,
            vendor="nvidia",
            fn=load_at_first_call(name, f"{__name__}.{kernel.module}:{name}", kernel.available),
            priority=BackendPriority.VENDOR,
            supported_dtypes=kernel.dtypes,
            min_arch=kernel.min_arch,
            opaque=name != "attention_backend",  # a path, not a tensor
        )
        for name, kernel in OPERATORS.items()
    ]
    return [*callable_ones, _flash_triton(), *(_in_layer(name) for name in IN_LAYERS)]


def _flash_triton() -> OpImpl:
    name = "attention_backend"
    return OpImpl(
        op_name=name,
        impl_id=FLASH_TRITON_ID,
        kind=BackendImplKind.VENDOR,
        vendor="nvidia",
        fn=load_at_first_call(name, f"{__name__}.attention:flash_triton_backend", _compiled_and_triton),
        priority=BackendPriority.VENDOR - 1,
        supported_dtypes=None,
    )


def _compiled_and_triton() -> Availability:
    compiled = kernels.compiled()
    return triton_attention() if compiled else compiled


def _in_layer(name: str) -> OpImpl:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(ONLY_IN_LAYERS)

    refuse.__signature__ = CATALOG[name].signature  # type: ignore[attr-defined]
    refuse._is_available = kernels.compiled  # type: ignore[attr-defined]
    return OpImpl(
        op_name=name,
        impl_id=IMPL_ID,
        kind=BackendImplKind.VENDOR,
        vendor="nvidia",
        fn=refuse,
        priority=BackendPriority.VENDOR,
        supports=lambda *args, **kwargs: ONLY_IN_LAYERS,
    )
