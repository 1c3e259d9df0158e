"""The five wheels in an environment that has neither torch nor vLLM: what is declared, and what works."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Wheel

Ask = Callable[..., Any]
ENTRY_POINTS = {
    "console_scripts": {"vllm-fl": "vllm_fl.cli:main"},
    "pytest11": {"vllm_fl": "vllm_fl.testing.plugin"},
    "vllm.general_plugins": {"fl": "vllm_fl.integration:general_plugin"},
    "vllm.platform_plugins": {"fl": "vllm_fl.integration:platform_plugin"},
    "vllm_fl.backends": {
        "ascend": "vllm_fl_ascend.plugin:PLUGIN",
        "flagos": "vllm_fl.flagos.plugin:PLUGIN",
        "nvidia": "vllm_fl_nvidia.plugin:PLUGIN",
        "reference": "vllm_fl_reference.plugin:PLUGIN",
    },
    "vllm_fl.communicators": {"flagcx": "vllm_fl_comm.plugin:PLUGIN"},
}


def test_pip_finds_no_conflict(clean_python: Path) -> None:
    done = subprocess.run([str(clean_python), "-I", "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_torch_and_vllm_are_absent(ask: Ask) -> None:
    """The premise of every other test here."""
    names = ["torch", "vllm", "triton", "numpy"]
    assert ask(f"import importlib.util as u; answer([n for n in {names} if u.find_spec(n)])") == []


def test_entry_points(ask: Ask) -> None:
    found = ask(
        "import importlib.metadata as m\n"
        "eps = [(d.name, e) for d in m.distributions() for e in d.entry_points if d.name.startswith('vllm-fl')]\n"
        "groups = {}\n"
        "for _, e in eps: groups.setdefault(e.group, {})[e.name] = e.value\n"
        "answer(groups)"
    )
    assert found == ENTRY_POINTS


# pytest11 is for pytest, which the clean environment does not have.
@pytest.mark.parametrize("group", sorted(ENTRY_POINTS.keys() - {"pytest11"}))
def test_entry_points_load_without_torch(ask: Ask, group: str) -> None:
    code = f"import importlib.metadata as m\nanswer([e.name for e in m.entry_points(group={group!r}) if e.load()])"
    assert set(ENTRY_POINTS[group]) <= set(ask(code))


def test_importing_core_stays_light(ask: Ask, record_testsuite_property: Callable[[str, object], None]) -> None:
    """The time is recorded, not judged; what would cost it is: none of the heavy requirements is imported."""
    modules, seconds = ask(
        "import time; start = time.perf_counter(); before = set(sys.modules)\n"
        "import vllm_fl\n"
        "answer([sorted(set(sys.modules) - before), time.perf_counter() - start])"
    )
    record_testsuite_property("import_vllm_fl_seconds", seconds)
    assert not {"pydantic", "rich", "typer", "yaml"} & set(modules)


@pytest.mark.parametrize("module", ["vllm_fl_reference", "vllm_fl_nvidia", "vllm_fl_ascend", "vllm_fl_comm"])
def test_top_modules_import(ask: Ask, module: str, wheels: dict[str, Wheel]) -> None:
    version = ask(f"import {module} as m, importlib.metadata as d; answer(d.version('{module}'.replace('_', '-')))")
    assert version == wheels["vllm-fl-core"].metadata["Version"]


def test_version_of_core_is_the_distributions(ask: Ask) -> None:
    stated, installed = ask(
        "import vllm_fl, importlib.metadata as m; answer([vllm_fl.__version__, m.version('vllm-fl-core')])"
    )
    assert stated == installed


def test_backends_are_found(ask: Ask) -> None:
    found = ask(
        "from vllm_fl.plugins import installed_backends\n"
        "answer({b.entry_point: [b.distribution, b.plugin.name, b.error] for b in installed_backends()})"
    )
    owners = {"flagos": "core", **{name: name for name in ("ascend", "nvidia", "reference")}}
    assert found == {name: [f"vllm-fl-{owner}", name, None] for name, owner in owners.items()}


def test_backends_of_other_devices_are_not_chosen(ask: Ask) -> None:
    chosen, rejected = ask(
        "from vllm_fl.plugins import resolve_platform\n"
        "choice = resolve_platform()\n"
        "answer([choice.plugin and choice.plugin.name, [list(r) for r in choice.rejected]])"
    )
    assert chosen not in ("nvidia", "ascend")
    reasons = dict(rejected)
    assert reasons["ascend"] == "torch_npu is not installed; install the torch-npu of torch's version"
    assert reasons["nvidia"]


@pytest.mark.parametrize("name", ["nvidia", "ascend"])
def test_platform_files_are_valid(ask: Ask, name: str) -> None:
    errors = ask(
        "from importlib.resources import as_file, files\n"
        "from vllm_fl.config import check_file\n"
        f"with as_file(files('vllm_fl_{name}') / '{name}.yaml') as path: answer([str(e) for e in check_file(path)])"
    )
    assert errors == []


def test_dispatch_works_without_torch(ask: Ask) -> None:
    result, chosen = ask(
        "from vllm_fl.dispatch import *\n"
        "from vllm_fl.dispatch import BackendImplKind, OpImpl, call_op, get_default_manager\n"
        "manager = get_default_manager()\n"
        "manager.ensure_initialized()\n"
        "manager.registry.register_impl(OpImpl('silu_and_mul', 'vendor.acme', BackendImplKind.VENDOR,\n"
        "                                      lambda x: [2 * v for v in x], vendor='acme', priority=1000))\n"
        "answer([call_op('silu_and_mul', [1, 2]), manager.get_selected_impl_id('silu_and_mul')])"
    )
    assert (result, chosen) == ([2, 4], "vendor.acme")


@pytest.mark.parametrize("command", [["-m", "vllm_fl"], ["-m", "vllm_fl", "--help"]])
def test_command_line_starts(clean_python: Path, command: list[str]) -> None:
    done = subprocess.run([str(clean_python), "-I", *command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "quickstart" in done.stdout + done.stderr
    assert done.returncode in (0, 2)


def test_console_script(clean_python: Path) -> None:
    script = clean_python.parent / "vllm-fl"
    done = subprocess.run([str(script), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
