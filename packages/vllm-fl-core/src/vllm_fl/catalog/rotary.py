"""Rotary position embedding (Su et al., 2021)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inputs import rotary as inputs
from .inputs import sized
from .spec import operator

if TYPE_CHECKING:
    from torch import Tensor


@operator(called_from="RotaryEmbedding and its subclasses", cases=inputs.rotary_embedding, sized=sized.rotary_embedding)
def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> tuple[Tensor, Tensor] | Tensor:
    """Rotate the first R entries of each head by the angles of its position; the rest passes through.

    Pair i is ``(x[i], x[i + R / 2])`` in the NeoX style, ``(x[2 i], x[2 i + 1])`` in the interleaved (GPT-J) style;
    it becomes ``(a cos - b sin, b cos + a sin)``.

    Args:
        query: [T, Hq, D], floating, any strides.
        key: [T, Hk, D], or None where the layer shares keys.
        cos: [P, R / 2], R at most D.
        sin: [P, R / 2].
        position_ids: [T], integers below P.
        is_neox_style: which entries make a pair.

    Returns:
        (query, key) rotated, in their shapes and dtypes; the query alone if `key` is None.
    """
    q = query.new_empty(query.shape)
    return q if key is None else (q, key.new_empty(key.shape))
