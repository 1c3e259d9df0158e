"""The document on versions and models is what its script makes of the results, and a run loses no cell."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from repository_tree import ROOT

import matrix
import matrix_page

PACKAGES = {"torch": "2", "transformers": "5", "Python": "3"}


def cell(version: str, model: str, outcome: str = "passed", reason: str = "") -> dict[str, Any]:
    return {"vllm": version, "model": model, "outcome": outcome, "reason": reason, "seconds": 1}


def test_the_document_is_made_from_the_results() -> None:
    text = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert text == matrix.document(matrix.read_results()), "run `python scripts/matrix.py --render`"


def test_every_version_has_every_model() -> None:
    """Columns of a device may be incomplete: few have it."""
    found = {
        (result["vllm"], result["model"]) for result in matrix.read_results()["cells"] if "," not in result["vllm"]
    }
    assert found == {(version, model) for version in matrix.VERSIONS for model in matrix.known_models()}


def test_every_version_has_an_environment_of_tox() -> None:
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    for version in matrix.VERSIONS:
        major, minor, patch = version.split(".")
        name = f"vllm{major}{minor:0>2}{patch}"
        assert f"\n    {name}: {{[runtime]python}} scripts{{/}}matrix.py --versions {version} {{posargs}}\n" in tox


def test_a_new_cell_takes_the_place_of_the_old() -> None:
    old = {"environments": {"0.9.0": PACKAGES}, "cells": [cell("0.9.0", "a"), cell("0.9.0", "b", "failed", "why")]}
    merged = matrix.merge(old, {"0.10.0": PACKAGES}, [cell("0.10.0", "a"), cell("0.9.0", "b")])
    assert list(merged["environments"]) == ["0.9.0", "0.10.0"]
    assert merged["cells"] == [cell("0.9.0", "a"), cell("0.9.0", "b"), cell("0.10.0", "a")]


def test_a_device_has_a_column_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `--here` writes on one machine, `--collect` takes over on another."""

    def run(python: Path, answers: Path, models: Sequence[str], environment: Mapping[str, str], log: Path) -> str:
        assert environment.items() >= {**os.environ, **matrix.SETTINGS}.items()
        assert python == Path(sys.executable)
        answers.write_text(json.dumps(cell("", models[0])).replace('"vllm": "", ', "") + "\n", encoding="utf-8")
        return "ended with code 0"

    monkeypatch.setattr(matrix, "_run", run)
    monkeypatch.setattr(matrix, "describe_here", lambda: ("0.9.0, Chip 1", PACKAGES))
    monkeypatch.setattr(matrix, "end_with_signal", lambda: None)
    file = tmp_path / "here.json"
    assert matrix.main(["--here", str(file), "--models", "qwen2", "llama"]) == 0
    for name in ("RESULTS", "PAGE"):
        monkeypatch.setattr(matrix, name, tmp_path / name)
    matrix.RESULTS.write_text(json.dumps({"environments": {"0.10.0": PACKAGES}, "cells": []}))
    assert matrix.main(["--collect", str(file)]) == 0
    assert matrix.read_results()["cells"] == [cell("0.9.0, Chip 1", "llama"), cell("0.9.0, Chip 1", "qwen2")]
    text = matrix.PAGE.read_text()
    assert "| Model | 0.9.0, Chip 1 | 0.10.0 |\n" in text
    assert "| `llama` | passed | not run |\n" in text


def test_reasons_name_the_versions_that_they_hold_for() -> None:
    cells = [cell("0.1.0", "a", "failed", "x | y"), cell("0.2.0", "a", "failed", "x | y"), cell("0.1.0", "b")]
    text = matrix_page.render({"environments": {"0.1.0": PACKAGES, "0.2.0": PACKAGES}, "cells": cells})
    assert "| `a` | failed | failed |\n| `b` | passed | not run |\n" in text
    assert "| `a` | 0.1.0, 0.2.0 | failed | x \\| y |\n" in text


@pytest.mark.parametrize("last", ["failed", "nothing"])
def test_the_run_goes_on_after_a_process_that_ended(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process serves `a` and then ends at `b`, with an answer or without one."""
    asked: list[list[str]] = []

    def run(python: Path, answers: Path, models: Sequence[str], environment: Mapping[str, str], log: Path) -> str:
        asked.append(list(models))
        outcomes = {"a": "passed", "b": "failed"} if len(asked) == 1 else dict.fromkeys(models, "passed")
        if last == "nothing":
            outcomes = {model: outcome for model, outcome in outcomes.items() if outcome == "passed"}
        lines = [{"model": m, "outcome": o, "reason": "wrong", "seconds": 1} for m, o in outcomes.items()]
        answers.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return "ended with code -11"

    monkeypatch.setattr(matrix, "_run", run)
    cells = list(matrix.run_version("0.1.0", Path("python"), ["a", "b", "c", "d"]))
    assert asked == [["a", "b", "c", "d"], ["c", "d"]]
    assert [(found["model"], found["outcome"]) for found in cells] == [
        ("a", "passed"),
        ("b", "failed"),
        ("c", "passed"),
        ("d", "passed"),
    ]
    reason = "wrong" if last == "failed" else "the process ended with code -11; log: matrix-run-0.1.0-a.log"
    assert cells[1]["reason"] == reason


@pytest.mark.parametrize("option", ["--versions", "--models"])
def test_a_wrong_name_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        matrix.parse([option, "no-such"])
    assert caught.value.code == 2
    assert f"argument {option}: invalid choice: 'no-such'" in capsys.readouterr().err


def test_a_file_to_collect_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        matrix.parse(["--collect", "no-such.json"])
    assert caught.value.code == 2
    message = "argument --collect: there is no file no-such.json; `--here no-such.json` writes it"
    assert capsys.readouterr().err.endswith(f"error: {message}\n")
