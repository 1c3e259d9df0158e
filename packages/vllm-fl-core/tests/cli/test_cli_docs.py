"""The examples of the documents on the tools: each command is run, and each line that is shown is in what it prints.

Commands that start an engine are run by tests/e2e/test_tools.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl.cli import main

pytest.importorskip("vllm_fl_reference", reason="the documents show its implementations")

DOCS = Path(__file__).parents[4] / "docs"
DOCUMENTS = ("cli.md", "profiling.md", "comparing.md")
ENGINE = " quickstart"


def blocks(language: str) -> list[str]:
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [match[1] for name in DOCUMENTS for match in fence.finditer((DOCS / name).read_text(encoding="utf-8"))]


def commands() -> list[tuple[str, list[str]]]:
    """(command, lines that it shows) of every example."""
    found: list[tuple[str, list[str]]] = []
    for line in "".join(blocks("console")).splitlines():
        if line.startswith("$ vllm-fl "):
            found.append((line[len("$ vllm-fl ") :], []))
        else:
            found[-1][1].append(line)
    return found


LIGHT = [(command, shown) for command, shown in commands() if ENGINE not in f" {command}"]


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, no_settings: None, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    (tmp_path / "my.yaml").write_text(blocks("yaml")[0])


def words(text: str) -> str:
    return " ".join(re.sub(r"[│┃━─┏┓┡┩└┘├┤┳┻╇┴┬]", " ", text).split())


@pytest.mark.parametrize(("command", "shown"), LIGHT, ids=[command for command, _ in LIGHT])
def test_example(command: str, shown: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == (2 if "check" in command else 0)
    out = words(capsys.readouterr().out)
    assert [line for line in shown if words(line) not in out] == []


def test_every_document_has_examples() -> None:
    assert len(LIGHT) >= 8
    assert len([command for command, _ in commands() if ENGINE in f" {command}"]) >= 4


@pytest.mark.parametrize("code", blocks("python"))
def test_python_example(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_functions_of_the_table_exist() -> None:
    import importlib

    for module, name in re.findall(r"`(vllm_fl[\w.]*)\.(\w+)`", (DOCS / "cli.md").read_text(encoding="utf-8")):
        if module != "vllm_fl" and not name.endswith("communicators"):
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@pytest.mark.parametrize("command", ["info", "explain", "profile", "compare", "bisect", "config show", "config check"])
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples" in out
    assert f"$ vllm-fl {command}" in out


@pytest.mark.parametrize("variable", ["NO_COLOR", "FORCE_COLOR"])
def test_colours(variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["explain", "rms_norm"]) == 0
    assert ("\x1b[" in capsys.readouterr().out) == (variable == "FORCE_COLOR")


def test_completion_knows_commands_and_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "_VLLM_FL_COMPLETE": "complete_bash"}

    def complete(line: str) -> list[str]:
        asked = {**environment, "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        command = [sys.executable, "-c", "from vllm_fl.cli import main; main()"]
        return subprocess.run(command, env=asked, capture_output=True, text=True, check=False).stdout.split()

    assert "explain" in complete("vllm-fl ")
    assert "rms_norm_gated" in complete("vllm-fl explain rms")
