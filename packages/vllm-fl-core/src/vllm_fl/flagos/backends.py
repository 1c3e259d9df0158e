"""The operator that names classes for vLLM to import; naming one imports nothing."""

from __future__ import annotations

ATTENTION = "vllm_fl.flagos.attention.FlagosAttentionBackend"


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """See :func:`vllm_fl.catalog.attention.attention_backend`."""
    if use_mla or use_sparse:
        raise NotImplementedError("flagos has no backend for multi-head latent or sparse attention")
    return ATTENTION
