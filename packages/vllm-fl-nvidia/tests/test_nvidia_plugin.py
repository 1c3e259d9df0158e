"""What the distribution declares, and when its probe answers."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import subprocess
import sys

import pytest

from vllm_fl.config import check_file
from vllm_fl.dispatch import BackendImplKind, get_default_manager, reset_default_manager
from vllm_fl.plugins import installed_backends, native, reset_platform, resolve_platform
from vllm_fl_nvidia import plugin
from vllm_fl_nvidia.ops import IN_LAYERS, OPERATORS
from vllm_fl_nvidia.plugin import PLUGIN, probe

NO_DEVICE = "the NVIDIA driver's management library finds no device"


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch: pytest.MonkeyPatch):
    for name in ("VLLM_FL_PLATFORM", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    reset_platform()
    reset_default_manager()
    yield
    reset_platform()
    reset_default_manager()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """machine(devices, torch): a machine with so many NVIDIA devices and this version of torch (simulated)."""

    def make(devices: int, torch: str | None) -> None:
        def version(name: str) -> str:
            if torch is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return torch

        monkeypatch.setattr(native, "nvidia_devices", lambda: devices)
        monkeypatch.setattr(plugin, "version", version)

    return make


def test_declaration() -> None:
    assert (PLUGIN.name, PLUGIN.kind, PLUGIN.vendor) == ("nvidia", BackendImplKind.VENDOR, "nvidia")
    assert (PLUGIN.device_type, PLUGIN.fallback) == ("cuda", False)


@pytest.mark.parametrize(
    ("devices", "torch", "visible", "ok", "reason"),
    [
        pytest.param(0, "2.13.0", None, False, NO_DEVICE, id="no-device"),
        pytest.param(1, "2.13.0", None, True, "1 NVIDIA device", id="one"),
        pytest.param(8, "2.13.0+cu130", "3", True, "8 NVIDIA devices", id="eight"),
        pytest.param(1, "2.13.0", "", False, "CUDA_VISIBLE_DEVICES='' hides every NVIDIA device", id="hidden"),
        pytest.param(1, "2.13.0", "-1", False, "CUDA_VISIBLE_DEVICES='-1' hides every NVIDIA device", id="minus-one"),
        pytest.param(
            1,
            "2.13.0+cpu",
            None,
            False,
            "torch 2.13.0+cpu is built for the CPU; install a CUDA build of torch",
            id="cpu-torch",
        ),
        pytest.param(1, None, None, False, "PyTorch is not installed; pip install torch", id="no-torch"),
    ],
)
def test_probe(
    machine,
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    torch: str | None,
    visible: str | None,
    ok: bool,
    reason: str,
) -> None:
    machine(devices, torch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    answer = probe()
    assert (answer.ok, answer.reason) == (ok, reason)


def test_chosen_where_there_is_a_device(machine) -> None:
    machine(1, "2.13.0")
    assert resolve_platform().plugin == PLUGIN


def test_not_chosen_without_one(machine) -> None:
    machine(0, "2.13.0")
    choice = resolve_platform()
    assert choice.plugin != PLUGIN
    assert ("nvidia", NO_DEVICE) in choice.rejected


def test_shown_among_the_installed_backends() -> None:
    (found,) = [b for b in installed_backends() if b.distribution == "vllm-fl-nvidia"]
    assert (found.plugin, found.error) == (PLUGIN, None)


def test_registers_its_operators_and_serves_none_without_kernels() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    snapshot = manager.registry.snapshot().impls_by_op
    ours = {name: impl for name, impls in snapshot.items() for impl in impls if impl.vendor == "nvidia"}
    assert set(ours) == {*OPERATORS, *IN_LAYERS}
    for name, impl in ours.items():
        answer = impl.availability()
        assert not answer.ok, name
        assert answer.reason.startswith("vLLM is not installed with its CUDA kernels ("), name
        assert manager.get_selected_impl_id(name) != impl.impl_id


def test_platform_file_is_valid_package_data() -> None:
    with importlib.resources.as_file(importlib.resources.files("vllm_fl_nvidia") / "nvidia.yaml") as path:
        assert PLUGIN.config == f"vllm_fl_nvidia:{path.name}"
        assert not check_file(path)


def test_import_needs_neither_torch_nor_sdk() -> None:
    code = "import json, sys, vllm_fl_nvidia.plugin as p; p.probe(); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "triton", "vllm", "flash_attn", "flashinfer"} & set(json.loads(done.stdout))


def test_one_version() -> None:
    import vllm_fl_nvidia

    assert vllm_fl_nvidia.__version__ == importlib.metadata.version("vllm-fl-nvidia")
