"""Who provides a device kernel, judged by its name, and which operator of the catalogue it computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from .kernel_names import KernelNames


class Provider(str, Enum):
    """Where a kernel comes from; the values are what reports show."""

    OURS = "vllm-fl Triton"
    FLAGGEMS = "FlagGems"
    INDUCTOR = "inductor Triton"
    VLLM_TRITON = "vLLM Triton"
    VLLM_C = "vLLM C++"
    FLASH_ATTENTION = "FlashAttention"
    FLASHINFER = "FlashInfer"
    BLAS = "cuBLAS/cuDNN"
    PYTORCH = "PyTorch"
    COMMUNICATION = "communication"
    COPIES = "copies"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value


#: The providers whose kernels are written in Triton.
TRITON = frozenset({Provider.OURS, Provider.FLAGGEMS, Provider.INDUCTOR, Provider.VLLM_TRITON})

#: In this order; the first that is found in the name decides. vLLM's kernels have PyTorch's types in their names.
_PATTERNS: tuple[tuple[re.Pattern[str], Provider], ...] = tuple(
    (re.compile(pattern), provider)
    for pattern, provider in (
        (r"^Mem(cpy|set)\b", Provider.COPIES),
        (r"^(void )?(nccl|rccl|mscclpp|nvshmem|flagcx)|cross_device_reduce|multimem_all_", Provider.COMMUNICATION),
        (r"flashinfer|^BatchPrefillWith|^BatchDecodeWith|^fmhaSm\d", Provider.FLASHINFER),
        (r"\bflash::|\bflash_(fwd|bwd)_|FlashAttn(Fwd|Bwd)|\bflash_attn", Provider.FLASH_ATTENTION),
        (r"\bvllm(::|_)|\bmarlin|\bMarlin|\bmachete::", Provider.VLLM_C),
        (r"\bat::|\bat_cuda_detail\b|\bc10::|\btorch::", Provider.PYTORCH),
        (r"\bdeep_gemm::", Provider.OTHER),
        (
            r"cublas|cudnn|^nvjet|cutlass|_xmma_|gemv|\bgemm|_gemm_|[hsdi\d]gemm|splitKreduce|^Cijk_|\bdot_kernel<"
            r"|reduce_1Block_kernel|implicit_convolve|winograd",
            Provider.BLAS,
        ),
    )
)
_IDENTIFIER = re.compile(r"\w+")
_GENERATED_BY_FLAGGEMS = re.compile(r"\w+_kernel_rank_\d+")
_GENERATED_BY_INDUCTOR = re.compile(r"triton_(poi|red|per|tem|for|unk|mm|bmm|spl|split_scan|mix)_?\w*")
#: What a matrix product of a linear layer is called. Experts' products belong to the operator fused_experts.
_MATRIX_PRODUCT = re.compile(r"^triton_(tem|mm|bmm)|^(addmm|baddbmm|bmm|gemv|linear|matmul|mm|mv)_kernel|^_?(mm|gemm)_")

#: Names of kernels to the operator that they compute, for kernels that no range claims (those of a graph).
_OPERATORS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), operator)
    for pattern, operator in (
        (r"moe_align|_align_small|^_(count|place)$|count_and_sort_expert", "moe_align_block_size"),
        (r"moe_sum", "moe_sum"),
        (r"fused_moe|moe_wna16|grouped_gemm", "fused_experts"),
        (r"grouped_topk", "grouped_topk"),
        (r"topk_?gating_?sigmoid|topk_sigmoid", "topk_sigmoid"),
        (r"topk_?gating|moe_?softmax|topk_softmax|moe_?topk", "topk_softmax"),
        (r"causal_conv1d_update", "causal_conv1d_update"),
        (r"causal_conv1d", "causal_conv1d_fn"),
        (r"fused_gdn_gating", "fused_gdn_gating"),
        (r"fused_recurrent|fused_sigmoid_gating_delta", "fused_recurrent_gated_delta_rule"),
        (
            r"chunk_(gated|scaled|local|fwd)|solve_tril|recompute_w_u|merge_\d+x\d+_to_\d+x\d+_inverse",
            "chunk_gated_delta_rule",
        ),
        (r"gelu.*and_mul|and_mul.*gelu", "gelu_and_mul"),
        (r"(silu|act|activate)_and_mul", "silu_and_mul"),
        (r"rms_norm_gated|layer_norm_fwd", "rms_norm_gated"),
        (r"gemma_?rms_?norm", "gemma_rms_norm"),
        (r"rms_?norm", "rms_norm"),
        (r"rotary|rope", "rotary_embedding"),
        (r"reshape_and_cache", "reshape_and_cache"),
        (r"concat_and_cache_mla", "concat_and_cache_mla"),
        (r"_mla_attend", "mla_attention"),
        (r"slot_mapping", "compute_slot_mapping"),
        (r"repetition_penalt", "apply_repetition_penalties"),
        (r"top_?k_?top_?p", "apply_top_k_top_p"),
        (r"group_quant|quantize_groups", "per_token_group_quant_fp8"),
        (r"scaled_mm", "scaled_mm"),
        (
            r"\bflash(_|::|attn)|paged_?(attention|kvcache)|unified_attention|fmha|reduce_segments|merge_attn",
            "attention_backend",
        ),
    )
)


class Verdict(NamedTuple):
    """A kernel's provider; `others` have a kernel of the same name, so that the name alone does not tell."""

    provider: Provider
    others: tuple[Provider, ...] = ()


def provider_of(name: str, names: KernelNames, is_copy: bool = False) -> Verdict:
    """Who provides the kernel called `name` (demangled, as the profiler gives it)."""
    if is_copy:
        return Verdict(Provider.COPIES)
    if _IDENTIFIER.fullmatch(name):
        claims = list(dict.fromkeys(_claims(name, names)))
        if claims:
            return Verdict(claims[0], tuple(claims[1:]))
    for pattern, provider in _PATTERNS:
        if pattern.search(name):
            return Verdict(provider)
    return Verdict(Provider.OTHER)


def _claims(name: str, names: KernelNames) -> Iterator[Provider]:
    """The providers that have a Triton kernel of this name, the likeliest first."""
    # inductor numbers the copies of a kernel that it found in the graph
    candidates = {name, re.sub(r"_\d+$", "", name)}
    if candidates & names.ours:
        yield Provider.OURS
    if candidates & names.vllm:
        yield Provider.VLLM_TRITON
    if candidates & names.flaggems or _GENERATED_BY_FLAGGEMS.fullmatch(name):
        yield Provider.FLAGGEMS
    if _GENERATED_BY_INDUCTOR.fullmatch(name):
        yield Provider.INDUCTOR


def is_matrix_product(name: str, provider: Provider) -> bool:
    """Whether the kernel is a matrix product outside of the catalogue's operators: that of a linear layer."""
    return provider is Provider.BLAS or (provider in TRITON and bool(_MATRIX_PRODUCT.match(name)))


def operator_of(name: str) -> str | None:
    """The operator that a kernel of this name computes; None if the name does not say."""
    return next((operator for pattern, operator in _OPERATORS if pattern.search(name)), None)
