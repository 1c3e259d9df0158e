"""The worker of the CPU reference platform."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_fl.integration.worker import FLWorkerMixin
from vllm_fl.logging import get_logger

from .hugepages import use_huge_pages
from .lazy_zeros import LazyZeros, release_pages
from .linear import pack_linear_layers
from .platform import GIB, ReferencePlatform

__all__ = ["ReferenceWorker"]

#: Key in ``vllm_config.additional_config``, which vLLM hashes into the keys of its compile caches.
THREADS_KEY = "vllm_fl_threads"

#: Share of the memory that is still free once the weights are loaded, which the KV caches of all workers may take.
KV_CACHE_SHARE = 0.5
#: Size of a worker's KV cache if nothing asks for more or less.
KV_CACHE_BYTES = 4 * GIB


class ReferenceWorker(FLWorkerMixin, CPUWorker):
    """vLLM's CPU worker and model runner, with threads and KV cache as a user of a plain CPU expects them."""

    cache_config: Any
    model_runner: Any
    parallel_config: Any
    scheduler_config: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with _memory_unchecked(vllm_config.cache_config):
            super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        # CPUWorker binds threads to cores under vLLM's CPU platform, and so forbids torch.set_num_threads. There is
        # no binding here, and the process may be the user's own.
        set_num_threads = torch.set_num_threads
        super().init_device()
        torch.set_num_threads = set_num_threads

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # Inductor writes it into the loops of its C++; another number must not get the same graph from the cache.
        self.vllm_config.additional_config[THREADS_KEY] = torch.get_num_threads()
        super().load_model(*args, **kwargs)
        pack_linear_layers(self.model_runner.get_model())
        use_huge_pages()  # before there is a KV cache, whose pages are to come one by one

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        with LazyZeros():  # the KV cache
            return super().initialize_from_config(*args, **kwargs)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the KV cache back to the system.

        Level 1 keeps the weights in the host's memory, where they are; level 2 would drop them, and keeps them, too.
        """
        log = get_logger(__name__)
        if level > 1:
            log.warning("sleep level %d: the weights stay in memory; only the KV cache is given back", level)
        log.info("asleep: %s of KV cache given back", _shown(release_pages(_tensors(self.model_runner.kv_caches))))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Nothing to do: the pages of the KV cache come back when they are written."""

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache of this worker."""
        if not _is_automatic(self.cache_config):
            return int(super().determine_available_memory())
        self._compile_model()
        free = ReferencePlatform.free_memory()
        one = self._sequence_bytes()
        # Twice a full batch of full sequences: as much again for prefixes to reuse. More could not be used.
        useful = 2 * one * int(self.scheduler_config.max_num_seqs)
        size = min(
            int(free * KV_CACHE_SHARE) // self.parallel_config.local_world_size, useful, max(KV_CACHE_BYTES, one)
        )
        get_logger(__name__).info(
            "KV cache: %s of %s free memory (--kv-cache-memory-bytes changes it)", _shown(size), _shown(free)
        )
        return size

    def _compile_model(self) -> None:
        asked = getattr(self, "_should_warm_up_model", None)  # vLLM 0.32 and later
        if asked is None or asked():
            self.model_runner.warming_up_model()

    def _sequence_bytes(self) -> int:
        """What one sequence of full length takes, and a block more."""
        specs = self.get_kv_cache_spec().values()
        return sum(int(spec.max_memory_usage_bytes(self.vllm_config) + spec.page_size_bytes) for spec in specs)


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    """Those of all layers, of which some (gated delta nets) have several."""
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)


def _shown(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"


def _is_automatic(cache_config: Any) -> bool:
    """Whether the user has left the size of the KV cache to us (a utilisation at its default counts as unset)."""
    default = type(cache_config).gpu_memory_utilization
    return cache_config.kv_cache_memory_bytes is None and cache_config.gpu_memory_utilization == default


@contextmanager
def _memory_unchecked(cache_config: Any) -> Iterator[None]:
    """Keep CPUWorker from refusing to start because less than its default 92% of all memory is free."""
    if not _is_automatic(cache_config):
        yield
        return
    cache_config.kv_cache_memory_bytes = 0
    try:
        yield
    finally:
        cache_config.kv_cache_memory_bytes = None
