"""The script that runs vLLM's own tests loses no test, skips no module in silence, and says what failures come from."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import vllm_tests
import vllm_tests_page
import vllm_tests_selection
from steps import BootstrapError
from vllm_tests_models import COMMIT, make_hub
from vllm_tests_selection import Selection, SelectionError, StandIn

SELECTION: dict[str, Any] = {
    "take": [{"name": "cores", "paths": ["v1/core", "v1/core/slow/test_fast.py"]}],
    "leave": [{"reason": "slow", "paths": ["v1/core/slow"]}],
    "known": [
        {"reason": "no hub", "message": "couldn't connect to.*hub"},
        {"reason": "wrong", "tests": ["v1/core/*::test_b*"], "message": "assert"},
    ],
}
TEST_MODULE = """
import os, pytest

def test_passes(): pass
def test_fails(): raise OSError("couldn't connect to\\nthe hub")
@pytest.mark.skip(reason="no GPU")
def test_skips(): pass
@pytest.mark.xfail(reason="known bug")
def test_expected(): assert False
def test_ends(): os._exit(7)
@pytest.fixture
def broken():
    yield
    raise RuntimeError("cleanup")
def test_cleans(broken): pass
"""


def test_the_longest_path_decides() -> None:
    modules = ["v1/core/slow/test_fast.py", "v1/core/slow/test_slow.py", "v1/core/test_a.py"]
    taken, left = Selection.model_validate(SELECTION).sort(modules)
    assert taken == {0: ["v1/core/slow/test_fast.py", "v1/core/test_a.py"]}
    assert left == {0: ["v1/core/slow/test_slow.py"]}


def test_a_module_that_nobody_decided_on_is_an_error() -> None:
    with pytest.raises(SelectionError) as caught:
        Selection.model_validate(SELECTION).sort(["v1/core/test_a.py", "v1/corelike/test_b.py"])
    assert str(caught.value) == (
        "vllm_tests.toml says nothing of v1/corelike/test_b.py; it names v1/core/slow, v1/core/slow/test_fast.py, which"
        " is not there. It holds for one version of vLLM: change it."
    )


@pytest.mark.parametrize(
    ("test", "text", "reason"),
    [
        ("v1/x.py::test_b", "OSError: couldn't connect to\n the hub", "no hub"),
        ("v1/core/x.py::test_b[1]", "assert 1 == 2", "wrong"),
        ("v1/core/x.py::test_a", "assert 1 == 2", None),
        ("v1/core/x.py::test_b", "KeyError", None),
    ],
)
def test_reason_of_a_failure(test: str, text: str, reason: str | None) -> None:
    assert Selection.model_validate(SELECTION).reason(test, text) == reason


@pytest.mark.parametrize(
    ("text", "problem"),
    [("take = [", "Invalid value"), ('[[take]]\nname = "x"\npath = ["v1"]\n[[leave]]\n', "take.0.paths")],
)
def test_a_wrong_file_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(SelectionError) as caught:
        vllm_tests_selection.read(tmp_path / "x.toml")
    assert str(caught.value).startswith(f"{tmp_path}/x.toml: ")
    assert problem in str(caught.value)


def test_our_selection_is_valid() -> None:
    selection = vllm_tests_selection.read()
    paths = [path for entry in (*selection.take, *selection.leave) for path in entry.paths]
    assert len(paths) == len(set(paths))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The source of a vLLM with one test module and one that cannot be imported."""
    source = tmp_path / "source"
    (source / "tests").mkdir(parents=True)
    (source / "vllm").mkdir()
    (source / "vllm" / "__init__.py").write_text("raise ImportError('this is the source')")
    for name, text in {
        "__init__": "",
        "conftest": "",
        "test_a": TEST_MODULE,
        "test_b": "import no_such_module",
    }.items():
        (source / "tests" / f"{name}.py").write_text(text)
    (source / "PKG-INFO").write_text(f"Name: vllm\nVersion: {version('vllm')}\n")
    return source


