"""The worker: vLLM's GPU worker, tied to the selection of operators."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from vllm_fl.integration.worker import FLWorkerMixin

__all__ = ["NvidiaWorker"]


class NvidiaWorker(FLWorkerMixin, Worker):
    """vLLM's GPU worker. Its model runners, the first and the second, are vLLM's, unchanged."""
