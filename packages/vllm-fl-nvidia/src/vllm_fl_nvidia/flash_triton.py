"""Attention for vLLM in which FlashAttention serves steps with prompts and this project's Triton kernel pure decodes.

vLLM's FlashAttention backend with another forward for steps in which every request has one token. Those need none of
FlashAttention's schedule, which takes a launch a step. Whatever the Triton kernel does not compute stays with
FlashAttention: context parallelism, a shared prefix taken by itself (cascade), and all that
:class:`vllm_fl.flagos.attention.PagedKernelMixin` leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from vllm_fl.flagos.attention import PagedKernelMixin

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class FlashTritonMetadata(FlashAttentionMetadata):
    """vLLM's metadata of a step; `num_decodes` is the number of its requests if all are decodes, else 0."""

    num_decodes: int = 0


class FlashTritonMetadataBuilder(FlashAttentionMetadataBuilder):
    """vLLM's builder; finds the steps for the Triton kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        mode = self.vllm_config.compilation_config.cudagraph_mode
        # A graph for mixed batches may be captured with one token a request and be replayed with others.
        self._splits_steps = self.dcp_world_size == 1 and (mode is None or mode.mixed_mode() != CUDAGraphMode.FULL)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashTritonMetadata:
        """See the base class."""
        decodes = 0
        if self._splits_steps and common_attn_metadata.max_query_len == 1 and not common_prefix_len:
            # Requests that pad a batch count, but only those that have a row in the query may be written.
            decodes = min(common_attn_metadata.num_reqs, common_attn_metadata.num_actual_tokens)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build or decodes > 0)
        return FlashTritonMetadata(**vars(metadata), num_decodes=decodes)


class FlashTritonImpl(PagedKernelMixin, FlashAttentionImpl):
    """Attention of one layer. Arguments as in the base class."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashTritonMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's tokens; see the base class."""
        if attn_metadata and attn_metadata.num_decodes and self.serves(attn_metadata, output_scale, output_block_scale):
            return self.attend(query, kv_cache, attn_metadata, output)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )


class FlashTritonBackend(FlashAttentionBackend):
    """vLLM's FlashAttention backend, under the same name, with another kernel for decodes."""

    @staticmethod
    def get_impl_cls() -> type[FlashTritonImpl]:
        """The class of a layer's attention."""
        return FlashTritonImpl

    @staticmethod
    def get_builder_cls() -> type[FlashTritonMetadataBuilder]:
        """The class that makes a step's metadata."""
        return FlashTritonMetadataBuilder
