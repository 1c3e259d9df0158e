"""``vllm-fl quickstart --serve`` with a stand-in for vLLM's server: port, wait, curl line, the end of all processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_fl.errors import CommandError, Exit
from vllm_fl.quickstart import server
from vllm_fl.quickstart.server import Server

FAKE = """
import http.server, os, signal, subprocess, sys
arguments = sys.argv[1:]
mode = os.environ.get("FAKE", "")
if mode == "fail":
    sys.exit("ValueError: the model is too large")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.environ["PIDS"], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
if mode == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
print("arguments", arguments)
try:
    http.server.HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
except KeyboardInterrupt:
    print("a polite end")
"""


@pytest.fixture(autouse=True)
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m vllm.entrypoints.cli.main` of a child process is the server above."""
    folder = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "main.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        yield busy.getsockname()[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(tmp_path: Path) -> Server:
    return Server(Path("/models/smol"), "smol", free_port(), "bfloat16", False, tmp_path / "serve.log")


def processes(tmp_path: Path) -> list[int]:
    """Those of the server that still run."""
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    return [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for_pids(tmp_path: Path) -> None:
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_nothing_left(tmp_path: Path) -> None:
    deadline = time.monotonic() + 10
    while processes(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel ends a killed process a moment later
    assert processes(tmp_path) == []


def test_free_port_is_taken_as_wanted() -> None:
    port = free_port()
    assert server.choose_port(port) == port


def test_taken_port_is_an_error(taken: int) -> None:
    with pytest.raises(CommandError) as caught:
        server.choose_port(taken)
    assert str(caught.value) == f"Port {taken} is taken.\nRemedy: Name another one, or leave --port out."
    assert caught.value.code == Exit.USAGE


def test_default_port_gives_way(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DEFAULT_PORT", taken)
    chosen = server.choose_port(None)
    assert chosen != taken
    assert server.port_is_free(chosen)


@pytest.mark.parametrize("prompt", ["What is it?", 'It\'s "quoted" $HOME `date` \\n'])
def test_curl_line_survives_the_shell(prompt: str) -> None:
    words = shlex.split(server.curl_line(8123, "smol", prompt))
    assert words[:2] == ["curl", "http://127.0.0.1:8123/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["messages"] == [{"role": "user", "content": prompt}]
    assert body["model"] == "smol"


def test_server_answers_and_ends_politely(tmp_path: Path) -> None:
    running = start(tmp_path)
    try:
        running.wait_until_healthy(60)
        assert len(processes(tmp_path)) == 2
    finally:
        running.stop()
    assert_nothing_left(tmp_path)
    log = (tmp_path / "serve.log").read_text()
    assert "a polite end" in log
    assert f"'--port', '{running.port}'" in log
    assert "'--enforce-eager'" in log


def test_stubborn_server_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "stubborn")
    monkeypatch.setattr(server, "STOP_LIMIT_S", 0.2)
    monkeypatch.setattr(server, "TERMINATE_LIMIT_S", 0.2)
    running = start(tmp_path)
    wait_for_pids(tmp_path)
    running.stop()
    assert_nothing_left(tmp_path)


def test_server_that_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE", "fail")
    running = start(tmp_path)
    with pytest.raises(CommandError) as caught:
        running.wait_until_healthy(60)
    running.stop()
    assert str(caught.value) == (
        "The server ended with code 1. ValueError: the model is too large\n"
        f"Remedy: Read the log.\nLog: {tmp_path / 'serve.log'}"
    )


def test_server_that_never_answers(tmp_path: Path) -> None:
    running = start(tmp_path)
    running.port = free_port()  # asked at another place than where it listens
    with pytest.raises(CommandError, match=r"^The server did not answer within 1 s\."):
        running.wait_until_healthy(1)
    running.stop()
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_serves_until_a_signal(tmp_path: Path, number: int) -> None:
    """The whole command: it prints the curl line when the server answers, and a signal leaves no process."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    arguments = ["quickstart", "--serve", "--json", "--port", str(free_port()), "--model-dir", str(tmp_path / "model")]
    with subprocess.Popen(
        [sys.executable, "-m", "vllm_fl", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stdout is not None
        line = command.stdout.readline()
        assert line, command.communicate()[1]
        started = json.loads(line)
        echo = subprocess.run(["bash", "-c", started["curl"]], capture_output=True, text=True, check=True).stdout
        assert json.loads(echo)["model"] == started["model"]
        command.send_signal(number)
        _, errors = command.communicate(timeout=60)
    assert command.returncode == 0, errors
    assert "Traceback" not in errors
    assert_nothing_left(tmp_path)


def test_interruption_before_the_server_answers(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "site" / "vllm" / "entrypoints" / "cli" / "main.py").write_text(
        FAKE.replace("print(", "import time; time.sleep(600); print(")
    )
    arguments = ["quickstart", "--serve", "--port", str(free_port()), "--model-dir", str(tmp_path / "model")]
    command = subprocess.Popen([sys.executable, "-m", "vllm_fl", *arguments], stderr=subprocess.PIPE, text=True)
    wait_for_pids(tmp_path)
    os.kill(command.pid, signal.SIGINT)
    errors = command.communicate(timeout=60)[1]
    assert command.returncode == 130
    assert errors.endswith("Interrupted.\n")
    assert_nothing_left(tmp_path)
