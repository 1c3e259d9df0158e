"""What a worker of vLLM does for the tuner; mixed into its class by vLLM's option ``worker_extension_cls``."""

from __future__ import annotations

from vllm_fl.compare.worker import CompareWorker
from vllm_fl.profile.worker import ProfileWorker


class TuneWorker(ProfileWorker, CompareWorker):
    """Is profiled, and selects by one policy after the other."""
