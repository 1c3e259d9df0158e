"""Sampling."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    """Divide positive logits of tokens seen before by their request's penalty, multiply the others, in place."""
    penalties = torch.where(prompt_mask | output_mask, repetition_penalties.unsqueeze(1), 1.0)
    logits.copy_(torch.where(logits > 0, logits / penalties, logits * penalties))
