"""One version for all distributions, stated once in each place, and the script that changes it."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from repository_tree import PACKAGES, ROOT

import bump_version
import vllm_fl
from bump_version import CHANGELOG, VERSION_FILE, BumpError, bump, current_version, read_sites

SIBLINGS = {
    "vllm-fl-ascend": ["vllm-fl-core", "vllm-fl-reference"],
    "vllm-fl-comm": ["vllm-fl-core"],
    "vllm-fl-core": [],
    "vllm-fl-nvidia": ["vllm-fl-core", "vllm-fl-reference"],
    "vllm-fl-reference": ["vllm-fl-core"],
}
CORE = "packages/vllm-fl-core/pyproject.toml"
NVIDIA = "packages/vllm-fl-nvidia/pyproject.toml"


def test_module_and_metadata_agree() -> None:
    assert vllm_fl.__version__ == importlib.metadata.version("vllm-fl-core") == current_version(read_sites())


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_pyproject_states_the_version_and_pins_its_siblings(package) -> None:
    text = (package / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"$', text, re.MULTILINE) == [vllm_fl.__version__]
    siblings = re.findall(r'"(vllm-fl-[a-z]+.*?)"', text.partition("\ndependencies = ")[2])
    assert siblings == [f"{name}=={vllm_fl.__version__}" for name in SIBLINGS[package.name]]


def test_changelog_has_a_section_for_the_version() -> None:
    headings = re.findall(r"^## \[(.+?)\] - (.+)$", (ROOT / CHANGELOG).read_text(encoding="utf-8"), re.MULTILINE)
    version, date = headings[0]
    assert version == vllm_fl.__version__
    assert date == "unreleased" or re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_bump_changes_every_place() -> None:
    old, changed = vllm_fl.__version__, bump(read_sites(), "9.8.7")
    assert set(changed) == {VERSION_FILE, CHANGELOG, *(f"packages/{p.name}/pyproject.toml" for p in PACKAGES)}
    assert changed[VERSION_FILE].endswith('__version__ = "9.8.7"\n')
    assert '"vllm-fl-core==9.8.7", "vllm-fl-reference==9.8.7"' in changed[NVIDIA]
    assert f"## [9.8.7] - unreleased\n\n## [{old}]" in changed[CHANGELOG]
    for path, text in changed.items():
        assert path == CHANGELOG or f'"{old}"' not in text, path


def test_bump_and_back_is_the_same_text() -> None:
    texts = read_sites()
    there = bump(texts, "9.8.7")
    back = bump(there, vllm_fl.__version__)
    assert {k: v for k, v in back.items() if k != CHANGELOG} == {k: v for k, v in texts.items() if k != CHANGELOG}


@pytest.mark.parametrize("version", ["0.2.0a1", "0.2.0rc2", "0.2.0.dev3", "10.20.30"])
def test_bump_accepts(version: str) -> None:
    assert current_version(bump(read_sites(), version)) == version


@pytest.mark.parametrize("version", ["", "1", "0.2", "v0.2.0", "0.2.0-rc1", "0.2.0 ", "latest"])
def test_bump_refuses_what_is_no_version(version: str) -> None:
    with pytest.raises(BumpError) as caught:
        bump(read_sites(), version)
    assert str(caught.value) == (
        f"{version!r} is not a version; write MAJOR.MINOR.PATCH, then optionally aN, bN, rcN or .devN"
    )


def test_bump_refuses_the_present_version() -> None:
    with pytest.raises(BumpError) as caught:
        bump(read_sites(), vllm_fl.__version__)
    assert str(caught.value) == f"the version is {vllm_fl.__version__} already"


def test_bump_refuses_a_place_that_disagrees() -> None:
    texts = read_sites()
    texts[CORE] = texts[CORE].replace(f'version = "{vllm_fl.__version__}"', 'version = "0.0.1"')
    with pytest.raises(BumpError) as caught:
        bump(texts, "9.8.7")
    assert str(caught.value) == f'{CORE}: expected one line version = "{vllm_fl.__version__}", found 0'


def test_bump_refuses_a_loose_pin() -> None:
    texts = read_sites()
    texts[NVIDIA] = texts[NVIDIA].replace(f"vllm-fl-core=={vllm_fl.__version__}", "vllm-fl-core>=0.1")
    with pytest.raises(BumpError) as caught:
        bump(texts, "9.8.7")
    assert str(caught.value) == f"{NVIDIA}: vllm-fl-core is pinned '>=0.1', expected '=={vllm_fl.__version__}'"


def test_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = read_sites()
    assert bump_version.main(["9.8.7", "--dry-run"]) == 0
    assert read_sites() == before
    printed = capsys.readouterr().out
    assert '+__version__ = "9.8.7"' in printed
    assert printed.endswith("would change 7 files to 9.8.7\n")


def test_command_reports_an_error_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert bump_version.main(["next", "--dry-run"]) == 1
    assert capsys.readouterr().err.startswith("error: 'next' is not a version")
