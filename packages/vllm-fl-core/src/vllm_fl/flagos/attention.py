"""Attention for vLLM on this project's paged kernel: vLLM's Triton backend with another forward.

Backend, metadata and layer are thin subclasses of vLLM's own. What the kernel does not compute (ALiBi, quantised
caches, cross-attention, bidirectional ranges, other masks, batch invariance) stays with vLLM's kernels, call by call.

The kernel has a path for decodes and one for longer queries. The metadata says how many requests, the first ones of the
batch, are decodes. Graphs that are captured for mixed batches (cudagraph mode FULL) take the second path for all, since
the mix is not known at capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_fl.dispatch import bind

from .kernels.paged_attention import Scratch, encoder_attention, paged_attention

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

_CACHE_DTYPES = ("auto", "float16", "bfloat16")
#: Fields of vLLM's metadata: a token sees others than those before it.
_OTHER_MASKS = ("mm_prefix_range_tensor", "mm_prefix_query_range_tensor", "rswa_prefix_lens")
_reshape_and_cache = bind("reshape_and_cache")


@dataclass
class FlagosAttentionMetadata(TritonAttentionMetadata):
    """vLLM's metadata of a step, and how many of its first requests the decode path takes."""

    num_decodes: int = 0


class FlagosAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """vLLM's builder; counts the decodes, which vLLM's runners put first."""

    reorder_batch_threshold: int | None = 1

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlagosAttentionMetadata:
        """See the base class."""
        metadata: FlagosAttentionMetadata = super().build_for_cudagraph_capture(common_attn_metadata)
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL:
            metadata.num_decodes = 0
        return metadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlagosAttentionMetadata:
        """See the base class."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        # Requests that pad a batch count as decodes, but only those that have a row in the query may be written.
        decodes = min(split_decodes_and_prefills(common_attn_metadata)[0], metadata.num_actual_tokens)
        return FlagosAttentionMetadata(**vars(metadata), num_decodes=decodes)


class PagedKernelMixin:
    """This project's kernel in a layer's attention; put it before a class of vLLM, in whose place it serves a call.

    Both must have one cache layout, [blocks, Hkv, block size, 2 * D], keys before values.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own: Any = self  # the attributes are those of vLLM's class
        self._window = own.sliding_window[0] + 1  # vLLM's does not count the token itself; -1 is none
        self._soft_cap = float(own.logits_soft_cap or 0.0)
        # The tile and the number of splits, and so the order of sums, depend on the batch.
        self._is_simple = own.alibi_slopes is None and own.head_size <= 256 and not envs.VLLM_BATCH_INVARIANT
        self._is_common = (
            self._is_simple
            and own.attn_type == AttentionType.DECODER
            and getattr(own, "chunk_lookback", -1) < 0
            and own.kv_cache_dtype in _CACHE_DTYPES
        )
        self._caches: tuple[Tensor, Tensor, Tensor] | None = None

    def serves(self, metadata: Any, *quantizes: Tensor | None) -> bool:
        """Whether the kernel computes a call of this layer; `quantizes`: scales for a quantised result."""
        if metadata is None or not self._is_common or quantizes != (None, None):
            return False
        return metadata.causal is True and all(getattr(metadata, name, None) is None for name in _OTHER_MASKS)

    def attend(
        self, query: Tensor, kv_cache: Tensor, metadata: Any, output: Tensor, scratch: Scratch | None = None
    ) -> Tensor:
        """Attention of the step's tokens [T, H, D], written to `output` and returned."""
        own: Any = self
        key_cache, value_cache = self._split(kv_cache)
        paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            output,
            own.scale,
            metadata.max_query_len,
            metadata.num_decodes,
            self._window,
            self._soft_cap,
            own.sinks,
            scratch,
        )
        return output

    def _split(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The halves of the cache [blocks, Hkv, block size, 2 * D]; views cost host time in every layer."""
        if self._caches is None or self._caches[0] is not kv_cache:
            own: Any = self
            self._caches = (kv_cache, *kv_cache.split(own.head_size, -1))
        return self._caches[1:]


class FlagosAttentionImpl(PagedKernelMixin, TritonAttentionImpl):
    """Attention of one layer. Arguments as in the base class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_encoder = (
            self._is_simple
            and self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
            and len(set(self.sliding_window)) == 1  # as far to both sides
            and self.sinks is None
        )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's keys [T, Hkv, D] and values through the operator ``reshape_and_cache``."""
        if not self._is_common:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        key_cache, value_cache = self._split(kv_cache)
        _reshape_and_cache.fn(key, value, key_cache, value_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlagosAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's tokens; see the base class."""
        quantizes = (output_scale, output_block_scale) != (None, None)
        if self._is_encoder and attn_metadata is not None and not quantizes:
            encoder_attention(
                query,
                key,
                value,
                attn_metadata.query_start_loc,
                output,
                self.scale,
                attn_metadata.max_query_len,
                self._window,
                self._soft_cap,
            )
            return output
        if attn_metadata is None or not self.serves(attn_metadata, output_scale, output_block_scale):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        # vLLM keeps these for its own splits, one set for each stream that may run.
        scratch = Scratch(
            attn_metadata.softmax_segm_output, attn_metadata.softmax_segm_max, attn_metadata.softmax_segm_expsum
        )
        return self.attend(query, kv_cache, attn_metadata, output, scratch)


class FlagosAttentionBackend(TritonAttentionBackend):
    """vLLM's Triton backend, under the same name, with this project's kernel."""

    @staticmethod
    def get_impl_cls() -> type[FlagosAttentionImpl]:
        """The class of a layer's attention."""
        return FlagosAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlagosAttentionMetadataBuilder]:
        """The class that makes a step's metadata."""
        return FlagosAttentionMetadataBuilder
