"""Step 2: rotary position embedding."""

from __future__ import annotations

from torch import Tensor
from vllm_fl_reference import ops


def rotary_embedding_acme(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> tuple[Tensor, Tensor] | Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` entries of each head by the angles of its position.

    Reference-based: put your kernel here. It gives new tensors; ``cos`` and ``sin`` are tables over all positions.
    """
    return ops.rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)
