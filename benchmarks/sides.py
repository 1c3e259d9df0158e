"""Engines under measurement, each in a process of its own that loads once and then measures on request.

Used by the serving benchmarks. A worker process runs in whatever environment its side has, so this module needs
nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any


@dataclass
class Side:
    """One engine under measurement: how it is started, what it reported, what it reached."""

    name: str
    python: str = sys.executable
    eager: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    rounds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


class WorkerError(Exception):
    """A side's process ended or failed; the message has the first errors of its log, and the end."""


class Engine:
    """The process of one side.

    Args:
        side: what runs.
        script: the benchmark; started with ``--worker JSON``, it answers each JSON line on its standard input with one
            on the pipe ``reply_fd``, after a first line once it is loaded.
        configuration: what the worker gets, besides the side's own.
        log: file for its output.
        stops: whether the process is stopped (SIGSTOP) whenever it is not its turn.
    """

    def __init__(
        self, side: Side, script: Path, configuration: dict[str, Any], log: Path, *, stops: bool = False
    ) -> None:
        self.side, self.log, self.stops = side, log, stops
        receive, send = os.pipe()
        configuration = {**configuration, "eager": side.eager, "reply_fd": send}
        command = [side.python, str(script.resolve()), "--worker", json.dumps(configuration)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=(send,),
                env={**os.environ, **side.environment}, start_new_session=True,
            )  # fmt: skip
        os.close(send)
        self.replies: IO[str] = os.fdopen(receive)

    def reply(self) -> dict[str, Any]:
        """The next JSON line of the worker.

        Raises:
            WorkerError: it has ended.
        """
        line = self.replies.readline()
        if not line:
            self.process.wait()
            lines = self.log.read_text("utf-8", "replace").splitlines()
            # What ended an engine's process comes first, the complaints of those that waited for it last.
            shown = [line for line in lines[:-12] if re.search(r"\w(Error|Exception): ", line)][:3] + lines[-12:]
            text = "\n".join(shown)
            raise WorkerError(f"{self.side.name} ended with code {self.process.returncode}. Log: {self.log}\n{text}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def load(self) -> None:
        """Wait until it is loaded; its first line becomes the side's report."""
        self.side.report = self.reply()
        self._signal(signal.SIGSTOP)

    def measure(self, request: Any = None) -> dict[str, Any]:
        """One request and its answer."""
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        result = self.reply()
        self._signal(signal.SIGSTOP)
        return result

    def _signal(self, number: signal.Signals) -> None:
        if self.stops:
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.replies.close()


def requests(configuration: dict[str, Any], report: dict[str, Any], replies: IO[str]) -> Iterator[Any]:
    """In a worker: say that it is loaded, then the requests."""
    print(json.dumps(report), file=replies)
    for line in sys.stdin:
        yield json.loads(line)


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores, memory, kernel, Python."""
    model = ""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "processor": model or platform.processor(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def version(distribution: str) -> str | None:
    """Of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
