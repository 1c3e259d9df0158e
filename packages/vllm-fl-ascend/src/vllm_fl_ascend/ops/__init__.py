"""Operators of the catalogue on operators of torch_npu. Importing this imports torch, not torch_npu.

Each raises NotImplementedError, before it writes anything, for what the documentation of torch_npu's operator does
not allow; dispatch then asks the next implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_fl_ascend import attention_selection

from . import activation, atb, cache, moe, normalization, rotary, sampling

__all__ = ["OPERATORS", "Operator"]

FLOATING = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class Operator:
    """An implementation to be registered.

    Args:
        fn: bears the operator's name.
        impl_id: unique among the operator's implementations.
        rank: 0 for what is tried first among ours, more for what comes after.
        dtypes: of the first tensor; None where it does not matter.
        opaque: torch.compile does not trace it.
    """

    fn: Callable[..., Any]
    impl_id: str = "vendor.ascend"
    rank: int = 0
    dtypes: frozenset[str] | None = FLOATING
    opaque: bool = True


OPERATORS = (
    Operator(activation.silu_and_mul),
    Operator(activation.gelu_and_mul),
    Operator(normalization.rms_norm),
    Operator(normalization.gemma_rms_norm),
    Operator(rotary.rotary_embedding),
    Operator(cache.reshape_and_cache),
    Operator(attention_selection.attention_backend, dtypes=None, opaque=False),
    # The outputs come first; what is computed in is float32.
    Operator(moe.topk_softmax, dtypes=frozenset({"float32"})),
    Operator(moe.topk_sigmoid, dtypes=frozenset({"float32"})),
    Operator(moe.grouped_topk),
    Operator(moe.fused_experts),
    Operator(sampling.apply_top_k_top_p, dtypes=frozenset({"float32"})),
    Operator(atb.rotary_embedding, impl_id="vendor.ascend.atb", rank=10),
    Operator(atb.reshape_and_cache, impl_id="vendor.ascend.atb", rank=10),
)
