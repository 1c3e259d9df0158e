"""The trace of a process that runs: opt-in, by a signal, in files of the owner alone."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from vllm_fl.cli import main
from vllm_fl.config import reset_settings
from vllm_fl.diagnostics import ask_processes, live
from vllm_fl.diagnostics.live import Tracer
from vllm_fl.dispatch import get_default_manager, reset_default_manager
from vllm_fl.processes import started

pytest.importorskip("vllm_fl_reference", reason="the processes need an implementation")

#: Fails once, then waits, in a process and in a child that it forked; both end when the parent closes their input.
PROGRAM = """
import os, sys, torch
from vllm_fl.dispatch import call_op
call_op("rms_norm", torch.ones(2, 4), None, torch.ones(4), 1e-6)
child = os.fork()
print(os.getpid(), flush=True)
sys.stdin.read()
if child:
    os.waitpid(child, 0)
"""


@pytest.fixture
def running(acme: Callable[..., None], tmp_path: Path) -> Iterator[tuple[Path, set[int]]]:
    """A process and its child with traces in a directory: the directory and the two ids."""
    directory = tmp_path / "traces"
    acme(VLLM_FL_PREFER="vendor", VLLM_FL_TRACE_DIR=str(directory))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = {int(process.stdout.readline()), int(process.stdout.readline())}
        yield directory, pids
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


def test_processes_answer(running: tuple[Path, set[int]], capsys: pytest.CaptureFixture[str]) -> None:
    directory, pids = running
    files = list(directory.iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (directory / "dispatch-1.json").write_text(json.dumps({"pid": 1, "started": -1, "time": 0}))  # another process
    (directory / "dispatch-2.json").write_text("{broken")
    found = ask_processes(directory)
    assert {process.pid for process in found} == pids
    assert not (directory / "dispatch-1.json").exists()
    for process in found:
        assert process.problem == ""
        (norm,) = [document for document in process.operators if document["operator"] == "rms_norm"]
        reason = next(c["reason"] for c in norm["candidates"] if c["implementation"] == "vendor.acme")
        # A new process tries again what failed in the one that it was forked from.
        chosen = "vendor.acme" if process.pid == max(pids) else "reference.torch"
        assert norm["chosen"] == chosen
        assert (reason == "rejected: failed before: ValueError: planted") == (chosen == "reference.torch")
        assert [failure["impl_id"] for failure in process.failures] == ["vendor.acme"]
    assert main(["explain", "rms_norm", "--live", str(directory)]) == 0
    out = capsys.readouterr().out
    assert out.count("rejected: failed before: ValueError: planted") == 1
    assert main(["explain", "rmsnorm", "--live", str(directory)]) == 2
    assert "did you mean 'rms_norm'?" in capsys.readouterr().err
    assert main(["explain", "--all", "--live", str(directory), "--json"]) == 0
    assert {answer["pid"] for answer in json.loads(capsys.readouterr().out)} == pids
    assert main(["info", "--live", str(directory)]) == 0
    assert capsys.readouterr().out.count('raise ValueError("planted")') == 2
    assert main(["info", "--live", str(directory), "--json"]) == 0
    assert [a["failures"][0]["op"] for a in json.loads(capsys.readouterr().out)] == ["rms_norm", "rms_norm"]


def leave_file(directory: Path, pid: int) -> None:
    document = {"pid": pid, "started": started(pid), "time": time.time(), "rank": 3}
    (directory / f"dispatch-{pid}.json").write_text(json.dumps(document))


@pytest.fixture
def silent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that catches the signal and does nothing."""
    code = "import time; from signal import *; signal(SIGUSR2, lambda *_: None); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_process_that_does_not_answer(silent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    leave_file(tmp_path, silent.pid)
    (answer,) = ask_processes(tmp_path, timeout_s=0.1)
    assert (answer.rank, answer.problem) == (3, "it did not answer in time; it may be computing without a pause")
    silent.kill()
    time.sleep(0.1)  # it has ended, and nobody has asked for its status yet
    assert ask_processes(tmp_path) == []


def test_the_file_of_somebody_else_has_no_process_signalled(
    silent: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_file(tmp_path, silent.pid)
    monkeypatch.setattr(live, "owner", lambda pid: 4242)
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda *_: pytest.fail("signalled"))
        assert [answer.problem for answer in ask_processes(tmp_path)] == ["it does not take questions any more"]


BECOMES_ANOTHER = """
import os, sys
from vllm_fl.dispatch import get_default_manager
get_default_manager().ensure_initialized()
os.execvp("sleep", ["sleep", "60"])
"""


def test_a_process_that_has_become_another_program_lives_on(tmp_path: Path) -> None:
    directory = tmp_path / "traces"
    environment = {**os.environ, "VLLM_FL_TRACE_DIR": str(directory)}
    with subprocess.Popen([sys.executable, "-c", BECOMES_ANOTHER], env=environment) as process:
        command = Path(f"/proc/{process.pid}/comm")
        while command.read_text() != "sleep\n":
            time.sleep(0.01)
        (answer,) = ask_processes(directory, timeout_s=0.1)
        assert answer.problem == "it does not take questions any more"
        assert process.poll() is None
        process.kill()


def test_nobody_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--live", str(tmp_path)]) == 3
    assert capsys.readouterr().err.splitlines() == [
        f"Error: No running process has left a file in {tmp_path}.",
        f"Remedy: Start the server with VLLM_FL_TRACE_DIR={tmp_path} in its environment.",
    ]


@pytest.fixture
def handler() -> Iterator[None]:
    """No handler before and after; PyTorch's profiler leaves one to the tests that share its process."""
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


@pytest.mark.usefixtures("handler")
def test_what_prevents_it_is_reported_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", str(tmp_path / "traces"))
    prefix = "environment variable VLLM_FL_TRACE_DIR: no trace of this process is written: "

    def start() -> str:
        warnings.clear()
        reset_default_manager()
        reset_settings()
        assert get_default_manager().selections()
        return "".join(warnings).removeprefix(prefix)

    assert start() == ""
    assert start() == "", "a new manager takes over the handler of the one before"
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert start() == "SIGUSR2 has a handler already: <Handlers.SIG_IGN: 1>"
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR2)
    assert start() == "SIGUSR2 has a handler already: that of a compiled library"
    faulthandler.unregister(signal.SIGUSR2)
    monkeypatch.setenv("VLLM_FL_TRACE_DIR", __file__)
    assert start() == f"[Errno 17] File exists: '{__file__}'"
    thread = threading.Thread(target=lambda: warnings.append(start()))
    thread.start()
    thread.join()
    assert warnings[-1] == ("dispatch started outside of the main thread, which alone can install a signal's handler")


def test_without_the_variable_the_signal_keeps_its_meaning() -> None:
    assert get_default_manager().selections()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


@pytest.mark.usefixtures("handler")
def test_a_question_does_not_disturb_what_it_interrupts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    Tracer(get_default_manager(), tmp_path, "test").start()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    signal.raise_signal(signal.SIGUSR2)
    assert warnings == []


def test_two_questions_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    tracer = Tracer(get_default_manager(), tmp_path, "test")
    begun = threading.Barrier(2)

    def dump(document: object, file: TextIO) -> None:
        with suppress(threading.BrokenBarrierError):
            begun.wait(0.2)  # the second one comes while the first one writes, unless it has to wait
        file.write(json.dumps(document))

    monkeypatch.setattr(live.json, "dump", dump)
    threads = [threading.Thread(target=tracer._dump) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings == []
    assert [path.name for path in tmp_path.iterdir()] == [f"dispatch-{os.getpid()}.json"]
