"""PyTorch implementations of the whole catalogue, under the operators' names. Importing this imports torch.

Sums are accumulated in float32, in float64 for float64 inputs. Everything runs on any device that PyTorch has, takes
any strides, and gives contiguous results. torch.compile traces all of it without a graph break and for any number of
tokens, but for the chunked delta rule and latent attention, which read the sequence lengths on the host, and for
experts whose rows are no multiple of 16 bytes, which are computed one by one.
"""

from __future__ import annotations

from .activation import gelu_and_mul, silu_and_mul
from .attention import (
    attention_backend,
    compute_slot_mapping,
    concat_and_cache_mla,
    mla_attention,
    reshape_and_cache,
)
from .conv import causal_conv1d_fn, causal_conv1d_update
from .experts import fused_experts
from .gdn import chunk_gated_delta_rule, fused_gdn_gating, fused_recurrent_gated_delta_rule
from .moe import grouped_topk, moe_align_block_size, moe_sum, topk_sigmoid, topk_softmax
from .normalization import gemma_rms_norm, rms_norm, rms_norm_gated
from .quantization import per_token_group_quant_fp8, scaled_mm
from .rotary import rotary_embedding
from .sampling import apply_repetition_penalties, apply_top_k_top_p

__all__ = [
    "apply_repetition_penalties",
    "apply_top_k_top_p",
    "attention_backend",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "compute_slot_mapping",
    "concat_and_cache_mla",
    "fused_experts",
    "fused_gdn_gating",
    "fused_recurrent_gated_delta_rule",
    "gelu_and_mul",
    "gemma_rms_norm",
    "grouped_topk",
    "mla_attention",
    "moe_align_block_size",
    "moe_sum",
    "per_token_group_quant_fp8",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_gated",
    "rotary_embedding",
    "scaled_mm",
    "silu_and_mul",
    "topk_sigmoid",
    "topk_softmax",
]
