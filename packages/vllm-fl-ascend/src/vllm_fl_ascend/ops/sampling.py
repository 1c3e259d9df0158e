"""Sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_fl_ascend.schemas import needs

#: Largest k of npu_top_k_top_p.
MAX_K = 1024


@needs("npu::npu_top_k_top_p")
def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> None:
    """Keep the most probable tokens of each request; see the catalogue. Reads `top_k` on the host."""
    requests, vocabulary = logits.shape
    if requests == 0 or (top_k is None and top_p is None):
        return
    if top_k is not None:
        if bool(((top_k < 1) | (top_k > min(MAX_K, vocabulary))).any()):
            raise NotImplementedError(f"npu_top_k_top_p takes a top_k from 1 to {min(MAX_K, vocabulary)} only")
        top_k = top_k.to(torch.int32)
    by_k = logits if top_k is None else torch.ops.npu.npu_top_k_top_p(logits, None, top_k)
    if top_p is None:
        logits.copy_(by_k)
        return
    nucleus = torch.ops.npu.npu_top_k_top_p(logits, top_p.clamp(0, 1).to(logits.dtype), top_k)
    # Tokens of equal logit share their fate; the operator may keep some of them.
    least = nucleus.masked_fill(nucleus == float("-inf"), float("inf")).amin(-1, keepdim=True)
    kept = by_k.masked_fill(by_k < least, float("-inf"))
    logits.copy_(torch.where((top_p >= 1)[:, None], by_k, kept))
