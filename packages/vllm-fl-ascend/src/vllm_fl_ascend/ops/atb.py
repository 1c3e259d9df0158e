"""The same on Ascend Transformer Boost, whose operators write in place and come with the NNAL package."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_ascend.schemas import needs

from .cache import prepared


@needs("atb::_npu_rotary_embedding")
def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> tuple[Tensor, Tensor] | Tensor:
    """Rotate whole heads; see the catalogue. Takes cosines and sines that are the halves of one table."""
    size = query.shape[-1]
    if key is None or 2 * cos.shape[-1] != size or key.shape[-1] != size:
        raise NotImplementedError("_npu_rotary_embedding rotates whole heads of queries and keys")
    if {x.dtype for x in (key, cos, sin)} != {query.dtype}:
        raise NotImplementedError("_npu_rotary_embedding needs one dtype")
    table = _joined(cos, sin)
    out = [x.clone(memory_format=torch.contiguous_format) for x in (query, key)]
    if query.shape[0]:
        flat = [x.flatten(1) for x in out]
        torch.ops.atb._npu_rotary_embedding(position_ids.long(), *flat, size, table, is_neox_style)
    return out[0], out[1]


def _joined(cos: Tensor, sin: Tensor) -> Tensor:
    """The table [P, R] whose halves `cos` and `sin` are; a view."""
    half = cos.shape[-1]
    neighbours = sin.data_ptr() == cos.data_ptr() + half * cos.element_size()
    if not neighbours or cos.stride() != (2 * half, 1) or sin.stride() != cos.stride():
        raise NotImplementedError("_npu_rotary_embedding needs cosines and sines side by side in one table")
    return cos.as_strided((cos.shape[0], 2 * half), (2 * half, 1))


@needs("atb::_npu_reshape_and_cache")
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value into its slot; see the catalogue, and ``cache.reshape_and_cache``."""
    if slot_mapping.shape[0]:
        arguments = prepared(key, value, key_cache, value_cache, slot_mapping)
        torch.ops.atb._npu_reshape_and_cache(*arguments, slot_mapping.to(torch.int32))
