"""vLLM's attention backend for multi-head latent attention, on the operators of the catalogue.

vLLM's layer absorbs the projections into the query for decodes, and expands latents to keys and values for prefills.
Here all tokens take the first way, `mla_attention`, so that chunks of prompts, cached prefixes and mixed batches need
nothing else: for vLLM every token of a batch is a decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, MLAAttentionImpl, MultipleOf
from vllm.v1.attention.backends.mla.prefill import (
    MLAPrefillBackend,
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_fl.dispatch import bind

from .attention import CACHE_DTYPES, OutOfTreeAttentionBackend

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = ["MLABackend", "MLAImpl", "MLAMetadata", "MLAMetadataBuilder"]

_concat_and_cache_mla = bind("concat_and_cache_mla")
_mla_attention = bind("mla_attention")


# vLLM asks for a prefill backend whatever the attention is, and takes this one where it has nothing better to ask for.
@register_mla_prefill_backend(MLAPrefillBackendEnum.FLASH_ATTN)
class NoPrefillBackend(MLAPrefillBackend):
    """Fills vLLM's place for a prefill kernel; never called, since no token counts as one of a prefill."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        """The place that it fills."""
        return "FLASH_ATTN"

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """See the class."""
        raise NotImplementedError("latent attention has no prefill apart from mla_attention")

    run_prefill_context_chunk = run_prefill_new_tokens


@dataclass
class MLAMetadata(AttentionMetadata):
    """What all layers share in one step: arguments of `mla_attention`, and what vLLM's layer reads.

    Args:
        query_start_loc: [R + 1], int32.
        seq_lens: [R], int32.
        block_table: [R, blocks], int32.
        max_query_len: no query is longer.
        single_tokens: the first so many requests have one token each.
        num_actual_tokens: rows of the step, padding included.
        num_decodes: requests whose tokens vLLM hands to `MLAImpl.forward_mqa`: all.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    single_tokens: int
    num_actual_tokens: int
    num_decodes: int
    num_prefills: int = 0
    prefill: None = None

    @property
    def num_decode_tokens(self) -> int:
        """All."""
        return self.num_actual_tokens

    @property
    def decode(self) -> MLAMetadata:
        """vLLM wants to see that there is one."""
        return self


class MLAMetadataBuilder(AttentionMetadataBuilder[MLAMetadata]):
    """Takes the batch as it is; nothing waits for the device."""

    #: decodes come first in the batch
    reorder_batch_threshold: int | None = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # abstract in the base class
        super().__init__(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:
        """See the base class.

        Raises:
            NotImplementedError: the batch asks for attention that is not causal.
        """
        common = common_attn_metadata
        if common.causal is not True:
            raise NotImplementedError("latent attention is causal; this model asks for another mask")
        requests = common.num_reqs
        # Requests that pad a batch count as decodes, but only those that have a row in the query may be written.
        single_tokens = min(split_decodes_and_prefills(common)[0], common.num_actual_tokens)
        return MLAMetadata(
            query_start_loc=common.query_start_loc[: requests + 1],
            seq_lens=common.seq_lens[:requests],
            block_table=common.block_table_tensor,
            max_query_len=common.max_query_len,
            single_tokens=single_tokens,
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=requests,
        )


class MLAImpl(MLAAttentionImpl[MLAMetadata]):
    """Latent attention of one layer. Arguments as in the base class; the projections are the caller's.

    Raises:
        NotImplementedError: a quantised cache, or one of the arguments in REFUSED.
    """

    #: What changes the scores, or which layer's cache is read.
    REFUSED = ("alibi_slopes", "kv_sharing_target_layer_name", "logits_soft_cap", "sliding_window")

    supports_dcp = False
    supports_pcp = False

    def __init__(
        self, *, num_heads: int, head_size: int, scale: float, kv_lora_rank: int, kv_cache_dtype: str, **others: Any
    ) -> None:
        refused = [name for name in self.REFUSED if others.get(name)]
        if refused:
            raise NotImplementedError(f"latent attention does not know the layer's arguments {', '.join(refused)}")
        if kv_cache_dtype not in CACHE_DTYPES:
            raise NotImplementedError(
                f"latent attention has no KV cache of dtype {kv_cache_dtype!r}; "
                f"--kv-cache-dtype may be {', '.join(CACHE_DTYPES)}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_lora_rank = kv_lora_rank

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *quantization: Any
    ) -> None:
        """Write the step's latents [T, L] and rotated keys [T, 1, C - L] into their slots; profiling has no cache."""
        if kv_cache.numel():
            _concat_and_cache_mla.fn(kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: MLAMetadata, layer: Any
    ) -> tuple[Tensor, None]:
        """Attention of the step's tokens to latents.

        Args:
            q: [T, num_heads, C], projections absorbed; or its two parts, [T, num_heads, L] and [T, num_heads, C - L].
            kv_c_and_k_pe_cache: [blocks, block size, C], any strides.
            attn_metadata: of the step.
            layer: not used.

        Returns:
            [T, num_heads, L], and None for the logarithms of the sums, which only context parallelism needs.
        """
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        step = attn_metadata
        result = _mla_attention.fn(
            query, kv_c_and_k_pe_cache, step.block_table, step.seq_lens, step.query_start_loc,
            self.kv_lora_rank, self.scale, step.max_query_len, step.single_tokens,
        )  # fmt: skip
        return result, None


class MLABackend(OutOfTreeAttentionBackend):
    """Latent attention through dispatch: prefill, chunked prefill, decode and mixtures of them."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def is_mla(cls) -> bool:
        """Yes."""
        return True

    @staticmethod
    def get_impl_cls() -> type[MLAImpl]:
        """The class of a layer's attention."""
        return MLAImpl

    @staticmethod
    def get_builder_cls() -> type[MLAMetadataBuilder]:
        """The class that makes a step's metadata."""
        return MLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any."""
        return [MultipleOf(1)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Shape of one layer's cache (vLLM before 0.30; later versions have this shape built in)."""
        return (num_blocks, block_size, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Memory order [blocks, (layers,) tokens, head_size] (vLLM before 0.30)."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)
