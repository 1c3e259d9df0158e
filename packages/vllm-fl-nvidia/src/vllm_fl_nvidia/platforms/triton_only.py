"""The CUDA platform on a vLLM without compiled kernels (``VLLM_TARGET_DEVICE=empty``): Triton and PyTorch alone."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.utils.import_utils import import_pynvml

from vllm_fl.integration.platform import OutOfTreePlatform

__all__ = ["TritonNvidiaPlatform"]

pynvml = import_pynvml()
VISIBLE = "CUDA_VISIBLE_DEVICES"


class TritonNvidiaPlatform(OutOfTreePlatform):
    """Out of tree to vLLM, since its tests for CUDA lead to compiled kernels; so is everything that needs those.

    Not available: vLLM's custom all-reduce, sleep mode, quantised layers, the second model runner.
    """

    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    dist_backend = "nccl"
    device_control_env_var = VISIBLE
    simple_compile_backend = "inductor"

    worker_cls = "vllm_fl_nvidia.worker.NvidiaWorker"

    @classmethod
    @functools.cache
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*_nvml("nvmlDeviceGetCudaComputeCapability", device_id))

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return str(_nvml("nvmlDeviceGetName", device_id))

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes."""
        return int(_nvml("nvmlDeviceGetMemoryInfo", device_id).total)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cuda.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Bytes at the peak since the last call."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return int(torch.cuda.get_device_properties(device_id).multi_processor_count)

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        capability = cls.get_device_capability()
        if dtype == torch.bfloat16 and capability.major < 8:
            raise ValueError(
                f"bfloat16 needs compute capability 8.0, {cls.get_device_name()} has {capability.as_version_str()};"
                " use --dtype float16"
            )

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"


def _nvml(function: str, device_id: int) -> Any:
    """Ask the driver's management library about a device, counted as ``CUDA_VISIBLE_DEVICES`` counts."""
    pynvml.nvmlInit()
    try:
        visible = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
        name = visible[device_id] if visible else str(device_id)
        by_index = name.isdigit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else pynvml.nvmlDeviceGetHandleByUUID(name)
        return getattr(pynvml, function)(handle)
    finally:
        pynvml.nvmlShutdown()
