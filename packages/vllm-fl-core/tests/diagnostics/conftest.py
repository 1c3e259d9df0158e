from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_fl.config import reset_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, no_settings: None, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


PLUGIN = """
import torch
from vllm_fl.dispatch import BackendImplKind, OpImpl

def rms_norm(x, residual, weight, epsilon):
    raise ValueError("planted")

def silu_and_mul(x):
    return torch.zeros_like(x)

def narrow(x):
    return "only rows of 64" if x.shape[-1] != 64 else True

def register(registry):
    for fn, vendor, fields in (
        (rms_norm, "acme", {}),
        (silu_and_mul, "acme", {"supports": narrow, "supported_dtypes": frozenset({"bfloat16"})}),
    ):
        registry.register_impl(
            OpImpl(fn.__name__, f"vendor.{vendor}", BackendImplKind.VENDOR, fn, vendor=vendor, priority=100, **fields)
        )
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``acme(VLLM_FL_PREFER="vendor")``: a plug-in module with two implementations, and these variables."""

    def install(**environment: str) -> None:
        (tmp_path / "acme_operators.py").write_text(PLUGIN)
        monkeypatch.delitem(sys.modules, "acme_operators", raising=False)
        for name, value in {"VLLM_FL_PLUGIN_MODULES": "acme_operators", **environment}.items():
            monkeypatch.setenv(name, value)
        reset_settings()

    return install
