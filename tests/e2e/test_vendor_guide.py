"""docs/vendor-guide.md, block by block: a backend is generated, installed, tested, changed, and serves a real model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

GUIDE = Path(__file__).resolve().parents[2] / "docs/vendor-guide.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\S+/\S+\.py)\n")
#: What blocks must say: the first words of a block -> parts of what it prints.
EXPECTED = {
    "vllm-fl new-backend": ["vllm-fl-acme is in acme-backend", "passed"],
    "VLLM_FL_PLATFORM=acme vllm-fl quickstart": [
        "silu_and_mul         │ vendor.acme",
        "reshape_and_cache    │ reference.torch",
    ],
    "pip install --upgrade": ["1 of 1 operators on cpu"],
    "cat > known.yaml": ["1 of 1 operators on cpu"],
    "export VLLM_FL_LOG_LEVEL": ["silu_and_mul(x): vendor.acme", "0.7311"],
    "from vllm_fl.dispatch import resolve_op": ["Using implementation: "],
    "vllm-fl explain": ["silu_and_mul(x)", "vendor.acme"],
    "cd acme-backend": ["vllm_fl_acme-0.1.0-py3-none-any.whl"],
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A user's environment in which pip installs into a folder of this test; torch and vLLM are there already."""
    site = tmp_path_factory.mktemp("site")
    names = ("VLLM_", "FLAGGEMS_", "USE_FL", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])),
        "PIP_TARGET": str(site),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this one the other way round
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "COLUMNS": "160",
    }


@pytest.mark.timeout(900)
def test_every_block(settings: dict[str, str], tmp_path: Path) -> None:
    blocks = BLOCK.findall(GUIDE.read_text(encoding="utf-8"))
    assert {language for language, _ in blocks} == {"bash", "python", "text"}
    used = set()
    for language, body in blocks:
        if language == "text":
            continue
        named = FILE.match(body)
        if named:
            target = tmp_path / named[1]
            assert target.exists(), f"the guide writes {named[1]}, which the generator does not"
            target.write_text(body, encoding="utf-8")
            continue
        command = ["bash", "-c", f"set -e\n{body}"] if language == "bash" else [sys.executable, "-c", body]
        done = subprocess.run(
            command,
            env=settings,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{body}\n{done.stdout}"
        for start in (start for start in EXPECTED if body.startswith(start)):
            used.add(start)
            for part in EXPECTED[start]:
                assert part in done.stdout, f"{body}\n{done.stdout}"
    assert used == set(EXPECTED)
