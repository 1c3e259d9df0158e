"""Sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .inputs import sampling as inputs
from .inputs import sized
from .spec import operator

if TYPE_CHECKING:
    from torch import Tensor


@operator(
    called_from="Sampler.apply_penalties",
    mutates=("logits",),
    cases=inputs.apply_repetition_penalties,
    sized=sized.apply_repetition_penalties,
)
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


@operator(
    called_from="TopKTopPSampler", mutates=("logits",), cases=inputs.apply_top_k_top_p, sized=sized.apply_top_k_top_p
)
def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """Keep the most probable tokens of each request: its top k, and of those the nucleus (Holtzman et al., 2020).

    A token stays if fewer than `top_k` tokens have a higher logit and if, in the softmax over the tokens that these
    leave, the tokens of higher logit have together a probability below `top_p`. The logits of all others become minus
    infinity. Tokens of equal logit share their fate; the most probable token stays whatever the limits are.

    Args:
        logits: [R, V], floating; written.
        top_k: [R], integers; below 1 or at least V is no limit. None: no request has one.
        top_p: [R], floating; at least 1 is no limit. None: no request has one.
    """
