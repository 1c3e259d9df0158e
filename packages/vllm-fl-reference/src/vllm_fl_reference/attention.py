"""vLLM attention backend on PyTorch operations: the reference distribution's implementation of `attention_backend`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from vllm_fl.dispatch import bind
from vllm_fl.integration.attention import CACHE_DTYPES, OutOfTreeAttentionBackend

from .attention_plan import AttentionStep
from .paged_attention import AttentionOptions, CacheRows, packed_attention, paged_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

_ENCODER_TYPES = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_reshape_and_cache = bind("reshape_and_cache")


@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """What the layers of one KV cache group share in one step.

    Args:
        step: the batch, with its padded batches once the first layer has run.
        slot_mapping: [at least the step's tokens], cache slot of each token.
    """

    step: AttentionStep
    slot_mapping: Tensor


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Brings the lengths to the host, once a step."""

    #: decodes come first in the batch, so that their tokens are a slice
    reorder_batch_threshold: int | None = 1

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._row_bytes = 2 * kv_cache_spec.num_kv_heads * kv_cache_spec.head_size * kv_cache_spec.dtype.itemsize

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedAttentionMetadata:
        """See the base class.

        Raises:
            NotImplementedError: the batch asks for attention that is neither causal nor full in both directions.
        """
        common = common_attn_metadata
        _refuse_mixed_masks(common)
        requests = common.num_reqs
        causal = common.causal
        step = AttentionStep(
            query_start=common.query_start_loc_cpu[: requests + 1].tolist(),
            seq_lens=common.seq_lens[:requests].tolist(),
            block_table=common.block_table_tensor,
            device=self.device,
            causal=causal.tolist() if isinstance(causal, Tensor) else bool(causal),
            row_bytes=self._row_bytes,
        )
        return PagedAttentionMetadata(step, common.slot_mapping)


def _refuse_mixed_masks(common: CommonAttentionMetadata) -> None:
    ranges = getattr(common, "mm_req_doc_ranges", None)
    if ranges and any(ranges.values()):
        raise NotImplementedError(
            "reference attention has no bidirectional ranges inside a causal sequence (prefix LM)"
        )
    if getattr(common, "rswa_prefix_lens", None) is not None:
        raise NotImplementedError("reference attention has no reference sliding window (R-SWA)")


class PagedAttentionImpl(AttentionImpl[PagedAttentionMetadata]):
    """Attention of one layer. Arguments as in the base class; `sinks` is [num_heads], or None.

    Raises:
        NotImplementedError: cross-attention, an unknown cache dtype, or an argument that this backend does not know.
    """

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **extra: Any,
    ) -> None:
        if attn_type == AttentionType.ENCODER_DECODER:
            raise NotImplementedError(
                "reference attention has no cross-attention (encoder-decoder models); choose another attention backend"
            )
        if kv_cache_dtype not in CACHE_DTYPES:
            raise NotImplementedError(
                f"reference attention has no KV cache of dtype {kv_cache_dtype!r}; "
                f"--kv-cache-dtype may be {', '.join(CACHE_DTYPES)}"
            )
        unknown = sorted(name for name, value in extra.items() if value not in (None, False, -1))
        if unknown:
            raise NotImplementedError(f"reference attention does not know the layer's arguments {', '.join(unknown)}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._options = AttentionOptions(self.scale, sliding_window, logits_soft_cap or None, sinks, slopes)
        self._rows: tuple[Tensor, CacheRows] | None = None

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the step's keys [T, Hkv, D] and values into their slots; encoders and profiling have no cache."""
        if kv_cache.numel() == 0 or self.attn_type in _ENCODER_TYPES:
            return
        head_size = self.head_size
        _reshape_and_cache.fn(key, value, kv_cache[..., :head_size], kv_cache[..., head_size:], slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's tokens.

        Args:
            layer: not used.
            query: [T or more, num_heads, head_size].
            key: [T or more, num_kv_heads, head_size]; read by encoders only, decoders have it in the cache.
            value: as `key`.
            kv_cache: [blocks, num_kv_heads, block size, 2 * head_size], any strides.
            attn_metadata: None in a run without requests (profiling): the output is zeros.
            output: as `query`; written whole, rows past T become zeros.
            output_scale: must be None.
            output_block_scale: must be None.

        Returns:
            `output`.

        Raises:
            NotImplementedError: the output is to be quantised.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("reference attention does not quantise its output")
        if attn_metadata is None:
            return output.fill_(0)
        step = attn_metadata.step
        if self.attn_type in _ENCODER_TYPES:
            packed_attention(query, key, value, output, step, self._options)
        else:
            paged_attention(query, self._cache_rows(kv_cache), output, step, self._options)
        if step.num_tokens < output.shape[0]:
            output[step.num_tokens :].zero_()
        return output

    def _cache_rows(self, kv_cache: Tensor) -> CacheRows:
        if self._rows is None or self._rows[0] is not kv_cache:
            self._rows = (kv_cache, CacheRows(kv_cache))
        return self._rows[1]


class PagedAttentionBackend(OutOfTreeAttentionBackend):
    """Paged attention in PyTorch: prefill, chunked prefill, decode and mixtures of them, causal or not."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        """The class of a layer's attention."""
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PagedAttentionMetadataBuilder]:
        """The class that makes a step's metadata."""
        return PagedAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any; 16 is named because vLLM gives sliding window layers the smallest size that is named."""
        return [16, MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> None:
        """Any memory order (vLLM from 0.30, whose own choice is the fast one)."""
        return

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """All but cross-attention."""
        return attn_type == AttentionType.DECODER or attn_type in _ENCODER_TYPES
