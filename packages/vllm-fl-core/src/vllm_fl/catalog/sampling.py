"""Sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inputs import sampling as inputs
from .spec import operator

if TYPE_CHECKING:
    from torch import Tensor


@operator(called_from="Sampler.apply_penalties", mutates=("logits",), cases=inputs.apply_repetition_penalties)
def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    """Push down tokens that the prompt or the output already holds (Keskar et al., 2019), in place.

    A positive logit is divided by the penalty of its request, another one multiplied.

    Args:
        logits: [R, V], floating; written.
        prompt_mask: [R, V], bool: tokens of the prompt.
        output_mask: [R, V], bool: tokens of the output so far.
        repetition_penalties: [R], floating, 1 changes nothing.
    """
