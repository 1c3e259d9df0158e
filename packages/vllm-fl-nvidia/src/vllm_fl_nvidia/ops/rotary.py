"""Rotary position embedding by vLLM's compiled kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> tuple[Tensor, Tensor] | Tensor:
    """See :func:`vllm_fl.catalog.rotary.rotary_embedding`.

    The kernel works in place, on copies here, and reads cosines and sines from one table.
    """
    q = query.clone(memory_format=torch.contiguous_format)
    k = None if key is None else key.clone(memory_format=torch.contiguous_format)
    if query.numel():
        table = _table(cos, sin).to(query.dtype)
        torch.ops._C.rotary_embedding(position_ids.long(), q, k, query.shape[-1], table, is_neox_style)
    return q if k is None else (q, k)


def _table(cos: Tensor, sin: Tensor) -> Tensor:
    """[P, R]: cosines, then sines; without a copy where they are the halves of one table, as vLLM has them."""
    positions, half = cos.shape
    halves = (
        cos.untyped_storage().data_ptr() == sin.untyped_storage().data_ptr()
        and sin.storage_offset() == cos.storage_offset() + half
        and cos.stride() == sin.stride() == (2 * half, 1)
    )
    return cos.as_strided((positions, 2 * half), (2 * half, 1)) if halves else torch.cat((cos, sin), -1)
