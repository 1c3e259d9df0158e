"""What attention backends out of vLLM's tree have in common: their name, and the layout of their KV cache."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.v1.attention.backend import AttentionBackend

__all__ = ["CACHE_DTYPES", "OutOfTreeAttentionBackend"]

#: Values of ``--kv-cache-dtype`` that ask for a cache that is not quantised.
CACHE_DTYPES = ("auto", "float16", "bfloat16")


class OutOfTreeAttentionBackend(AttentionBackend):
    """Base of a backend with paged keys and values: [blocks, heads, tokens, 2 * head_size], keys first."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """vLLM's name for a backend from outside its tree."""
        return "CUSTOM"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Logical shape of one layer's cache (vLLM before 0.30; later versions have this shape built in)."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Memory order [blocks, (layers,) tokens, heads, 2 * head_size] (vLLM before 0.30)."""
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)
