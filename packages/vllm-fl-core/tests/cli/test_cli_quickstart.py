"""``vllm-fl quickstart`` with a stand-in for the engine: what is printed where, and what an error becomes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_fl import engines
from vllm_fl.cli import main
from vllm_fl.errors import CommandError
from vllm_fl.quickstart import engine, model
from vllm_fl.quickstart.engine import Answer, OperatorUse, Report

OPERATORS = (
    OperatorUse("rms_norm", "reference.torch", "reference", None, 61, 3904),
    OperatorUse("silu_and_mul", "vendor.acme", "vendor", "acme", 30, 1920),
)


def chatter(descriptor: int, text: str) -> None:
    """Writes to a descriptor, as compiled code does, and as Python's streams do where pytest has not replaced them."""
    os.write(descriptor, f"{text}\n".encode())


class Session:
    """Stands in for an engine; chatters like one."""

    asked: tuple[str, ...] = ()
    started: tuple[Path, str, bool]
    error: BaseException | None = None
    operators = OPERATORS

    def __init__(self, directory: Path, dtype: str, compiled: bool) -> None:
        Session.started = (directory, dtype, compiled)
        chatter(1, "chatter on standard output")
        chatter(2, "chatter on standard error")
        if Session.error:
            raise Session.error

    def answer(self, prompts: Sequence[str], max_tokens: int) -> Report:
        Session.asked = tuple(prompts)
        answers = tuple(Answer(prompt, f"[bold]{max_tokens}[/bold]", 8) for prompt in prompts)
        directory, dtype, compiled = Session.started
        versions = {"vllm": "0.28.0", "torch": "2.13.0"}
        reason = "nothing else fits"
        return Report(
            str(directory), dtype, compiled, "reference", reason, versions, answers, Session.operators, 3.0, 2.0
        )

    def close(self) -> None:
        chatter(1, "chatter of the end")


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Session]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(engine, "Session", Session)
    monkeypatch.setattr(engines, "require_vllm", lambda: None)
    monkeypatch.setattr(model, "prepare_model", lambda given, _reporter: given or Path("/models/smol"))
    monkeypatch.setattr(Session, "error", None)
    monkeypatch.setattr(Session, "operators", OPERATORS)
    return Session


def test_answers_and_table(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["quickstart"]) == 0
    captured = capfd.readouterr()
    for prompt in engine.PROMPTS:
        assert prompt in captured.out
    assert "[bold]64[/bold]" in captured.out, "the text of an answer is no markup"
    assert "│ rms_norm     │ reference.torch │ reference     │             61 │ 3,904 │" in captured.out
    assert "│ silu_and_mul │ vendor.acme     │ vendor (acme) │             30 │ 1,920 │" in captured.out
    assert "Engine started in 3.0 s; 24 tokens in 2.0 s (12 tokens/s)." in captured.out
    assert "chatter" not in captured.out + captured.err
    assert captured.err.splitlines()[0] == "Start the engine ..."
    log = (tmp_path / "vllm-fl" / "logs" / "quickstart.log").read_text()
    assert log.splitlines() == ["chatter on standard output", "chatter on standard error", "chatter of the end"]


def test_json_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--json", "--dtype", "float32", "--compile", "--prompt", "Why?"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["model"] == "/models/smol"
    assert document["dtype"] == "float32"
    assert document["compiled"] is True
    assert document["answers"] == [{"prompt": "Why?", "text": "[bold]64[/bold]", "tokens": 8}]
    assert document["operators"][0] == {
        "operator": "rms_norm",
        "implementation": "reference.torch",
        "kind": "reference",
        "vendor": None,
        "calls_at_start": 61,
        "calls": 3904,
    }


def test_json_stays_pure_with_verbose(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--json", "--verbose"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["platform"] == "reference"
    assert "chatter on standard output" in captured.err
    assert "chatter on standard error" in captured.err


def test_options_reach_the_engine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["quickstart", "--prompt", "A", "--prompt", "B", "--max-tokens", "7", "--model-dir", str(tmp_path)]) == 0
    )
    assert Session.asked == ("A", "B")
    assert Session.started == (tmp_path, "bfloat16", False)
    assert "[bold]7[/bold]" in capfd.readouterr().out


def test_no_operator_is_explained(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Session, "operators", ())
    assert main(["quickstart"]) == 0
    assert "No operator went through dispatch: vLLM runs on a platform of its own." in capfd.readouterr().out


def test_engine_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Session, "error", CommandError("The engine did not start: no memory", "Close something."))
    assert main(["quickstart"]) == 1
    captured = capfd.readouterr()
    log = tmp_path / "vllm-fl" / "logs" / "quickstart.log"
    assert captured.err == (
        f"Start the engine ...\nError: The engine did not start: no memory\nRemedy: Close something.\nLog: {log}\n"
    )
    assert "chatter on standard error" in log.read_text()


def test_error_as_json(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Session, "error", CommandError("No.", "Yes."))
    assert main(["quickstart", "--json"]) == 1
    document = json.loads(capfd.readouterr().out)
    assert (document["error"], document["remedy"], document["exit_code"]) == ("No.", "Yes.", 1)


def test_interruption(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Session, "error", KeyboardInterrupt())
    assert main(["quickstart"]) == 130
    captured = capfd.readouterr()
    assert captured.err.endswith("Interrupted.\n")
    assert captured.out == ""


def test_streams_come_back_after_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Session, "error", CommandError("No."))
    main(["quickstart"])
    capfd.readouterr()
    print("to the terminal")
    assert capfd.readouterr().out == "to the terminal\n"


def test_missing_vllm(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == "vllm" else object())
    assert main(["quickstart"]) == 3
    assert capfd.readouterr().err == (
        "Error: The package vllm is not installed.\n"
        "Remedy: On a clone, `make quickstart` makes an environment that has it; elsewhere install it first.\n"
    )


def test_variables_that_keep_a_platform_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_FL_PREFER_ENABLED", "VLLM_TARGET_DEVICE", "VLLM_FL_PLATFORM", "VLLM_FL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert engines.start_failure(ValueError("bad luck")).remedy == (
        "These variables are set and may be the reason: VLLM_PLUGINS=. Run again with --verbose to see what vLLM says."
    )
