"""A server of vLLM for the tests of a module: started, waited for, asked, and ended with all that it started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLI = (sys.executable, "-m", "vllm.entrypoints.cli.main")
#: The name that a served model has.
NAME = "served"


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    marker: str

    def post(self, path: str, **body: Any) -> Any:
        """The answer, or the list of the streamed answers."""
        body = {"model": NAME, "temperature": 0, **body}
        request = urllib.request.Request(
            f"{self.url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            if not body.get("stream"):
                return json.load(response)
            lines = [line.decode().strip().removeprefix("data: ") for line in response if line.strip()]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def get(self, path: str) -> str:
        """The text of an answer."""
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=60) as response:
            return str(response.read().decode())

    def command(self, path: str) -> None:
        """Post without a body."""
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{path}", method="POST"), timeout=60).close()

    def wait_until_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=1).close()
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise AssertionError(f"the server did not come up:\n{self.log.read_text()}")

    def processes(self) -> list[int]:
        """Processes that have inherited the server's environment, wherever they may have gone."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                alive = "\nState:\tZ" not in (entry / "status").read_text()
                if alive and self.marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has ended meanwhile
                continue
        return found

    def wait_for_end(self) -> None:
        """After a signal: the server must end with code 0 and leave no process behind."""
        assert self.process.wait(60) == 0, self.log.read_text()
        deadline = time.monotonic() + 10
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.processes() == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(model: Path, environment: dict[str, str], log: Path, *options: str) -> Iterator[Server]:
    """``vllm serve`` on a free port, ready for requests."""
    port, marker = free_port(), f"FL_TEST_SERVER={uuid.uuid4()}"
    command = [*CLI, "serve", str(model), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options],
            env={**environment, **dict([marker.split("=")])},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", log, marker)
    try:
        server.wait_until_ready(timeout=600)
        yield server
    finally:
        for pid in server.processes():
            os.kill(pid, signal.SIGKILL)
        process.wait()
