"""The two platform classes, on a machine without a device: the driver's answers and vLLM's extensions are simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

#: One NVIDIA device of capability 9.0, in front of everything else.
MACHINE = """
import json, os, sys, types
from importlib.machinery import ModuleSpec
from vllm_fl.plugins import native
from vllm_fl_nvidia import plugin
native.nvidia_devices = lambda: 1
plugin.version = lambda name: "2.13.0"

def module(name):
    made = sys.modules[name] = types.ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    return made

ANSWERS = {
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetName": "Simulated H200",
    "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=141 << 30),
    "nvmlDeviceGetCount": 1,
}
class Nvml:
    # Finds a module in the place of vLLM's copy of pynvml.
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "vllm.third_party.pynvml" else None
    def create_module(self, spec):
        return None
    def exec_module(self, nvml):
        nvml.NVMLError = Exception
        for name in ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID", *ANSWERS):
            setattr(nvml, name, lambda *args, name=name: ANSWERS.get(name, args[0] if args else None))
sys.meta_path.insert(0, Nvml())
"""
COMPILED = """
from vllm_fl.dispatch.types import AVAILABLE
from vllm_fl_nvidia import ops
native.has_kernels = lambda *patterns: True
ops.triton_attention = lambda: AVAILABLE
for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
    module(name)
"""


def run(*parts: str, **env: str) -> Any:
    """What a script prints last, as JSON."""
    script = "\n".join(textwrap.dedent(part) for part in (MACHINE, *parts))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


DESCRIBE = """
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform as p
from vllm_fl.integration import general_plugin, layers
general_plugin()
p.pre_register_and_update()
config = VllmConfig()
found = {
    "class": type(p).__name__, "cuda": p.is_cuda(), "out_of_tree": p.is_out_of_tree(), "device": p.device_type,
    "name": p.get_device_name(), "capability": list(p.get_device_capability()), "memory": p.get_device_total_memory(),
    "worker": config.parallel_config.worker_cls, "graphs": p.support_static_graph_mode(),
    "passes": p.get_pass_manager_cls(), "layers": [layer.name for layer in layers.replaced(p.native_vendor)],
    "custom_ops": sorted(config.compilation_config.custom_ops), "cuda_initialised": torch.cuda.is_initialized(),
    "v2": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
}
"""
ATTENTION = """
from types import SimpleNamespace
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Names
from vllm_fl.dispatch import SelectionPolicy, set_global_policy
for base in CudaPlatform.__mro__:
    if "get_attn_backend_cls" in vars(base):
        base.get_attn_backend_cls = classmethod(lambda cls, name, config, heads=None: f"vllm:{name and name.name}")
        break
config = SimpleNamespace(use_mla=False, use_sparse=False)
def chosen():
    return [p.get_attn_backend_cls(name, config) for name in (None, Names.CUSTOM, Names.FLASH_ATTN)]
found["vendor"] = chosen()
set_global_policy(SelectionPolicy.from_dict(per_op_order={"attention_backend": ["impl:vendor.nvidia.flash_triton"]}))
found["mixed"] = chosen()
base.get_attn_backend_cls = classmethod(lambda cls, *rest: Names.FLASH_ATTN.get_path())
found["mixed and FlashAttention"] = chosen()
set_global_policy(SelectionPolicy.from_dict(per_op_order={"attention_backend": ["reference"]}))
found["reference"] = chosen()
"""
VISIBLE = """
import vllm_fl_nvidia.platforms.triton_only as platform
asked = found["asked"] = []
platform.pynvml.nvmlDeviceGetHandleByIndex = lambda index: asked.append(index)
platform.pynvml.nvmlDeviceGetHandleByUUID = lambda name: asked.append(name)
for device in (0, 1):
    platform.TritonNvidiaPlatform.get_device_name(device)
"""
TUNED = """
from vllm_fl.tune import table
table.key_of = lambda vllm_config: {}
table.look_up = lambda key: (table.Entry(key, {"rms_norm": ["reference"]}, 1.1), [])
config.compilation_config.custom_ops.clear()
config.model_config = object()
p.apply_config_platform_defaults(config)  # as of a draft model: it is stamped
found["derived"] = list(config.compilation_config.custom_ops)
config.additional_config.clear()
p.apply_config_platform_defaults(config)
found["tuned"] = config.compilation_config.custom_ops
"""
ALL_LAYERS = """
config.compilation_config.custom_ops.clear()
config.additional_config["vllm_fl_all_layers"] = True
p.apply_config_platform_defaults(config)
found["all"] = sorted(config.compilation_config.custom_ops)
"""
SHOW = "print(json.dumps(found))"


def test_a_vllm_with_its_kernels_stays_cuda_and_keeps_its_layers() -> None:
    found = run(COMPILED, DESCRIBE, ALL_LAYERS, ATTENTION, SHOW)
    assert (found["class"], found["cuda"], found["out_of_tree"]) == ("CompiledNvidiaPlatform", True, False)
    assert found["worker"] == "vllm_fl_nvidia.worker.NvidiaWorker"
    assert found["passes"].startswith("vllm.compilation.")
    assert found["layers"] == []
    assert not [name for name in found["custom_ops"] if name.startswith("+")]
    assert {"+rms_norm", "+silu_and_mul", "+unquantized_fused_moe"} <= set(found["all"])
    assert not found["cuda_initialised"]
    # vLLM chooses where dispatch says vendor, and judges what the user names.
    assert found["vendor"] == ["vllm:None", "vllm:None", "vllm:FLASH_ATTN"]
    # The mixed backend takes the place of FlashAttention only, and not where the user names it.
    assert found["mixed"] == found["vendor"]
    mixed, flash = (
        "vllm_fl_nvidia.flash_triton.FlashTritonBackend",
        "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",
    )
    assert found["mixed and FlashAttention"] == [mixed, mixed, flash]
    ours = "vllm_fl_reference.attention.PagedAttentionBackend"
    assert found["reference"] == [ours, ours, flash]


def test_what_was_tuned_is_switched_on_in_time() -> None:
    """Which layers vLLM compiles and which it asks us for is settled with the engine's configuration."""
    found = run(COMPILED, DESCRIBE, TUNED, SHOW, VLLM_FL_TUNED="auto")
    assert (found["derived"], found["tuned"]) == ([], ["+rms_norm"])
    assert run(COMPILED, DESCRIBE, TUNED, SHOW)["tuned"] == []


def test_a_vllm_without_kernels_runs_out_of_tree() -> None:
    found = run(DESCRIBE, VISIBLE, SHOW, CUDA_VISIBLE_DEVICES="3,GPU-17")
    assert (found["class"], found["cuda"], found["out_of_tree"]) == ("TritonNvidiaPlatform", False, True)
    assert (found["device"], found["name"], found["capability"]) == ("cuda", "Simulated H200", [9, 0])
    assert found["memory"] == 141 << 30
    assert found["worker"] == "vllm_fl_nvidia.worker.NvidiaWorker"
    assert found["graphs"]
    assert "rms_norm" in found["layers"]
    assert found["v2"] == "0"
    assert not found["cuda_initialised"]
    assert found["asked"] == [3, "GPU-17"]  # devices are counted as CUDA_VISIBLE_DEVICES counts
