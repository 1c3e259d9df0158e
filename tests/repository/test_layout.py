"""Habits of the tree: short files, the same license everywhere, test modules that do not shadow one another."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from repository_tree import PACKAGES, ROOT, tracked_files

MAX_LINES = 400
#: path -> why it may be longer. An entry that is no longer needed fails too.
LONG_FILES = {
    "packages/vllm-fl-core/tests/cli/test_cli_bootstrap.py": "one script's tests, with the simulated pip they share",
    "packages/vllm-fl-core/tests/config/test_config_bad_input.py": "a table of broken inputs with each exact message",
}

#: Absolute paths of somebody's machine, and hosts of package registries: neither belongs in the repository.
PRIVATE = re.compile(
    r"(?<![\w.~$}\])-])/(?:home|root|work|Users)/\w|https?://[^\s)\"']*(?:pypi\.org|pythonhosted\.org|download\.pytorch)"
)


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in tracked_files(".py")
    }
    long = {path: lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert set(long) == set(LONG_FILES), f"over {MAX_LINES} lines, or listed in LONG_FILES without need: {long}"


def test_test_modules_have_distinct_names() -> None:
    """pytest imports test modules by their bare names, so two of one name cannot run together."""
    names = Counter(path.name for path in tracked_files(".py") if path.name != "conftest.py" and "tests" in path.parts)
    repeated = [name for name, count in names.items() if count > 1 and name != "__init__.py"]
    assert repeated == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_distribution_is_complete(package: Path) -> None:
    (module,) = [path for path in (package / "src").iterdir() if path.is_dir()]
    assert (package / "README.md").is_file()
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (module / "py.typed").is_file()
    assert list((package / "tests").rglob("test_*.py"))


def test_all_five_distributions_are_here() -> None:
    suffixes = ["ascend", "comm", "core", "nvidia", "reference"]
    assert [package.name for package in PACKAGES] == [f"vllm-fl-{suffix}" for suffix in suffixes]


def test_nothing_of_a_machine_or_a_registry() -> None:
    texts = (path for path in tracked_files() if path.suffix in {".md", ".py", ".toml", ".ini", ".yaml", ".yml", ""})
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if PRIVATE.search(line) and path != Path(__file__)
    ]
    assert found == []
