"""Writing to the paged key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_ascend.schemas import needs

#: Attribute that the attention sets on a tensor of slots which it has cut to the step's tokens: none is negative. To
#: look at the values would wait for the device, in each layer.
ALL_VALID = "_vllm_fl_all_valid"


@needs("npu::npu_scatter_pa_kv_cache")
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value into its slot; see the catalogue.

    Caches lie in memory as [blocks, tokens, heads, size], keys and values apart. Slots to be skipped are left to the
    next implementation: torch_npu's operator has none.
    """
    if slot_mapping.shape[0]:
        arguments = prepared(key, value, key_cache, value_cache, slot_mapping)
        torch.ops.npu.npu_scatter_pa_kv_cache(*arguments, slot_mapping.contiguous(), cache_mode="Norm")


def prepared(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [N, H, D] contiguous, and the caches as [blocks, block size, H, D].

    Raises:
        NotImplementedError: the memory order, the dtypes or a slot are not what torch_npu's operators take.
    """
    count = slot_mapping.shape[0]
    caches = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    if not all(cache.is_contiguous() for cache in caches):
        raise NotImplementedError("torch_npu writes to caches that lie as [blocks, tokens, heads, size] only")
    dtypes = {x.dtype for x in (key, value, key_cache, value_cache)}
    if len(dtypes) > 1:
        raise NotImplementedError(f"torch_npu converts nothing on the way: {', '.join(sorted(map(str, dtypes)))}")
    if slot_mapping.dtype not in (torch.int32, torch.int64):
        raise NotImplementedError(f"slots are int32 or int64, not {slot_mapping.dtype}")
    if not getattr(slot_mapping, ALL_VALID, False) and bool((slot_mapping < 0).any()):
        raise NotImplementedError("torch_npu has no slots that are skipped")
    return key[:count].contiguous(), value[:count].contiguous(), *caches
