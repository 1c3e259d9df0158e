"""Attention: which backend class vLLM builds, and the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inputs import attention as inputs
from .inputs import sized
from .spec import operator

if TYPE_CHECKING:
    from torch import Tensor


@operator(called_from="Platform.get_attn_backend_cls", cases=inputs.attention_backend, dtypes=("float32",))
def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """The vLLM ``AttentionBackend`` class to build, as a path.

    Args:
        use_mla: multi-head latent attention.
        use_sparse: sparse attention with an indexer.

    Returns:
        ``"package.module.Class"`` (``"package.module:Class"`` is taken too).

    Raises:
        NotImplementedError: the implementation has no backend of that sort; the next candidate is asked.
    """
    return ""


@operator(
    called_from="AttentionImpl.do_kv_cache_update",
    mutates=("key_cache", "value_cache"),
    cases=inputs.reshape_and_cache,
    sized=sized.reshape_and_cache,
)
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value into its slot of the paged cache.

    Slot s is block ``s // block_size``, offset ``s % block_size``; a negative slot is skipped.

    Args:
        key: [T, H, D], floating.
        value: [T, H, Dv], floating.
        key_cache: [num_blocks, H, block_size, D], any strides; written.
        value_cache: [num_blocks, H, block_size, Dv], any strides; written.
        slot_mapping: [N], integers, N at most T; tokens past N are padding.
    """


@operator(
    called_from="BlockTable.compute_slot_mapping",
    mutates=("slot_mapping",),
    cases=inputs.compute_slot_mapping,
    sized=sized.compute_slot_mapping,
    dtypes=("float32",),
)
def compute_slot_mapping(
    query_start_loc: Tensor, positions: Tensor, block_table: Tensor, slot_mapping: Tensor, block_size: int
) -> None:
    """The cache slot of each token of a batch of requests.

    Token t of request r, at position p, has slot ``block_table[r, p // block_size] * block_size + p % block_size``.

    Args:
        query_start_loc: [R + 1], int32: token ranges of the requests, starting with 0.
        positions: [at least T], int64, with ``T = query_start_loc[-1]``.
        block_table: [at least R, max_blocks], int32.
        slot_mapping: [at least T], int64; written whole, entries from T on become -1.
        block_size: tokens a block.
    """
