"""Whether vLLM has a platform of its own, and whether its version is one that we support."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.plugins import SUPPORTED_VLLM, has_native_platform, native, requirements, vllm_version_warning
from vllm_fl.version import __version__

NONE = "vLLM 0.28.0 was built for no device of this machine"


@pytest.fixture(autouse=True)
def _bare_machine(site: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty build of vLLM 0.28.0 on a machine without devices."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(native, "Path", lambda path: tmp_path / "root" / str(path).lstrip("/"))
    monkeypatch.setattr(native, "nvidia_devices", lambda: 0)
    monkeypatch.setattr(sys, "platform", "linux")
    vllm(site, "0.28.0")
    site.install("torch", "2.13.0")


def vllm(site: Any, version: str, *kernels: str) -> None:
    for old in site.folder.glob("vllm-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    site.install("vllm", version, files={"vllm/__init__.py": "", **{f"vllm/{name}": "" for name in kernels}})


def device(tmp_path: Path, path: str) -> None:
    file = tmp_path / "root" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


@pytest.fixture
def real_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Devices under tmp_path/root, vLLM's package where it is."""

    def path(text: str) -> Path:
        inside = str(text).startswith(str(tmp_path))
        return Path(text) if inside else tmp_path / "root" / str(text).lstrip("/")

    monkeypatch.setattr(native, "Path", path)


def test_nothing_native() -> None:
    answer = has_native_platform()
    assert (answer.ok, answer.reason) == (False, NONE)


def test_vllm_is_not_imported() -> None:
    has_native_platform()
    assert "vllm" not in sys.modules


def test_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "installed_vllm", lambda: None)
    answer = has_native_platform()
    assert (answer.ok, answer.reason) == (False, "vLLM is not installed")


def test_cpu_build(site: Any) -> None:
    vllm(site, "0.28.0+cpu")
    answer = has_native_platform()
    assert (answer.ok, answer.reason) == (True, "vLLM 0.28.0+cpu is a CPU build")


def test_cpu_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "CPU")
    answer = has_native_platform()
    assert (answer.ok, answer.reason) == (True, "VLLM_TARGET_DEVICE is cpu")


def test_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert has_native_platform().reason == "vLLM runs on the CPU under macOS"


@pytest.mark.usefixtures("real_folders")
@pytest.mark.parametrize("kernel", ["_C.abi3.so", "_C_stable_libtorch.abi3.so", "_moe_C.abi3.so"])
def test_cuda(site: Any, monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    vllm(site, "0.28.0", kernel)
    assert not has_native_platform()
    monkeypatch.setattr(native, "nvidia_devices", lambda: 2)
    answer = has_native_platform()
    assert (answer.ok, answer.reason) == (True, "vLLM has CUDA kernels and there is an NVIDIA device")


@pytest.mark.usefixtures("real_folders")
def test_jetson(site: Any, tmp_path: Path) -> None:
    vllm(site, "0.28.0", "_C.abi3.so")
    device(tmp_path, "etc/nv_tegra_release")
    assert has_native_platform().reason == "vLLM has CUDA kernels and this is a Jetson"


@pytest.mark.usefixtures("real_folders")
def test_an_empty_build_beside_an_nvidia_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "nvidia_devices", lambda: 2)
    assert not has_native_platform()


@pytest.mark.usefixtures("real_folders")
def test_rocm(site: Any, tmp_path: Path) -> None:
    vllm(site, "0.28.0", "_C.abi3.so", "_rocm_C.abi3.so")
    assert not has_native_platform()
    device(tmp_path, "dev/kfd")
    assert has_native_platform().reason == "vLLM has ROCm kernels and there is an AMD device"


@pytest.mark.usefixtures("real_folders")
def test_xpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device(tmp_path, "dev/dri/renderD128")
    assert not has_native_platform()
    monkeypatch.setattr(native, "version", lambda name: "2.13.0+xpu")
    assert has_native_platform().reason == "torch is an XPU build and there is a render device"


