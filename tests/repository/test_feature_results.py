"""The document's rows on features are those of the tests, and say how these ended."""

from __future__ import annotations

from pathlib import Path

import pytest

import features

ENVIRONMENT = {"vllm": "0.9.0", "torch": "2", "transformers": "5", "Python": "3"}
REPORT = """<testsuites><testsuite tests="6">
<testcase name="a"><properties><property name="feature" value="{first}"/><property name="checked" value="{about}"/>
</properties></testcase>
<testcase name="b"><properties><property name="feature" value="{first}"/><property name="checked" value="{about}"/>
</properties>{ending}</testcase>
<testcase name="no feature"><failure/></testcase>
</testsuite></testsuites>
"""


def test_every_check_has_a_result() -> None:
    found = [(row["feature"], row["checked"]) for row in features.read_results()["features"]]
    assert found == features.known(), "run what the docstring of scripts/features.py shows"


def test_every_check_says_what_it_checks() -> None:
    assert [feature for feature, about in features.known() if not about.endswith(".")] == []


@pytest.mark.parametrize(
    ("ending", "outcome"), [("", "passed"), ("<failure/>", "failed"), ("<error/>", "failed"), ("<skipped/>", "passed")]
)
def test_a_row_passed_if_every_case_that_ran_did(ending: str, outcome: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT.format(first="Streaming", about="What.", ending=ending))
    assert features.outcomes([report]) == {("Streaming", "What."): outcome}


def test_new_outcomes_take_the_place_of_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose tests did not run stays, one whose tests are gone goes, one that never ran says so."""
    monkeypatch.setattr(features, "known", lambda: [("A", "x."), ("B", "y."), ("C", "z | z."), ("D", "u.")])
    rows = [{"feature": f, "checked": c, "outcome": "failed"} for f, c in (("B", "y."), ("A", "x."), ("Gone", "w."))]
    merged = features.merge({"features": rows}, ENVIRONMENT, {("C", "z | z."): "passed", ("A", "x."): "passed"})
    assert [(row["feature"], row["outcome"]) for row in merged["features"]] == [
        ("A", "passed"), ("B", "failed"), ("C", "passed"), ("D", "not run"),
    ]  # fmt: skip
    text = "\n".join(features.section(merged))
    assert "0.9.0 (Python 3, torch 2, transformers\n5)" in text
    assert "| C | passed | z \\| z. |" in text


def test_files_are_needed(tmp_path: Path) -> None:
    assert features.main([]) == 2
    with pytest.raises(FileNotFoundError, match=r"no-such\.xml"):
        features.main([str(tmp_path / "no-such.xml")])
