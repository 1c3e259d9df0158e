"""The NPU platform. Importing this imports torch_npu, which registers the device with PyTorch and starts none."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch_npu  # noqa: F401 - torch.npu and torch.ops.npu

from vllm_fl.errors import ConfigError
from vllm_fl.integration.platform import OutOfTreePlatform

from .fused_attention import BLOCK_SIZE

__all__ = ["AscendPlatform"]


class AscendPlatform(OutOfTreePlatform):
    """Runs vLLM's models on Ascend NPUs, through the operators of torch_npu.

    Eager by default. ``--compilation-config '{"mode": 3}'`` captures the pieces of the model between attentions as
    NPU graphs; the attention takes lengths from the host, and stays outside.
    """

    device_name = "npu"
    device_type = "npu"
    dispatch_key = "PrivateUse1"
    dist_backend = "hccl"
    device_control_env_var = "ASCEND_RT_VISIBLE_DEVICES"
    ray_device_key = "NPU"
    ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"]  # noqa: RUF012 - as in the base
    # Graphs are captured of the operators as they are; inductor has no code for the NPU without further packages.
    simple_compile_backend = "eager"
    worker_cls = "vllm_fl_ascend.worker.AscendWorker"

    # --- the device ---

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return str(torch.npu.get_device_name(device_id))

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of the device."""
        return int(torch.npu.get_device_properties(device_id).total_memory)

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Most bytes of tensors on the device since the last call."""
        torch.npu.reset_peak_memory_stats(device)
        return float(torch.npu.max_memory_allocated(device))

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.npu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.npu.manual_seed_all(seed)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """AI cores for matrices; 1 where torch_npu does not say."""
        return int(getattr(torch.npu.get_device_properties(device_id), "cube_core_num", 1))

    # --- what vLLM may do here ---

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        # It captures with torch.cuda.graph, which compat.py leads to torch.npu.graph.
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    # --- configuration ---

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        super().pre_register_and_update(parser)
        # There is no latent attention here: DeepSeek's models compute it as plain attention, which is the same.
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
        # A device that the parent has started cannot be used after a fork.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        from vllm.config import CompilationMode, CUDAGraphMode

        compilation = vllm_config.compilation_config
        if compilation.mode is None:
            compilation.mode = CompilationMode.NONE
        if compilation.cudagraph_mode is None:
            compiled = compilation.mode == CompilationMode.VLLM_COMPILE
            compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE if compiled else CUDAGraphMode.NONE
        super().apply_config_platform_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        _check_graphs(vllm_config)
        _check_parallel(vllm_config.parallel_config)
        _check_block_size(vllm_config.cache_config)
        if vllm_config.model_config is not None and hasattr(vllm_config.model_config, "disable_cascade_attn"):
            vllm_config.model_config.disable_cascade_attn = True
        super().check_and_update_config(vllm_config)


def _check_graphs(vllm_config: Any) -> None:
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None or mode.name in ("NONE", "PIECEWISE"):
        if mode is not None and mode.name == "PIECEWISE" and vllm_config.parallel_config.world_size > 1:
            raise ConfigError(
                "cudagraph_mode PIECEWISE: graphs on several NPUs need a communicator that can be captured; there is"
                ' none: set it to "NONE", or use one NPU'
            )
        return
    raise ConfigError(
        f'cudagraph_mode {mode.name}: the Ascend platform has "NONE" and "PIECEWISE"; its attention takes a step\'s'
        " lengths from the host, which a graph of the whole step would keep for ever"
    )


def _check_parallel(parallel: Any) -> None:
    if parallel.data_parallel_size > 1:
        raise ConfigError(
            f"--data-parallel-size {parallel.data_parallel_size}: the Ascend platform does not have it yet; start one"
            f" server for each group of NPUs, with {AscendPlatform.device_control_env_var}"
        )


def _check_block_size(cache: Any) -> None:
    asked = getattr(cache, "user_specified_block_size", False)
    if asked and cache.block_size % BLOCK_SIZE:
        raise ConfigError(
            f"--block-size {cache.block_size}: torch_npu's attention takes multiples of {BLOCK_SIZE}; leave it out for"
            f" {BLOCK_SIZE}"
        )
