"""What is in the wheels and source archives, read from the files themselves."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Wheel

ROOT = Path(__file__).resolve().parents[2]
SIBLINGS = {
    "vllm-fl-ascend": {"vllm-fl-core", "vllm-fl-reference"},
    "vllm-fl-comm": {"vllm-fl-core"},
    "vllm-fl-core": set(),
    "vllm-fl-nvidia": {"vllm-fl-core", "vllm-fl-reference"},
    "vllm-fl-reference": {"vllm-fl-core"},
}


def test_one_wheel_for_each_distribution(wheels: dict[str, Wheel]) -> None:
    assert set(wheels) == set(SIBLINGS) == {path.name for path in (ROOT / "packages").iterdir()}


def test_one_version(wheels: dict[str, Wheel]) -> None:
    (stated,) = re.findall(r'__version__ = "(.+)"', wheels["vllm-fl-core"].files["vllm_fl/version.py"].decode())
    assert {wheel.metadata["Version"] for wheel in wheels.values()} == {stated}


def test_pure_python(wheel: Wheel) -> None:
    assert wheel.path.name.endswith("-py3-none-any.whl")
    assert wheel.metadata["Requires-Python"] == ">=3.10"


def test_siblings_are_pinned_exactly(wheel: Wheel) -> None:
    requirements = wheel.metadata.get_all("Requires-Dist", [])
    siblings = {r for r in requirements if r.startswith("vllm-fl")}
    assert siblings == {f"{name}=={wheel.metadata['Version']}" for name in SIBLINGS[wheel.distribution]}


def test_needs_neither_torch_nor_vllm(wheel: Wheel) -> None:
    names = {re.split(r"[^A-Za-z0-9._-]", r)[0] for r in wheel.metadata.get_all("Requires-Dist", [])}
    assert not names & {"torch", "vllm", "triton", "flag_gems", "flag-gems"}


def test_only_its_own_module(wheel: Wheel) -> None:
    assert {name.split("/")[0] for name in wheel.files} == {wheel.module, wheel.dist_info}


def test_no_tests(wheel: Wheel) -> None:
    assert not [name for name in wheel.files if re.search(r"(^|/)(tests?/|test_[^/]*\.py$|conftest\.py$)", name)]


def test_nothing_left_out(wheel: Wheel) -> None:
    """Every file of the source tree is in the wheel: modules and package data alike."""
    source = ROOT / "packages" / wheel.distribution / "src"
    wanted = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert wanted <= set(wheel.files)


def test_typed(wheel: Wheel) -> None:
    assert f"{wheel.module}/py.typed" in wheel.files


@pytest.mark.parametrize(
    ("distribution", "file"),
    [("vllm-fl-nvidia", "vllm_fl_nvidia/nvidia.yaml"), ("vllm-fl-ascend", "vllm_fl_ascend/ascend.yaml")],
)
def test_platform_file(wheels: dict[str, Wheel], distribution: str, file: str) -> None:
    assert wheels[distribution].files[file] == (ROOT / "packages" / distribution / "src" / file).read_bytes()


def test_license(wheel: Wheel) -> None:
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert wheel.metadata.get_all("License-File") == ["LICENSE"]
    assert wheel.files[f"{wheel.dist_info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_readme_is_the_long_description(wheel: Wheel) -> None:
    assert wheel.metadata["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "packages" / wheel.distribution / "README.md").read_text(encoding="utf-8")
    assert wheel.metadata.get_payload().strip() == readme.strip()


def test_classifiers(wheel: Wheel) -> None:
    classifiers = set(wheel.metadata.get_all("Classifier"))
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)} <= classifiers
    assert "Typing :: Typed" in classifiers
    assert wheel.metadata["Summary"]


def test_source_archive_has_what_a_packager_needs(wheel: Wheel, dist: Path) -> None:
    top = f"{wheel.path.name.split('-')[0]}-{wheel.metadata['Version']}"
    with tarfile.open(dist / f"{top}.tar.gz") as archive:
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", f"src/{wheel.module}/py.typed"} <= names
    assert any(re.fullmatch(r"tests/.*test_\w+\.py", name) for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
