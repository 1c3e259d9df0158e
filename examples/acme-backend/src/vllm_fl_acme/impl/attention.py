"""Step 2: the attention backend that vLLM builds."""

from __future__ import annotations

from vllm_fl_reference.attention import PagedAttentionBackend


class AcmeAttentionBackend(PagedAttentionBackend):
    """Attention over vLLM's paged KV cache.

    Reference-based: replace the classes that ``get_impl_cls`` and ``get_builder_cls`` return by your own.
    """
