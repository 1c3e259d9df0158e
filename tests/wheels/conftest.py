"""Wheels built from this tree, and a clean environment without torch that they are installed in.

Needs the dependency groups `build` and `pytest` of pyproject.toml, and a package index for what the wheels require.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "vllm-fl-ascend": "vllm_fl_ascend",
    "vllm-fl-comm": "vllm_fl_comm",
    "vllm-fl-core": "vllm_fl",
    "vllm-fl-nvidia": "vllm_fl_nvidia",
    "vllm-fl-reference": "vllm_fl_reference",
}


class Wheel(NamedTuple):
    """A built wheel: its distribution, what is in it, and its METADATA."""

    distribution: str
    module: str
    path: Path
    files: dict[str, bytes]
    metadata: Message

    @property
    def dist_info(self) -> str:
        return f"{self.path.name.split('-')[0]}-{self.metadata['Version']}.dist-info"


def _read(path: Path) -> Wheel:
    with ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (text,) = [data for name, data in files.items() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(text.decode())
    return Wheel(metadata["Name"], MODULES[metadata["Name"]], path, files, metadata)


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive and the wheel of every distribution."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(ROOT / "scripts/build_wheels.py"), "--no-isolation", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="session")
def wheels(dist: Path) -> dict[str, Wheel]:
    return {wheel.distribution: wheel for wheel in map(_read, sorted(dist.glob("*.whl")))}


@pytest.fixture(params=MODULES)
def wheel(wheels: dict[str, Wheel], request: pytest.FixtureRequest) -> Wheel:
    return wheels[request.param]


@pytest.fixture(scope="session")
def clean_python(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the five wheels, what they require, and pip."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    files = [str(wheel.path) for wheel in wheels.values()]
    command = [str(python), "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return python


@pytest.fixture(scope="session")
def ask(clean_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Runs code in the clean environment, away from this tree; `answer(x)` in the code returns x, as JSON."""
    folder = tmp_path_factory.mktemp("elsewhere")

    def run(code: str, **environment: str) -> Any:
        prologue = "import json, sys\ndef answer(x): print('answer:' + json.dumps(x))\n"
        command = [str(clean_python), "-I", "-c", prologue + code]
        variables = {"PATH": "/usr/bin:/bin", "HOME": str(folder), **environment}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=variables)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("answer:")]
        return json.loads(line.removeprefix("answer:"))

    return run
