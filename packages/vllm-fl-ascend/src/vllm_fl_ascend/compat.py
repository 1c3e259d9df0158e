"""Every shim of this distribution: what vLLM's GPU worker and runner ask of torch.cuda, torch.accelerator and Triton.

Each says which releases need it, by which feature it is recognised, and when it can go; see also
``vllm_fl.integration.compat``. Applied in a worker once its device is set; safe to call again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["install", "replace_triton_kernels"]


def install() -> None:
    """Apply everything that does not depend on a model runner."""
    _lead_cuda_to_npu()
    _complete_accelerator()


#: torch.cuda's name -> torch.npu's.
_CUDA_NAMES = {
    **{name: name for name in ("Event", "Stream", "current_stream", "default_stream", "set_stream", "stream")},
    **{name: name for name in ("graph", "graph_pool_handle", "is_current_stream_capturing")},
    "CUDAGraph": "NPUGraph",
}


def _lead_cuda_to_npu() -> None:
    """Have ``torch.cuda.Stream`` and the like be torch.npu's, where there is no CUDA.

    Needed by 0.26 to 0.33, whose model runner and graph wrapper name torch.cuda (vLLM's XPU runner does the same);
    recognised by the absence of CUDA; can go when they ask the platform or torch.accelerator.
    """
    if torch.cuda.is_available():
        return
    for name, ours in _CUDA_NAMES.items():
        value = getattr(torch.npu, ours, None)
        if value is not None:
            # A function in an object of its own: Dynamo keeps tables by object, and refuses one under two names.
            setattr(torch.cuda, name, value if isinstance(value, type) else functools.partial(value))


#: torch.accelerator's name -> torch.npu's; functions that can be called without an argument.
_ACCELERATOR_NAMES = {
    "empty_cache": "empty_cache",
    "get_memory_info": "mem_get_info",
    "max_memory_allocated": "max_memory_allocated",
    "memory_allocated": "memory_allocated",
    "memory_reserved": "memory_reserved",
    "memory_stats": "memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
}


def _complete_accelerator() -> None:
    """Have those functions of ``torch.accelerator`` that torch_npu does not serve be torch.npu's.

    Needed by 0.26 to 0.33, which measure memory with them; recognised by each function raising; can go when torch_npu
    registers its allocator with torch.accelerator.
    """
    for name, ours in _ACCELERATOR_NAMES.items():
        original = getattr(torch.accelerator, name, None)
        if original is not None and _raises(original):
            setattr(torch.accelerator, name, functools.partial(getattr(torch.npu, ours)))


def _raises(function: Callable[..., Any]) -> bool:
    try:
        function()
    except (RuntimeError, NotImplementedError, AttributeError):
        return True
    return False


def replace_triton_kernels(runner: Any) -> None:
    """Without Triton for the NPU, have `runner` and the rest of vLLM use the fallbacks of vLLM's CPU model runner.

    For the slots of a step they call a symbol that dispatch serves, with the operator ``compute_slot_mapping``. Needed
    by 0.26 to 0.30; recognised by the method; from 0.32 on ``Platform.register_triton_kernel_overrides`` does it.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    replace = getattr(CPUModelRunner, "_postprocess_triton", None)
    if not HAS_TRITON and replace is not None:
        replace(runner)
