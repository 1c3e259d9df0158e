"""The worker: vLLM's GPU worker, tied to the selection of operators."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from vllm_fl.integration.worker import FLWorkerMixin

__all__ = ["NvidiaWorker"]


class NvidiaWorker(FLWorkerMixin, Worker):
    """vLLM's GPU worker. Its model runners, the first and the second, are vLLM's, unchanged."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        # vLLM would ask for its CUDA allocator, a compiled extension, on every platform that it does not know.
        if not current_platform.is_cuda_alike():
            return nullcontext()
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return context
