"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import compute_dtype


def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> tuple[Tensor, Tensor] | Tensor:
    """Rotate the first R entries of each head by the angles of its position; the rest passes through.

    Query and key are rotated together, in float32.
    """
    dtype = compute_dtype(query.dtype)
    half = cos.shape[-1]
    cos = cos.index_select(0, position_ids).unsqueeze(1).to(dtype)
    sin = sin.index_select(0, position_ids).unsqueeze(1).to(dtype)
    x = query.to(dtype, copy=True) if key is None else torch.cat((query, key), 1).to(dtype)
    if is_neox_style:
        a, b = x[..., :half], x[..., half : 2 * half]
    else:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    rotated = (a * cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).addcmul_(a, sin)
    a.copy_(rotated)
    if key is None:
        return x.to(query.dtype).contiguous()
    heads = query.shape[1]
    return _separate(x[:, :heads], query.dtype), _separate(x[:, heads:], key.dtype)


def _separate(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
