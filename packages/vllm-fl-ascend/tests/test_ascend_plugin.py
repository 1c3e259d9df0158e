"""The skeleton does exactly what its README says: it declares itself, and never serves."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import subprocess
import sys

import pytest

from vllm_fl.config import check_file
from vllm_fl.dispatch import BackendImplKind, get_default_manager, reset_default_manager
from vllm_fl.errors import PlatformError
from vllm_fl.plugins import installed_backends, reset_platform, resolve_platform
from vllm_fl_ascend.plugin import PLUGIN, probe

REASON = "no operators yet: this release registers no operators and no platform"


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VLLM_FL_PLATFORM", raising=False)
    reset_platform()
    reset_default_manager()
    yield
    reset_platform()
    reset_default_manager()


def test_declaration() -> None:
    assert (PLUGIN.name, PLUGIN.kind, PLUGIN.vendor) == ("ascend", BackendImplKind.VENDOR, "ascend")
    assert PLUGIN.device_type == "npu"
    assert PLUGIN.register is None
    assert PLUGIN.platform is None
    assert not PLUGIN.fallback


def test_probe_says_why_not() -> None:
    answer = probe()
    assert not answer.ok
    assert answer.reason == REASON


def test_shown_among_the_installed_backends() -> None:
    (found,) = [b for b in installed_backends() if b.distribution == "vllm-fl-ascend"]
    assert found.plugin == PLUGIN
    assert found.error is None


def test_never_chosen_as_the_platform() -> None:
    choice = resolve_platform()
    assert choice.plugin != PLUGIN
    assert ("ascend", REASON) in choice.rejected


def test_asking_for_it_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PLATFORM", "ascend")
    with pytest.raises(PlatformError) as caught:
        resolve_platform()
    assert "VLLM_FL_PLATFORM" in str(caught.value)
    assert REASON in str(caught.value)


def test_registers_no_operator() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    implementations = [i for impls in manager.registry.snapshot().impls_by_op.values() for i in impls]
    assert not [i.impl_id for i in implementations if i.vendor == "ascend"]


def test_platform_file_is_valid_package_data() -> None:
    with importlib.resources.as_file(importlib.resources.files("vllm_fl_ascend") / "ascend.yaml") as path:
        assert PLUGIN.config == f"vllm_fl_ascend:{path.name}"
        assert not check_file(path)


def test_import_needs_neither_torch_nor_sdk() -> None:
    code = "import json, sys, vllm_fl_ascend.plugin as p; p.probe(); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "triton", "vllm", "torch_npu"} & set(json.loads(done.stdout))


def test_one_version() -> None:
    import vllm_fl_ascend

    assert vllm_fl_ascend.__version__ == importlib.metadata.version("vllm-fl-ascend")
