"""What this distribution declares to vllm-fl under the entry-point group ``vllm_fl.backends``."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from vllm_fl.dispatch.types import Availability, BackendImplKind
from vllm_fl.plugins import BackendPlugin

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpRegistry

VISIBLE = "CUDA_VISIBLE_DEVICES"


def probe() -> Availability:
    """Whether there is an NVIDIA device that this process may use, and a PyTorch that can. Initialises no device."""
    from vllm_fl.plugins.native import nvidia_devices

    devices = nvidia_devices()
    if not devices:
        return Availability(False, "the NVIDIA driver's management library finds no device")
    if os.environ.get(VISIBLE, "0").strip() in {"", "-1"}:
        return Availability(False, f"{VISIBLE}={os.environ[VISIBLE]!r} hides every NVIDIA device")
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return Availability(False, "PyTorch is not installed; pip install torch")
    if torch.endswith("+cpu"):
        return Availability(False, f"torch {torch} is built for the CPU; install a CUDA build of torch")
    return Availability(True, f"{devices} NVIDIA device{'s' if devices > 1 else ''}")


PLUGIN = BackendPlugin(
    name="nvidia",
    kind=BackendImplKind.VENDOR,
    vendor="nvidia",
    device_type="cuda",
    probe="vllm_fl_nvidia.plugin:probe",
    register="vllm_fl_nvidia.plugin:register",
    platform="vllm_fl_nvidia.platform.NvidiaPlatform",
    config="vllm_fl_nvidia:nvidia.yaml",
)


def register(registry: OpRegistry) -> None:
    """Register vLLM's compiled kernels as implementations of kind vendor. Imports torch, and no kernel."""
    from . import ops

    registry.register_many(ops.implementations())
