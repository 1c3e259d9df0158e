"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_ascend.schemas import needs

#: Limits of npu_rotary_mul: heads, and rotated entries of a head.
MAX_HEADS = 999
MAX_SIZE = 895
#: Attribute of a table of angles that somebody has looked at: whether none is beyond 1.
WITHIN_ONE = "_vllm_fl_within_one"


@needs("npu::npu_rotary_mul")
def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> tuple[Tensor, Tensor] | Tensor:
    """Rotate the first entries of each head by the angles of its position; see the catalogue."""
    rotated = 2 * cos.shape[-1]
    for x in (query,) if key is None else (query, key):
        if x.shape[1] > MAX_HEADS or rotated > MAX_SIZE:
            raise NotImplementedError(
                f"npu_rotary_mul takes {MAX_HEADS} heads and {MAX_SIZE} entries at most, not {x.shape[1]} and {rotated}"
            )
    for table in (cos, sin):
        _check_range(table)
    if query.shape[0] == 0:
        return query.new_empty(query.shape) if key is None else (query.new_empty(query.shape), key.new_empty(key.shape))
    wide_cos, wide_sin = (_spread(table[position_ids].to(query.dtype), is_neox_style) for table in (cos, sin))
    mode = "half" if is_neox_style else "interleave"
    out = _rotate(query, wide_cos, wide_sin, mode)
    return out if key is None else (out, _rotate(key, wide_cos, wide_sin, mode))


def _check_range(table: Tensor) -> None:
    """Look at a table of angles, or at what it is a view of, once: to look waits for the device.

    Raises:
        NotImplementedError: there is an entry beyond 1, as in tables that YaRN has scaled; or a graph is being
            captured, and nobody has looked before.
    """
    whole = table if table._base is None else table._base
    within: bool | None = getattr(whole, WITHIN_ONE, None)
    if within is None:
        if torch.npu.is_current_stream_capturing():
            raise NotImplementedError("npu_rotary_mul takes cosines and sines; whether these are, no graph can ask")
        within = not bool((whole.abs() > 1).any())
        setattr(whole, WITHIN_ONE, within)
    if not within:
        raise NotImplementedError("npu_rotary_mul takes cosines and sines, not what is larger than 1")


def _spread(angles: Tensor, is_neox_style: bool) -> Tensor:
    """[T, R / 2] -> [1, T, 1, R]: both entries of a pair have its angle."""
    wide = torch.cat((angles, angles), -1) if is_neox_style else angles.repeat_interleave(2, -1)
    return wide[None, :, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Of [T, H, D], as the layout BSND with B = 1."""
    size = cos.shape[-1]
    if size == x.shape[-1]:
        return torch.ops.npu.npu_rotary_mul(x[None], cos, sin, mode)[0]
    return torch.cat((torch.ops.npu.npu_rotary_mul(x[None, ..., :size], cos, sin, mode)[0], x[..., size:]), -1)
