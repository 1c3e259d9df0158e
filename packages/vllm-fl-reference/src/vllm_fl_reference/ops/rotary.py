"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import compute_dtype


def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> tuple[Tensor, Tensor] | Tensor:
    """Rotate the first R entries of each head by the angles of its position; the rest passes through, in float32."""
    dtype = compute_dtype(query.dtype)
    cos = cos.index_select(0, position_ids).unsqueeze(1).to(dtype)
    sin = sin.index_select(0, position_ids).unsqueeze(1).to(dtype)
    if query.device.type != "cpu":
        # Out of place, one result each: what torch.compile fuses into one kernel without copies.
        q = _rotated(query, cos, sin, is_neox_style)
        return q if key is None else (q, _rotated(key, cos, sin, is_neox_style))
    x = query.to(dtype, copy=True) if key is None else torch.cat((query, key), 1).to(dtype)
    a, b = _pairs(x, cos.shape[-1], is_neox_style)
    rotated = (a * cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).addcmul_(a, sin)
    a.copy_(rotated)
    if key is None:
        return x.to(query.dtype).contiguous()
    heads = query.shape[1]
    return _separate(x[:, :heads], query.dtype), _separate(x[:, heads:], key.dtype)


def _pairs(x: Tensor, half: int, is_neox_style: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second entries of all pairs."""
    if is_neox_style:
        return x[..., :half], x[..., half : 2 * half]
    return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, is_neox_style: bool) -> Tensor:
    half = cos.shape[-1]
    a, b = (part.to(cos.dtype) for part in _pairs(x, half, is_neox_style))
    first, second = a * cos - b * sin, b * cos + a * sin
    turned = torch.cat((first, second), -1) if is_neox_style else torch.stack((first, second), -1).flatten(-2)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def _separate(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