def test_no_test_is_lost_where_a_process_ends(source: Path, tmp_path: Path) -> None:
    found = vllm_tests.run_modules(vllm_tests.find_tests(source), ["test_a.py", "test_b.py"], {}, tmp_path / "log")
    outcomes = {test.removeprefix("test_a.py::"): answer.outcome for test, answer in found.items()}
    assert outcomes == {
        "test_b.py": "failed",
        "test_passes": "passed",
        "test_fails": "failed",
        "test_skips": "skipped",
        "test_expected": "skipped",
        "test_ends": "failed",
        "test_cleans": "failed",
    }
    assert found["test_a.py::test_ends"].text == "the process ended with code 7"
    assert found["test_a.py::test_skips"].text == "Skipped: no GPU"
    assert found["test_a.py::test_expected"].text == "expected failure: known bug"
    assert "No module named 'no_such_module'" in found["test_b.py"].text


def test_source_of_another_version(source: Path) -> None:
    (source / "PKG-INFO").write_text("Name: vllm\nVersion: 0.1.0\n")
    with pytest.raises(BootstrapError) as caught:
        vllm_tests.find_tests(source)
    message = f"Error: {source} is vLLM 0.1.0, and this Python has vLLM {version('vllm')}."
    assert str(caught.value) == f"{message}\nRemedy: Name the source of the same version."


def test_a_folder_that_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(BootstrapError) as caught:
        vllm_tests.find_tests(tmp_path)
    assert str(caught.value) == (
        f"Error: {tmp_path} has no tests/conftest.py, so it is no source of vLLM.\n"
        "Remedy: Unpack vLLM's source archive, name it."
    )


def test_what_the_tests_import_must_be_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_tests, "NEEDED", ("pytest", "no_such_package"))
    assert vllm_tests.main(["."]) == 3
    message = "Error: no_such_package cannot be imported.\nRemedy: docs/development.md says what to install.\n"
    assert capsys.readouterr().err == message


def test_failures_are_sorted_by_whether_we_cause_them() -> None:
    failed = vllm_tests.Answer("failed", "couldn't connect to the hub")
    sides = {
        "with us": {"m::a": failed, "m::b": failed, "m::c": vllm_tests.Answer("failed", "x" * 400)},
        "without us": {"m::a": failed, "m::b": vllm_tests.Answer("passed")},
    }
    assert vllm_tests.judge("m", sides, Selection.model_validate(SELECTION)) == {
        "module": "m",
        "with us": {"passed": 0, "failed": 3, "skipped": 0},
        "without us": {"passed": 1, "failed": 1, "skipped": 0},
        "reasons": {"no hub": 2},
        "unexplained": {"m::c": "x" * 300},
        "with us alone": {"m::b": "no hub"},
    }


def test_models_of_the_hub_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quickstart = tmp_path / "quickstart"
    quickstart.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (quickstart / name).write_text(name)
    monkeypatch.setattr("vllm_fl.quickstart.model.default_directory", lambda: quickstart)
    model = StandIn(name="a/b", config="GPT2Config", changes={"n_embd": 96})
    with pytest.raises(BootstrapError):
        make_hub(tmp_path / "hub", [model])
    monkeypatch.setattr("vllm_fl.quickstart.model.is_complete", lambda directory: True)
    make_hub(tmp_path, [model, StandIn(name="c/d")])
    folder = tmp_path / "hub" / "models--a--b" / "snapshots" / COMMIT
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["n_embd"]) == ("gpt2", 96)
    assert len(list((tmp_path / "hub" / "models--c--d" / "snapshots" / COMMIT).iterdir())) == 3


def test_the_page_names_what_fails_with_us_alone() -> None:
    counts = {"passed": 3, "failed": 2, "skipped": 1}
    module = {
        "module": "m",
        "with us": counts,
        "without us": {"passed": 4, "failed": 1, "skipped": 1},
        "reasons": {"no hub": 1},
        "unexplained": {"m::c": "why"},
        "with us alone": {"m::a": "no hub"},
    }
    results = {
        "environment": {"Python": "3"},
        "models": ["a/b"],
        "groups": [{"name": "cores", "modules": [module]}],
        "left out": [{"reason": "slow", "modules": 2}],
    }
    text = "\n".join(vllm_tests_page.section(results))
    assert "| cores | 1 | 3 | 2 | 1 | 4 | 1 | 1 |\n" in text
    assert "| no hub | 1 |\n| not found out | 1 |\n" in text
    assert "| `m::a` | no hub |\n" in text
    assert "| slow | 2 |\n" in text
