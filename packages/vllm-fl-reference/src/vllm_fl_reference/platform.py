"""The CPU reference platform: PyTorch only, no compiled kernel of vLLM."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm.utils.cpu_resource_utils import DEVICE_CONTROL_ENV_VAR, get_memory_node_info, get_visible_memory_node

from vllm_fl.errors import ConfigError
from vllm_fl.integration.platform import OutOfTreePlatform
from vllm_fl.logging import get_logger

from .features import settle_lora, settle_speculation
from .threads import make_forks_safe

__all__ = ["ReferencePlatform"]

GIB = 1 << 30

_CGROUP = Path("/sys/fs/cgroup")


class ReferencePlatform(OutOfTreePlatform):
    """Runs vLLM's models on the host's processors through the reference implementations.

    An out-of-tree platform on device ``cpu``: vLLM's own CPU platform would look for its compiled kernels.
    """

    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = DEVICE_CONTROL_ENV_VAR
    # For vLLM's small compiled helpers (log-probabilities, embeddings): a C++ compilation of seconds in the middle of
    # a request costs more than it gains, and needs a compiler. The model itself goes through get_compile_backend.
    simple_compile_backend = "eager"
    worker_cls = "vllm_fl_reference.worker.ReferenceWorker"

    # --- the device ---

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of the memory node, or of the container if that has less."""
        return int(get_memory_node_info(device_id).total_memory)

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Bytes in use on the memory nodes that this process may use."""
        nodes = [get_memory_node_info(node) for node in get_visible_memory_node()]
        return float(sum(node.total_memory - node.available_memory for node in nodes))

    @classmethod
    def free_memory(cls) -> int:
        """Bytes that can still be allocated on this host, or in this container if that is less."""
        free = int(psutil.virtual_memory().available)
        headroom = _container_headroom()
        return free if headroom is None else min(free, headroom)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        torch.cpu.set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Nothing left to do: ``torch.manual_seed`` seeds the CPU."""

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.no_grad()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return torch.get_num_threads()

    @classmethod
    def get_compile_backend(cls) -> str:
        return "inductor"

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "vllm_fl_reference.lora.GroupedLoRA"

    def is_sleep_mode_available(self) -> bool:
        return True

    # --- configuration ---

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        super().pre_register_and_update(parser)
        make_forks_safe()
        # Inductor's pool of compile processes cannot be started from the workers of the multiprocess executor.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        settle_speculation(vllm_config)
        settle_lora(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.mode is None and not _has_compiler():
            from vllm.config import CompilationMode

            get_logger(__name__).warning(
                "no C++ compiler (g++, clang++, or what CXX names): the model runs without torch.compile, and slower; "
                "remedy: install g++ (apt-get install g++)"
            )
            compilation.mode = CompilationMode.NONE
        # Horizontal fusion, which vLLM asks for on every platform but its own CPU platform; inductor has it for GPUs.
        compilation.inductor_compile_config.update(combo_kernels=False, benchmark_combo_kernel=False)
        super().apply_config_platform_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        _settle_cache(vllm_config.cache_config)
        _settle_scheduling(vllm_config)
        super().check_and_update_config(vllm_config)


def _has_compiler() -> bool:
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return any(name and shutil.which(name.split()[0]) for name in names)


def _settle_cache(cache_config: Any) -> None:
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if not text.strip() or cache_config.kv_cache_memory_bytes is not None:
        return
    if not text.strip().isdecimal():
        raise ConfigError(f"environment variable VLLM_CPU_KVCACHE_SPACE: {text!r} is not a whole number of GiB")
    cache_config.kv_cache_memory_bytes = int(text) * GIB or None


def _settle_scheduling(vllm_config: Any) -> None:
    log = get_logger(__name__)
    if vllm_config.model_config is not None and hasattr(vllm_config.model_config, "disable_cascade_attn"):
        vllm_config.model_config.disable_cascade_attn = True
    # It hides the host's work behind the device's; here both are the same processors.
    vllm_config.scheduler_config.async_scheduling = False
    parallel = vllm_config.parallel_config
    if parallel.enable_dbo:
        log.warning("--enable-dbo: there is no second stream to overlap with on a CPU; it is switched off")
        parallel.enable_dbo = False


def _container_headroom() -> int | None:
    """Bytes left below the memory limit of the control group (version 2, or 1); None without a limit."""
    for limit_file, used_file, stat_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (_CGROUP / limit_file).read_text().strip()
            used = int((_CGROUP / used_file).read_text())
            stat = (_CGROUP / used_file).with_name("memory.stat").read_text()
        except OSError:
            continue
        if limit == "max":
            return None
        # The page cache counts as used, but gives way; of a model just read from disk it holds every byte.
        cached = dict(line.split() for line in stat.splitlines() if line).get(stat_key, "0")
        return max(0, int(limit) - used + int(cached))
    return None
