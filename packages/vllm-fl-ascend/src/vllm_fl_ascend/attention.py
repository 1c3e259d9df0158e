"""vLLM attention backend on torch_npu's fused attention: the implementation of the operator `attention_backend`."""

from __future__ import annotations

from collections.abc import Sequence
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

from .fused_attention import BLOCK_SIZE, MAX_ROW, Pool, Step, attend, make_pool

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import AttentionSpec

_DTYPES = (torch.float16, torch.bfloat16)
#: Largest head, and most query heads for one head of keys.
MAX_HEAD_SIZE = 512
MAX_GROUP = 64
#: What to do where this attention does not fit.
REMEDY = 'VLLM_FL_PER_OP="attention_backend=reference" takes the slower attention in PyTorch'

_reshape_and_cache = bind("reshape_and_cache")


@dataclass
class AscendAttentionMetadata(AttentionMetadata):
    """What the layers of one KV cache group share in one step."""

    step: Step


class AscendAttentionMetadataBuilder(AttentionMetadataBuilder[AscendAttentionMetadata]):
    """Brings the lengths to the host, once a step: torch_npu's operator takes them as lists."""

    #: decodes come first in the batch, and go into one call
    reorder_batch_threshold: int | None = 1

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.dtype not in _DTYPES:
            raise NotImplementedError(
                f"the Ascend attention computes in float16 and bfloat16, not in {kv_cache_spec.dtype}: set --dtype;"
                f" {REMEDY}"
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AscendAttentionMetadata:
        """See the base class.

        Raises:
            NotImplementedError: the batch asks for attention that is neither causal nor full in both directions.
        """
        common = common_attn_metadata
        requests = common.num_reqs
        causal = common.causal
        if isinstance(causal, Tensor):
            flags = set(causal[:requests].tolist())
            if len(flags) > 1:
                raise NotImplementedError("the Ascend attention has one mask for all requests of a step")
            causal = flags != {False}
        ranges = getattr(common, "mm_req_doc_ranges", None)
        if (ranges and any(ranges.values())) or getattr(common, "rswa_prefix_lens", None) is not None:
            raise NotImplementedError(
                "the Ascend attention has neither bidirectional ranges inside a causal sequence (prefix LM) nor a"
                " reference sliding window (R-SWA)"
            )
        ends = common.query_start_loc_cpu[1 : requests + 1].tolist()
        tokens = ends[-1] if ends else 0
        return AscendAttentionMetadata(
            Step(
                query_ends=ends,
                seq_lens=common.seq_lens[:requests].tolist(),
                block_table=common.block_table_tensor,
                slots=common.slot_mapping[:tokens],
                causal=bool(causal),
            )
        )


class AscendAttentionImpl(AttentionImpl[AscendAttentionMetadata]):
    """Attention of one layer. Arguments as in the base class.

    Raises:
        NotImplementedError: torch_npu's operator does not have what the layer asks for.
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
        **extra: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        asked = {
            "ALiBi": alibi_slopes is not None,
            "sliding windows": sliding_window is not None,
            "a cap on the scores": bool(logits_soft_cap),
            f"attention of type {attn_type!r}": attn_type != AttentionType.DECODER,
            f"a KV cache of dtype {kv_cache_dtype!r} ({', '.join(CACHE_DTYPES)})": kv_cache_dtype not in CACHE_DTYPES,
            f"heads of size {head_size} (multiples of 16 up to {MAX_HEAD_SIZE})": not _fits(head_size),
            f"{num_heads} query heads for {self.num_kv_heads} heads of keys (at most {MAX_GROUP} for one)": num_heads
            > MAX_GROUP * self.num_kv_heads,
            f"{num_heads} heads of size {head_size} ({MAX_ROW} entries at most)": num_heads * head_size > MAX_ROW,
        }
        asked |= {f"the argument {name!r}": not _asks_for_nothing(value) for name, value in extra.items()}
        missing = [name for name, is_asked in asked.items() if is_asked]
        if missing:
            raise NotImplementedError(f"the Ascend attention does not have {', '.join(missing)}; {REMEDY}")
        self._pool: tuple[Tensor, Pool] | None = None

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: AscendAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the step's keys and values into the cache, then attention of its tokens.

        Args:
            layer: not used.
            query: [T or more, num_heads, head_size].
            key: [T or more, num_kv_heads, head_size]; not written where the layer reads another layer's cache.
            value: as `key`.
            kv_cache: [blocks, num_kv_heads, block size, 2 * head_size]; its pages are laid out by us.
            attn_metadata: None in a run without requests (profiling): the output is zeros.
            output: as `query`; written whole, rows past T become zeros.
            output_scale: must be None.
            output_block_scale: must be None.

        Returns:
            `output`.

        Raises:
            NotImplementedError: the output is to be quantised; or see `make_pool`.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("the Ascend attention does not quantise its output")
        if attn_metadata is None or kv_cache.numel() == 0:
            return output.fill_(0)
        step, pool = attn_metadata.step, self._pool_of(kv_cache)
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            _, slots = step.addressed(pool.step, pool.keys.shape[1])
            _reshape_and_cache.fn(key, value, *pool.as_caches(self.num_kv_heads), slots)
        attend(query, pool, self.num_kv_heads, self.scale, step, output)
        if step.num_tokens < output.shape[0]:
            output[step.num_tokens :].zero_()
        return output

    def _pool_of(self, kv_cache: Tensor) -> Pool:
        if self._pool is None or self._pool[0] is not kv_cache:
            self._pool = (kv_cache, make_pool(kv_cache, self.head_size))
        return self._pool[1]


def _asks_for_nothing(value: Any) -> bool:
    """Whether an argument that we do not know has a value by which vLLM leaves its feature out."""
    return value is None or (isinstance(value, int) and value in (False, -1))


def _fits(head_size: int) -> bool:
    return head_size % 16 == 0 and head_size <= MAX_HEAD_SIZE


class AscendAttentionBackend(OutOfTreeAttentionBackend):
    """Paged attention on the NPU: prefill, chunked prefill, decode and mixtures of them, causal or not."""

    #: The pages of the cache are laid out by us, so that both go together.
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = list(_DTYPES)

    @staticmethod
    def get_impl_cls() -> type[AscendAttentionImpl]:
        """The class of a layer's attention."""
        return AscendAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AscendAttentionMetadataBuilder]:
        """The class that makes a step's metadata."""
        return AscendAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """128 tokens; vLLM splits larger blocks."""
        return [BLOCK_SIZE]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 16 up to 512."""
        return _fits(head_size)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes."""
        return True
