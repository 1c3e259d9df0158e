"""Attention: which backend class vLLM builds, the paged KV cache, and attention to latents (MLA)."""

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


@operator(
    called_from="MLAAttentionImpl.do_kv_cache_update",
    mutates=("kv_cache",),
    cases=inputs.concat_and_cache_mla,
    sized=sized.concat_and_cache_mla,
)
def concat_and_cache_mla(kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's latent and its rotated key, side by side, into its slot of the paged latent cache.

    Slots are those of `reshape_and_cache`.

    Args:
        kv_c: [T, L], floating: latents, normalised.
        k_pe: [T, C - L], floating: the part of a key that has a position and that all heads share.
        kv_cache: [num_blocks, block_size, C], any strides; written.
        slot_mapping: [N], integers, N at most T; tokens past N are padding.
    """


@operator(called_from="MLAAttentionImpl.forward_mqa", cases=inputs.mla_attention, sized=sized.mla_attention)
def mla_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    kv_lora_rank: int,
    scale: float,
    max_query_len: int,
    num_decodes: int,
) -> Tensor:
    """Causal multi-head latent attention over a paged cache, in its absorbed form (DeepSeek-V2, 2024, section 2.1).

    Row j of a sequence in the cache is the key of all heads, and its first L entries are the value. The projections
    from latents to each head's keys and values are absorbed: the caller multiplies queries by the first,
    ``[W_UK^T q_nope, q_rope]``, and results by the second. A head of the query at position t gives
    ``sum_j softmax_j(scale * q . row_j) row_j[:L]`` over j up to t.

    The query of request r are tokens ``query_start_loc[r]`` to ``query_start_loc[r + 1]``, the last ones of its
    sequence, whose rows are in the cache as well.

    Args:
        query: [T or more, H, C], floating, any strides.
        kv_cache: [num_blocks, block_size, C], floating, any strides.
        block_table: [R or more, max_blocks], int32.
        seq_lens: [R], int32: tokens of each request, its query included; 0 for one that pads the batch.
        query_start_loc: [R + 1], int32, rising from 0 to T.
        kv_lora_rank: L.
        scale: multiplies the scores.
        max_query_len: no query is longer.
        num_decodes: of the first so many requests request i has token i alone, or pads the batch.

    Returns:
        [as many rows as `query`, H, L], of its dtype; rows without a request are zeros.
    """
    return query.new_empty((*query.shape[:2], kv_lora_rank))
