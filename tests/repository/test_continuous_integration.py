"""CI runs what the README tells people to run, and its last line adds up."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from repository_tree import ROOT

from sum_junit import totals

SUITE = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'


def test_ci_calls_the_command_of_the_readme() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert re.findall(r"^(?:exec )?(make .*)$", script.read_text(encoding="utf-8"), re.MULTILINE) == ["make test"]
    assert "\n    make test\n" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("suites", "expected"),
    [
        ([], (0, 0, 0)),
        ([(10, 0, 0, 0)], (10, 0, 0)),
        ([(10, 1, 2, 3)], (4, 3, 3)),
        ([(10, 1, 0, 0), (5, 0, 0, 5)], (9, 1, 5)),
    ],
    ids=["none", "passed", "all kinds", "two files"],
)
def test_totals_add_up(suites: list[tuple[int, ...]], expected: tuple[int, int, int], tmp_path: Path) -> None:
    files = [tmp_path / f"{index}.xml" for index in range(len(suites))]
    for file, numbers in zip(files, suites, strict=True):
        file.write_text(SUITE.format(*numbers), encoding="utf-8")
    assert totals(files) == expected
