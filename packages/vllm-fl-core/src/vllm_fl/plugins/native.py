"""Whether vLLM has a platform of its own on this machine, judged without importing vLLM.

vLLM asks its own probes only after the plug-ins, and importing ``vllm.platforms`` from a plug-in is circular. The
signs below are those that vLLM's probes go by (versions 0.26 to 0.33). In doubt the answer is yes: a fallback platform
that stays silent can be asked for, one that answers takes over a run that worked without it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING

from .requirements import installed_vllm

if TYPE_CHECKING:
    from vllm_fl.dispatch.types import Availability

_NVML_SUCCESS = 0
_OWN_PLUGIN = "vllm_fl.integration:platform_plugin"


def has_native_platform() -> Availability:
    """Whether vLLM would run here without us; the reason says by what sign."""
    from vllm_fl.dispatch.types import Availability

    installed = installed_vllm()
    if installed is None:
        return Availability(False, "vLLM is not installed")
    signs = (
        _cpu(installed),
        _tpu(),
        _cuda(),
        _rocm(),
        _xpu(),
        _other_plugin(),
    )
    found = [sign for sign in signs if sign is not None]
    if found:
        return Availability(True, "; ".join(found))
    return Availability(False, f"vLLM {installed} was built for no device of this machine")


def _cpu(installed: str) -> str | None:
    if "cpu" in installed:
        return f"vLLM {installed} is a CPU build"
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        return "VLLM_TARGET_DEVICE is cpu"
    if sys.platform.startswith("darwin"):
        return "vLLM runs on the CPU under macOS"
    return None


def _tpu() -> str | None:
    if _is_importable("libtpu"):
        return "libtpu is installed"
    if "proxy" in os.environ.get("JAX_PLATFORMS", "").lower():
        return "JAX_PLATFORMS names a TPU proxy"
    return None


def _cuda() -> str | None:
    if not has_kernels("_C*.so", "_moe_C*.so"):
        return None
    if nvidia_devices() > 0:
        return "vLLM has CUDA kernels and there is an NVIDIA device"
    if Path("/etc/nv_tegra_release").is_file() or Path("/sys/class/tegra-firmware").exists():
        return "vLLM has CUDA kernels and this is a Jetson"
    return None


def _rocm() -> str | None:
    if has_kernels("_rocm_C*.so") and Path("/dev/kfd").exists():
        return "vLLM has ROCm kernels and there is an AMD device"
    return None


def _xpu() -> str | None:
    try:
        is_xpu = "xpu" in version("torch")
    except PackageNotFoundError:
        return None
    if is_xpu and any(Path("/dev/dri").glob("renderD*")):
        return "torch is an XPU build and there is a render device"
    return None


def _other_plugin() -> str | None:
    """A platform plug-in of another distribution; whether it would answer is only known by calling it."""
    for point in entry_points(group="vllm.platform_plugins"):
        if point.value != _OWN_PLUGIN and _is_enabled(point):
            owner = point.dist.name if point.dist is not None else "another distribution"
            return f"{owner} brings the vLLM platform plug-in {point.name!r}"
    return None


def _is_enabled(point: EntryPoint) -> bool:
    names = os.environ.get("VLLM_PLUGINS")
    return names is None or point.name in names.split(",")


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # ValueError: it is in sys.modules without a spec
        return module in sys.modules


def has_kernels(*patterns: str) -> bool:
    """Whether vLLM's package holds compiled extensions of these names, such as ``_C*.so``. Does not import it."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return any(next(Path(folder).glob(pattern), None) for folder in folders for pattern in patterns)


def nvidia_devices() -> int:
    """Number of NVIDIA devices by the driver's management library, whatever ``CUDA_VISIBLE_DEVICES`` says."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != _NVML_SUCCESS:
            return 0
        try:
            count = ctypes.c_uint(0)
            return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _NVML_SUCCESS else 0
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no driver, or one without these functions
        return 0
