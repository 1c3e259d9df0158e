"""The operator that names classes for vLLM to import; naming one imports nothing."""

from __future__ import annotations

ATTENTION = "vllm_fl.flagos.attention.FlagosAttentionBackend"
#: Calls the operators concat_and_cache_mla and mla_attention.
LATENT_ATTENTION = "vllm_fl.integration.mla.MLABackend"


def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """See :func:`vllm_fl.catalog.attention.attention_backend`."""
    if use_sparse:
        raise NotImplementedError("flagos has no backend for sparse attention")
    return LATENT_ATTENTION if use_mla else ATTENTION
