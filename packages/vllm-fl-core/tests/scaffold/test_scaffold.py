"""The generator: names that cannot be used, and the files that it writes. Building and serving is tested elsewhere."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest
import yaml

from vllm_fl.cli import main
from vllm_fl.config import load_settings
from vllm_fl.dispatch import BackendImplKind
from vllm_fl.errors import ConfigError
from vllm_fl.plugins import BackendPlugin, InstalledBackend
from vllm_fl.scaffold import NewBackend, write

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Acme",
            "'Acme' cannot be a backend's name: lower-case letters, digits, '-' and '_', from a letter on;"
            " did you mean 'acme'?",
        ),
        (
            "acme chip",
            "'acme chip' cannot be a backend's name: lower-case letters, digits, '-' and '_', from a letter on;"
            " did you mean 'acme-chip'?",
        ),
        ("", "'' cannot be a backend's name: lower-case letters, digits, '-' and '_', from a letter on"),
        (
            "class",
            "'class' cannot be a backend's name: it is a keyword of Python; take your company's or your chip's",
        ),
        (
            "platform",
            "'platform' cannot be a backend's name: it is a name that vllm-fl or the distribution uses; take your"
            " company's or your chip's",
        ),
        (
            "vendor",
            "'vendor' cannot be a backend's name: it is a name that vllm-fl or the distribution uses; take your"
            " company's or your chip's",
        ),
        ("chip", "a module vllm_fl_chip is installed already; choose another name than 'chip'"),
        ("core", "'core' cannot be a backend's name: vllm-fl-core is a distribution of vllm-fl itself"),
    ],
)
def test_name(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "chip":
        monkeypatch.setattr("vllm_fl.scaffold.generator.find_spec", lambda module: module == "vllm_fl_chip" or None)
    with pytest.raises(ConfigError) as caught:
        NewBackend(name)
    assert str(caught.value) == message


def test_name_of_an_installed_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    present = (InstalledBackend(None, "acme-vllm", "acme"),)
    monkeypatch.setattr("vllm_fl.plugins.installed_backends", lambda: present)
    with pytest.raises(ConfigError) as caught:
        NewBackend("acme")
    assert str(caught.value) == "a backend 'acme' is installed already, by acme-vllm; choose another name"


@pytest.mark.parametrize(
    ("device", "sdk", "message"),
    [
        ("npu:0", "", "--device 'npu:0' is not the name of a PyTorch device"),
        ("npu", "torch npu", "--sdk 'torch npu': it is not the name of a top-level module, such as torch_npu"),
        ("cpu", "torch_cpu", "--sdk 'torch_cpu': the CPU needs none"),
    ],
)
def test_device_and_sdk(device: str, sdk: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NewBackend("acme", device, sdk)
    assert str(caught.value).startswith(message)


def test_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "acme-backend").mkdir()
    (tmp_path / "acme-backend/notes.txt").touch()
    with pytest.raises(ConfigError) as caught:
        write(NewBackend("acme"), tmp_path / "acme-backend")
    shown = str(tmp_path / "acme-backend")
    assert str(caught.value) == f"{shown!r} is not empty; name another folder with --dir, or remove it"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"is a file; name another folder"):
        write(NewBackend("acme"), tmp_path / "file")


BACKENDS = [NewBackend("acme"), NewBackend("big-corp", "npu"), NewBackend("x_1", "xpu2", "x1_torch")]
each = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


@each
def test_what_is_written(backend: NewBackend) -> None:
    files = backend.render()
    package = f"src/{backend.package}"
    assert {"pyproject.toml", "README.md", "tox.ini", ".github/workflows/ci.yml", f"{package}/py.typed"} <= set(files)
    assert (f"{package}/worker.py" in files) == (f"{package}/device.py" in files) == (backend.device != "cpu")
    for name, text in files.items():
        assert "{{" not in text.replace("${{", ""), name
        assert "{%" not in text, name
        assert text.endswith("\n") or not text, name
        assert max(map(len, text.splitlines()), default=0) <= 120 or name.endswith((".md", ".toml")), name
        if name.endswith(".py"):
            assert ast.get_docstring(ast.parse(text)), name


@each
def test_metadata_and_declaration_agree(backend: NewBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(backend, tmp_path)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["name"] == backend.distribution
    assert all("<" in requirement and ">=" in requirement for requirement in project["dependencies"])
    (target,) = project["entry-points"]["vllm_fl.backends"].values()
    assert list(project["entry-points"]["vllm_fl.backends"]) == [backend.name]
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    from vllm_fl.plugins import load_object

    plugin = load_object(target)
    assert isinstance(plugin, BackendPlugin)
    assert (plugin.name, plugin.vendor, plugin.device_type) == (backend.name, backend.name, backend.device)
    assert not load_object(plugin.probe)()
    for text in (plugin.probe, plugin.register):
        assert callable(load_object(text))
    for module in [module for module in sys.modules if module.partition(".")[0] == backend.package]:
        del sys.modules[module]


def test_frame_of_the_platform_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the SDK the platform is the CPU; the class for the device has all that vLLM asks of one."""
    from vllm_fl.testing.platform_class import problems_of

    write(NewBackend("big-corp", "npu"), tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    kind = BackendImplKind.VENDOR
    for name in ("BigCorpPlatform", "OnDevice"):
        plugin = BackendPlugin("big-corp", kind, "big-corp", platform=f"vllm_fl_big_corp.platform.{name}")
        assert list(problems_of(plugin, is_here=False)) == []
    from vllm_fl_big_corp.platform import BigCorpPlatform, OnDevice

    assert (BigCorpPlatform.device_type, OnDevice.device_type) == ("cpu", "npu")


@each
def test_platform_file_and_known_gaps(backend: NewBackend, tmp_path: Path) -> None:
    from vllm_fl.testing import AllowList

    write(backend, tmp_path)
    package = tmp_path / "src" / backend.package
    assert load_settings({}, package / f"{backend.name}.yaml").prefer == "vendor"
    assert list(AllowList.read(package / "conformance.yaml").entries) == []
    assert yaml.safe_load((tmp_path / ".github/workflows/ci.yml").read_text())["jobs"]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", "acme", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["distribution"] == "vllm-fl-acme"
    assert answer["folder"] == "acme-backend"
    assert all(Path(file).is_file() for file in answer["files"])
    assert answer["next"] == [
        "pip install ./acme-backend",
        "pytest acme-backend",
        "VLLM_FL_PLATFORM=acme vllm-fl quickstart",
    ]
    assert main(["new-backend", "acme"]) == 2
    assert capsys.readouterr().err == (
        "Error: 'acme-backend' is not empty; name another folder with --dir, or remove it\n"
    )
