"""Switched off, vLLM behaves as if these distributions were not installed."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from e2e_support import HERE, Fresh, TinyModel


def observed(model: str) -> dict[str, Any]:
    """What vLLM makes of this machine, and what it does when asked for an engine."""
    import torch
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.platforms import current_platform

    try:
        config = EngineArgs(model=model).create_engine_config()
        outcome = f"worker {config.parallel_config.worker_cls}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    return {
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "outcome": outcome,
        "replaced": sorted(op_registry_oot),
        "symbols": sorted(name for name in ("compute_slot_mapping_kernel_impl",) if hasattr(torch.ops._C, name)),
        "accelerator": torch.accelerator.empty_cache.__module__,
        "variables": sorted(name for name in envs.environment_variables if name.startswith("VLLM_FL_")),
        "modules": sorted(name for name in sys.modules if name.split(".")[0] in ("vllm_fl", "vllm_fl_reference")),
    }


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A Python with the same packages, less ours: site-packages by links, and no ``.pth`` file read."""
    folder = tmp_path_factory.mktemp("without-us")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "vllm_fl" not in entry.name and not entry.name.startswith("__editable__"):
            (folder / entry.name).symlink_to(entry)
    start = f"import sys, runpy; sys.path[:0] = [{str(HERE)!r}, {str(folder)!r}]; sys.argv = sys.argv[1:]; "
    return sys.executable, "-S", "-c", start + "runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize(
    "switch",
    [
        pytest.param({"VLLM_PLUGINS": ""}, id="no-plugins"),
        pytest.param({"VLLM_FL_PREFER_ENABLED": "0", "VLLM_FL_PREFER": "nonsense"}, id="disabled"),
    ],
)
def test_switched_off(switch: dict[str, str], reference: dict[str, Any], fresh: Fresh, tiny_llama: TinyModel) -> None:
    outcome = fresh(observed, model=str(tiny_llama.path), env=switch)
    ours = outcome.value.pop("modules")
    variables = outcome.value.pop("variables")
    assert outcome.value == reference
    # To vLLM's check of unknown variables those that are set are known, so that it does not refuse to start.
    assert variables == sorted(name for name in switch if name.startswith("VLLM_FL_"))
    loaded = ("vllm_fl_reference", "vllm_fl.integration.platform", "vllm_fl.integration.layers")
    assert not [name for name in ours if name.startswith(loaded)]
    assert "environment variable detected: VLLM_FL" not in outcome.log


@pytest.fixture(scope="module")
def reference(without: tuple[str, ...], fresh: Fresh, tiny_llama: TinyModel) -> dict[str, Any]:
    """What is observed without us."""
    outcome = fresh(observed, model=str(tiny_llama.path), python=without)
    assert outcome.value.pop("modules") == outcome.value.pop("variables") == []
    return outcome.value
