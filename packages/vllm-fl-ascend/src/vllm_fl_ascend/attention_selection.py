"""Which attention vLLM builds; apart from the attention itself, which imports vLLM."""

from __future__ import annotations

from .schemas import needs


@needs("npu::npu_fused_infer_attention_score_v2")
def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
    """Paged attention on torch_npu's fused operator; neither multi-head latent nor sparse attention."""
    if use_mla or use_sparse:
        kind = "sparse attention" if use_sparse else "multi-head latent attention (VLLM_MLA_DISABLE=1 avoids it)"
        raise NotImplementedError(f"the Ascend backend has no {kind}")
    return "vllm_fl_ascend.attention.AscendAttentionBackend"
