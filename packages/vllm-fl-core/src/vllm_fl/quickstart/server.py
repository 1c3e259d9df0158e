"""Runs ``vllm serve`` on the quickstart model: a free port, a wait until it answers, an end that leaves no process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from vllm_fl.engines import ENGINE_ENVIRONMENT
from vllm_fl.errors import CommandError, Exit

HOST = "127.0.0.1"
DEFAULT_PORT = 8000
START_LIMIT_S = 600.0
STOP_LIMIT_S, TERMINATE_LIMIT_S = 20.0, 5.0
"""How long the server has to end after SIGINT, and after SIGTERM."""


def port_is_free(port: int) -> bool:
    """Whether a server could listen on `port` of this machine now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def choose_port(wanted: int | None) -> int:
    """`wanted`, which must be free, or else the default port, or else any free one."""
    if wanted is not None:
        if not port_is_free(wanted):
            raise CommandError(f"Port {wanted} is taken.", "Name another one, or leave --port out.", Exit.USAGE)
        return wanted
    if port_is_free(DEFAULT_PORT):
        return DEFAULT_PORT
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def curl_line(port: int, model_name: str, prompt: str) -> str:
    """A command that asks the server, ready to paste into a shell."""
    body = json.dumps({
        "model": model_name, "messages": [{"role": "user", "content": prompt}], "max_tokens": 64, "temperature": 0,
    })  # fmt: skip
    quoted = body.replace("'", "'\\''")
    return f"curl http://{HOST}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'"


class Server:
    """``vllm serve`` as a child process in a group of its own.

    Args:
        model: directory of the model.
        name: what clients call it.
        port: where it listens, on this machine only.
        dtype: type of weights and activations.
        compiled: whether torch.compile is used.
        log: file that receives the server's output; None sends it to standard error.
    """

    def __init__(self, model: Path, name: str, port: int, dtype: str, compiled: bool, log: Path | None) -> None:
        self.port, self.log = port, log
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", name]
        command += ["--host", HOST, "--port", str(port), "--dtype", dtype, "--max-model-len", "2048"]
        command += ["--max-num-seqs", "32", "--kv-cache-memory-bytes", str(512 << 20)]
        command += [] if compiled else ["--enforce-eager"]
        with _output(log) as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **ENGINE_ENVIRONMENT},
                start_new_session=True,
            )

    def wait_until_healthy(self, limit_s: float = START_LIMIT_S) -> None:
        """Returns when the server answers.

        Raises:
            CommandError: it ended, or did not answer within `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self.raise_if_ended()
            with contextlib.suppress(OSError):
                url = f"http://{HOST}:{self.port}/health"
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
                    if answer.status == 200:
                        return
            time.sleep(0.2)
        raise CommandError(f"The server did not answer within {limit_s:.0f} s.", "Read the log.", Exit.FAILED, self.log)

    def raise_if_ended(self) -> None:
        """Raises CommandError with the end of the log if the server is no longer there."""
        code = self.process.poll()
        if code is None:
            return
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log else []
        reason = next((f" {line.strip()}" for line in reversed(lines) if "Error" in line), "")
        raise CommandError(f"The server ended with code {code}.{reason}", "Read the log.", Exit.FAILED, self.log)

    def wait(self) -> None:
        """Returns never: raises CommandError when the server ends by itself."""
        while True:
            self.raise_if_ended()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=3600)

    def stop(self) -> None:
        """Ends the server and everything that it started: politely first, by force after that or at a second Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            for number, limit_s in ((signal.SIGINT, STOP_LIMIT_S), (signal.SIGTERM, TERMINATE_LIMIT_S)):
                if self.process.poll() is None:
                    self.process.send_signal(number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(timeout=limit_s)
        with contextlib.suppress(ProcessLookupError):  # the engine's processes are in the same group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def _output(log: Path | None) -> Iterator[BinaryIO]:
    if log is None:
        yield sys.stderr.buffer
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        yield file


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP end the command like Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            previous[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for restored, handler in previous.items():
            signal.signal(restored, handler)
