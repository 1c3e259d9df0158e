"""examples/acme-backend: the generator wrote it, its wheel passes its suite, and nothing in packages/ knows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl.scaffold import NewBackend

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/acme-backend"
#: Files that were changed or added after the generator had run; its README.md lists them.
CHANGED = {
    "README.md",
    "src/vllm_fl_acme/acme.py",
    "src/vllm_fl_acme/impl/activation.py",
    "src/vllm_fl_acme/register_ops.py",
    "tests/conftest.py",
}


def test_all_else_is_as_the_generator_writes_it() -> None:
    generated = NewBackend("acme").render()
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, check=True).stdout
    present = {name for name in listed.split("\0") if name and (EXAMPLE / name).is_file()}
    assert present == set(generated) | CHANGED
    differing = {name for name, text in generated.items() if (EXAMPLE / name).read_text(encoding="utf-8") != text}
    assert differing == CHANGED & set(generated), "generate it again, and repeat the changes that its README.md lists"


def test_nothing_here_knows_it() -> None:
    found = [p for p in ROOT.glob("packages/*/src/**/*") if p.suffix in {".py", ".yaml", ".toml"} and _mentions(p)]
    assert found == []


def _mentions(path: Path) -> bool:
    return "vllm_fl_acme" in path.read_text(encoding="utf-8") or "vllm-fl-acme" in path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example's wheel is installed."""
    out, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)], EXAMPLE, {})
    (wheel,) = out.glob("*.whl")
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--target", str(target)]
    _run([sys.executable, "-m", "pip", "install", *options, str(wheel)], out, {})
    return target


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_FL_", "PYTEST_", "TRITON_"))}
    done = subprocess.run(
        command, cwd=folder, env={**clean, **environment}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_suite_of_the_example(site: Path, tmp_path: Path) -> None:
    """Its own tests, against the wheel: the kernel in Triton's interpreter where there is no device.

    The operators that are as the generator wrote them are tested with the vendor's guide.
    """
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    options = ["-q", "-rs", "-p", "no:cacheprovider", "--fl-op", "silu_and_mul", "--rootdir", str(EXAMPLE)]
    options.append(str(EXAMPLE / "tests"))
    shown = _run([sys.executable, "-m", "pytest", *options], tmp_path, {"PYTHONPATH": path})
    (counts,) = re.findall(r"^(\d+) passed, (\d+) skipped", shown, re.MULTILINE)
    assert int(counts[0]) >= 10, shown
    reasons = "captures no graphs|no case of this kind|opaque: graphs take|declares no parameters"
    assert all(re.search(reasons, line) for line in re.findall(r"^SKIPPED.*", shown, re.MULTILINE)), shown
