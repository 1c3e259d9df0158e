"""Attention by the backends that vLLM ships for CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

#: Stands for vLLM's own choice among FlashAttention, FlashInfer and the rest, which the platform puts in its place.
NATIVE = "vllm_fl_nvidia.ops.attention.NATIVE"
#: The same, but for decodes this project's kernel where the choice is FlashAttention.
FLASH_TRITON = "vllm_fl_nvidia.flash_triton.FlashTritonBackend"

_WARP = 32  # threads


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """See :func:`vllm_fl.catalog.attention.attention_backend`."""
    return NATIVE


def flash_triton_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """See :func:`vllm_fl.catalog.attention.attention_backend`."""
    if use_mla or use_sparse:
        raise NotImplementedError("FlashAttention beside Triton has no multi-head latent and no sparse attention")
    return FLASH_TRITON


def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """See :func:`vllm_fl.catalog.attention.reshape_and_cache`.

    Raises:
        NotImplementedError: keys and values differ in size, the heads of a token do not lie one after the other, or
            the cache has another dtype; the kernel cannot do it. Or heads of the cache lie apart and are so small that
            it would not end.
    """
    if key.shape != value.shape or key_cache.stride() != value_cache.stride():
        raise NotImplementedError("vLLM's reshape_and_cache_flash wants keys and values of one shape and layout")
    if not key.dtype == value.dtype == key_cache.dtype == value_cache.dtype:
        raise NotImplementedError("vLLM's reshape_and_cache_flash wants one dtype; it converts to float8 only")
    heads, size = key.shape[1:]
    together = all(rows.stride(2) == 1 and (heads == 1 or rows.stride(1) == size) for rows in (key, value))
    if not together or key_cache.stride(-1) != 1:
        raise NotImplementedError("vLLM's reshape_and_cache_flash wants the heads of a token contiguous")
    if heads * size < _WARP and key_cache.stride(1) != size:
        raise NotImplementedError("vLLM's reshape_and_cache_flash never ends with less than a warp of entries a token")
    if not slot_mapping.numel():
        return
    scale = torch.ones((), dtype=torch.float32, device=key.device)
    caches = (key_cache.transpose(1, 2), value_cache.transpose(1, 2))
    torch.ops._C_cache_ops.reshape_and_cache_flash(key, value, *caches, slot_mapping.long(), "auto", scale, scale)
