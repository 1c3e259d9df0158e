"""Sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from ._dtypes import compute_dtype


def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    """Divide positive logits of tokens seen before by their request's penalty, multiply the others, in place."""
    penalties = torch.where(prompt_mask | output_mask, repetition_penalties.unsqueeze(1), 1.0)
    logits.copy_(torch.where(logits > 0, logits / penalties, logits * penalties))


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """Set the logits outside the top k, and outside the nucleus of what that leaves, to minus infinity, in place.

    Both are thresholds on the sorted logits, so that equal logits share their fate.
    """
    if logits.numel() == 0 or (top_k is None and top_p is None):
        return
    size = logits.shape[-1]
    ordered = logits.to(compute_dtype(logits.dtype)).sort(-1, descending=True).values
    lowest = ordered[:, -1:]
    if top_k is not None:
        k = top_k.to(torch.int64).unsqueeze(1)
        lowest = ordered.gather(1, torch.where((k < 1) | (k > size), size, k) - 1)
        ordered = ordered.masked_fill(ordered < lowest, float("-inf"))
    if top_p is not None:
        above = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        above[:, 0] = 0  # probability of what comes before each
        p = top_p.to(ordered.dtype).unsqueeze(1)
        kept = (above < p) | (p >= 1)
        kept[:, 0] = True
        lowest = torch.maximum(lowest, ordered.masked_fill(~kept, float("inf")).amin(-1, keepdim=True))
    logits.masked_fill_(logits < lowest.to(logits.dtype), float("-inf"))
