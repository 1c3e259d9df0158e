"""The CUDA platform on a vLLM with its CUDA kernels: vLLM's class, with attention, layers and operators dispatched."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cuda import CudaPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_fl.integration.platform import FLPlatform
from vllm_fl_nvidia.ops.attention import FLASH_TRITON, NATIVE

__all__ = ["CompiledNvidiaPlatform"]


class CompiledNvidiaPlatform(FLPlatform, CudaPlatform):
    """All that vLLM can do on CUDA stays: graphs, compilation, both model runners, quantisation, its own kernels.

    ``_enum`` stays CUDA, so vLLM's tests for the platform hold, and layers call their ``forward_cuda``.
    """

    worker_cls = "vllm_fl_nvidia.worker.NvidiaWorker"
    uses_compiled_kernels = True
    supports_fusion_passes = True
    has_native_layers = True
    native_vendor = "nvidia"
    native_attention_backends = frozenset(AttentionBackendEnum.__members__) - {"CUSTOM"}

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Path of the attention backend: vLLM judges its own, dispatch chooses if the user names none."""
        path = NATIVE
        if selected_backend is None or selected_backend.name == "CUSTOM":
            path = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
            if path not in (NATIVE, FLASH_TRITON):
                return path
            selected_backend = None
        native = str(super(FLPlatform, cls).get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))
        is_flash = native == AttentionBackendEnum.FLASH_ATTN.get_path()
        return FLASH_TRITON if path == FLASH_TRITON and is_flash else native

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return str(super(FLPlatform, cls).get_pass_manager_cls())  # with vLLM's fusion passes for its kernels
