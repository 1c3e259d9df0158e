"""What the distribution declares, and whether it says that this machine has an NPU."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.config import check_file
from vllm_fl.dispatch import BackendImplKind, OpRegistry, get_default_manager, reset_default_manager
from vllm_fl.plugins import installed_backends, reset_platform, resolve_platform
from vllm_fl_ascend import plugin
from vllm_fl_ascend.plugin import PLUGIN, probe

SIMULATION = Path(__file__).parent / "simulated_torch_npu"
NO_TORCH_NPU = "torch_npu is not installed; install the torch-npu of torch's version"


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("VLLM_FL_PLATFORM", raising=False)
    reset_platform()
    reset_default_manager()
    yield
    reset_platform()
    reset_default_manager()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`machine(devices, torch_npu=...)`: a machine with these device nodes and this version of torch_npu."""

    def make(*devices: str, torch_npu: str | None = "2.13.0") -> None:
        for name in devices:
            (tmp_path / name).touch()
        versions = {"torch": "2.13.0+cpu", "torch_npu": torch_npu}
        monkeypatch.setattr(plugin, "DEVICE_FOLDER", tmp_path)
        monkeypatch.setattr(plugin, "find_spec", lambda name: object() if versions[name] else None)
        monkeypatch.setattr(plugin, "version", versions.__getitem__)

    return make


def test_declaration() -> None:
    assert (PLUGIN.name, PLUGIN.kind, PLUGIN.vendor) == ("ascend", BackendImplKind.VENDOR, "ascend")
    assert (PLUGIN.device_type, PLUGIN.platform) == ("npu", "vllm_fl_ascend.platform.AscendPlatform")
    assert not PLUGIN.fallback


def test_shown_among_the_installed_backends() -> None:
    (found,) = [b for b in installed_backends() if b.distribution == "vllm-fl-ascend"]
    assert found.plugin == PLUGIN
    assert found.error is None


@pytest.mark.parametrize(
    ("devices", "torch_npu", "reason"),
    [
        (["davinci0"], None, NO_TORCH_NPU),
        (
            ["davinci0"],
            "2.12.0.post3",
            "torch_npu 2.12.0.post3 is not for torch 2.13.0+cpu; pip install 'torch-npu==2.13.*'",
        ),
        (
            ["davinci_manager", "null"],
            "2.13.0",
            "no device node {}/davinci<N>: the Ascend driver is not loaded, or a container was started without its "
            "devices",
        ),
        (["davinci_manager", "davinci0", "davinci7"], "2.13.0.post1", ""),
    ],
    ids=["no torch_npu", "other torch", "no device", "complete"],
)
def test_probe(machine: Any, tmp_path: Path, devices: list[str], torch_npu: str | None, reason: str) -> None:
    machine(*devices, torch_npu=torch_npu)
    answer = probe()
    assert (answer.ok, answer.reason) == (not reason, reason.format(tmp_path))


def test_probe_without_metadata(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch_npu built from source may have none; then it is not judged."""
    machine("davinci0")

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(plugin, "version", version)
    assert probe().ok


def test_chosen_where_there_is_a_device(machine: Any) -> None:
    machine("davinci0")
    choice = resolve_platform()
    assert (choice.plugin, choice.reason) == (PLUGIN, "its probe succeeds")


def test_not_chosen_elsewhere(machine: Any) -> None:
    machine("davinci0", torch_npu=None)
    choice = resolve_platform()
    assert choice.plugin != PLUGIN
    assert ("ascend", NO_TORCH_NPU) in choice.rejected


def test_operators() -> None:
    registry = OpRegistry()
    plugin.register(registry)
    registered = {
        (operator, impl.impl_id, impl.vendor, impl.priority)
        for operator, impls in registry.snapshot().impls_by_op.items()
        for impl in impls
    }
    first = (
        *("apply_top_k_top_p", "attention_backend", "fused_experts", "gelu_and_mul"),
        *("gemma_rms_norm", "grouped_topk"),
        *("reshape_and_cache", "rms_norm", "rotary_embedding", "silu_and_mul", "topk_sigmoid", "topk_softmax"),
    )
    assert registered == {
        *((name, "vendor.ascend", "ascend", 100) for name in first),
        *((name, "vendor.ascend.atb", "ascend", 90) for name in ("reshape_and_cache", "rotary_embedding")),
    }


def test_not_available_without_torch_npu() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    impls = [i for i in manager.registry.snapshot().impls_by_op["rms_norm"] if i.vendor == "ascend"]
    assert [impl.availability().reason for impl in impls] == ["torch_npu is not loaded; the Ascend platform loads it"]


def test_platform_file_is_valid_package_data() -> None:
    with importlib.resources.as_file(importlib.resources.files("vllm_fl_ascend") / "ascend.yaml") as path:
        assert PLUGIN.config == f"vllm_fl_ascend:{path.name}"
        assert not check_file(path)


def test_probe_loads_neither_torch_nor_torch_npu() -> None:
    code = "import json, sys, vllm_fl_ascend.plugin as p; p.probe(); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(SIMULATION), "PATH": ""},
    )
    assert not {"torch", "triton", "vllm", "torch_npu"} & set(json.loads(done.stdout))


def test_one_version() -> None:
    import vllm_fl_ascend

    assert vllm_fl_ascend.__version__ == importlib.metadata.version("vllm-fl-ascend")
