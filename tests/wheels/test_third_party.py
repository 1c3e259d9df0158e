"""examples/acme-backend, installed from its wheel beside the released ones: found, registered, chosen if asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ask_with_acme(clean_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs code in the clean environment with the example's wheel; `answer(x)` in the code returns x, as JSON."""
    folder = tmp_path_factory.mktemp("acme")
    site = folder / "site"
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT / "examples/acme-backend", check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    install = [str(clean_python), "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(site)]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, text=True)

    def run(code: str, **environment: str) -> Any:
        prologue = "import json, sys\ndef answer(x): print('answer:' + json.dumps(x))\n"
        variables = {"PATH": os.defpath, "HOME": str(folder), "PYTHONPATH": str(site), **environment}
        done = subprocess.run(
            [str(clean_python), "-c", prologue + code], capture_output=True, text=True, env=variables, check=False
        )
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("answer:")]
        return json.loads(line.removeprefix("answer:"))

    return run


def test_found_and_registered_without_torch(ask_with_acme: Callable[..., Any]) -> None:
    found = ask_with_acme(
        "from vllm_fl.plugins import installed_backends\n"
        "from vllm_fl.testing import find_bundles\n"
        "(backend,) = [b for b in installed_backends() if b.entry_point == 'acme']\n"
        "(bundle,) = find_bundles('acme')\n"
        "impls = [[i.op_name, i.impl_id] for i in bundle.implementations]\n"
        "answer([backend.distribution, backend.error, bundle.error, impls, 'torch' in sys.modules])"
    )
    operators = ["silu_and_mul", "rms_norm", "rotary_embedding", "attention_backend"]
    assert found == ["vllm-fl-acme", None, "", [[name, "vendor.acme"] for name in operators], False]


def test_chosen_when_asked_for_and_only_then(ask_with_acme: Callable[..., Any]) -> None:
    code = (
        "from vllm_fl.plugins import resolve_platform\n"
        "choice = resolve_platform()\n"
        "answer([choice.plugin and choice.plugin.name, choice.plugin and choice.plugin.platform])"
    )
    assert ask_with_acme(code, VLLM_FL_PLATFORM="acme") == ["acme", "vllm_fl_acme.platform.AcmePlatform"]
    assert ask_with_acme(code)[0] != "acme"
