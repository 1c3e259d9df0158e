"""Sampling by vLLM's compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    """See :func:`vllm_fl.catalog.sampling.apply_repetition_penalties`.

    Raises:
        NotImplementedError: `logits` are not contiguous.
    """
    if not logits.is_contiguous():
        raise NotImplementedError("vLLM's apply_repetition_penalties_ wants contiguous logits")
    if logits.numel():
        torch.ops._C.apply_repetition_penalties_(
            logits, prompt_mask.contiguous(), output_mask.contiguous(), repetition_penalties.to(logits.dtype)
        )