def test_tpu(site: Any) -> None:
    site.install("libtpu", files={"libtpu/__init__.py": "raise AssertionError('imported')"})
    assert has_native_platform().reason == "libtpu is installed"


def test_tpu_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "proxy,cpu")
    assert has_native_platform().reason == "JAX_PLATFORMS names a TPU proxy"


@pytest.mark.parametrize(
    ("plugins", "native_platform"),
    [(None, True), ("fl,other", True), ("fl", False)],
    ids=["unset", "named", "excluded"],
)
def test_platform_plugin_of_another_distribution(
    site: Any, monkeypatch: pytest.MonkeyPatch, plugins: str | None, native_platform: bool
) -> None:
    group = "vllm.platform_plugins"
    site.install("vllm-fl-core", entry_points={group: {"fl": "vllm_fl.integration:platform_plugin"}})
    assert not has_native_platform()
    site.install("vllm-other", entry_points={group: {"other": "vllm_other:register"}})
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    answer = has_native_platform()
    expected = "vllm-other brings the vLLM platform plug-in 'other'" if native_platform else NONE
    assert (answer.ok, answer.reason) == (native_platform, expected)


class Nvml:
    """The driver's management library, with so many devices."""

    def __init__(self, devices: int, status: int = 0) -> None:
        self.devices, self.status, self.open = devices, status, 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += self.status == 0
        return self.status

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.devices
        return 0


@pytest.mark.parametrize(
    ("library", "expected"), [(Nvml(3), 3), (Nvml(0), 0), (Nvml(3, status=9), 0)], ids=["three", "none", "no driver"]
)
def test_nvidia_devices(monkeypatch: pytest.MonkeyPatch, library: Nvml, expected: int) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert native.nvidia_devices() == expected
    assert library.open == 0


def test_nvidia_devices_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.undo()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert native.nvidia_devices() == 0


@pytest.mark.parametrize("version", ["0.26.0", "0.28.0", "0.28.1+cpu", "0.33.9", "0.33.0rc1"])
def test_supported_versions(site: Any, version: str) -> None:
    vllm(site, version)
    assert vllm_version_warning() is None


RECURRENT = "models with a recurrent state, such as Qwen3-Next, where Triton is missing"


@pytest.mark.parametrize(
    ("version", "breaks"),
    [
        ("0.20.2", "no engine starts (layers that vllm-fl replaces are not there)"),
        ("0.22.1", RECURRENT),
        ("0.24.0", f"{RECURRENT}; gpt-oss (its expert weights are not found)"),
        ("0.24.1rc1", f"{RECURRENT}; gpt-oss (its expert weights are not found)"),
        *((version, "nothing so far") for version in ("0.25.1", "0.34.0", "0.34.0.dev7+g123", "1.0")),
    ],
)
def test_versions_outside_the_range(site: Any, version: str, breaks: str) -> None:
    vllm(site, version)
    assert vllm_version_warning() == (
        f"vLLM {version} is outside the range that vllm-fl-core {__version__} supports: 0.26 to 0.33. Known to break: "
        f"{breaks}. It continues, but may fail or give wrong results. Install a supported version: "
        "pip install 'vllm>=0.26,<0.34'"
    )


def test_version_that_cannot_be_read(site: Any) -> None:
    vllm(site, "dev")
    assert vllm_version_warning() == (
        f"vLLM dev is outside the range that vllm-fl-core {__version__} supports (its version cannot be read): 0.26 to "
        "0.33. Known to break: nothing so far. It continues, but may fail or give wrong results. "
        "Install a supported version: pip install 'vllm>=0.26,<0.34'"
    )


def test_no_warning_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "installed_vllm", lambda: None)
    assert vllm_version_warning() is None


def test_range() -> None:
    assert SUPPORTED_VLLM == ((0, 26), (0, 33))
