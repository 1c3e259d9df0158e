"""Worker and model runner of the NPU platform: vLLM's own, with what names CUDA in them replaced."""

from __future__ import annotations

import gc
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.utils.mem_utils import MemorySnapshot
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.utils import report_usage_stats
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.workspace import init_workspace_manager

from vllm_fl.errors import ConfigError
from vllm_fl.integration.worker import FLWorkerMixin

from . import compat

__all__ = ["AscendModelRunner", "AscendWorker"]


class AscendModelRunner(GPUModelRunner):
    """vLLM's first model runner. Streams, events and graphs reach it through ``compat``."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        compat.replace_triton_kernels(self)

    def _init_kv_zero_meta(self) -> None:
        if HAS_TRITON:  # the addresses that a kernel in Triton clears
            super()._init_kv_zero_meta()

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Clear blocks of the attention layers that are used again."""
        if HAS_TRITON:
            super()._zero_block_ids(block_ids)
            return
        layers = self.compilation_config.static_forward_context
        for group in self.kv_cache_config.kv_cache_groups:
            if isinstance(group.kv_cache_spec, AttentionSpec):
                for name in group.layer_names:
                    if name not in self.runner_only_attn_layers:
                        layers[name].kv_cache[block_ids] = 0


class AscendWorker(FLWorkerMixin, Worker):
    """vLLM's GPU worker on an NPU."""

    device: Any
    local_rank: int
    model_runner: Any

    def init_device(self) -> None:
        """Take the device, join the other ranks, measure the memory, and make the model runner.

        Raises:
            ConfigError: there are fewer devices than ranks.
        """
        visible = torch.npu.device_count()
        if self.local_rank >= visible:
            raise ConfigError(
                f"rank {self.local_rank} finds {visible} NPUs: lower --tensor-parallel-size, or let"
                f" {current_platform.device_control_env_var} name more devices"
            )
        self.device = torch.device("npu", self.local_rank)
        torch.npu.set_device(self.device)
        compat.install()
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        # Before the memory is measured: the library of collectives takes some.
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        torch.npu.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        init_workspace_manager(self.device, 1)
        self.model_runner = AscendModelRunner(self.vllm_config, self.device)
        if self.rank == 0:
            report_usage_stats(self.vllm_config)
