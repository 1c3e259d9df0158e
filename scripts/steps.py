"""Steps of scripts/bootstrap.py: commands with progress lines, one log, and errors that say what to do."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PROGRESS_EVERY = 30.0
"""Seconds between two progress lines when standard error is not a terminal."""

FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"No space left on device|Disk quota exceeded",
        "The disk is full.",
        "Free some space (the environment takes 3 GiB, the caches 1 GiB; TMPDIR, XDG_CACHE_HOME and PIP_CACHE_DIR "
        "move temporary and cached files) and run the same command again.",
    ),
    (
        r"Temporary failure in name resolution|Name or service not known|NameResolutionError|"
        r"Network is unreachable|Failed to establish a new connection|NewConnectionError|ConnectTimeoutError|"
        r"Connection refused|ProxyError",
        "The package index cannot be reached.",
        "Check the network, and HTTPS_PROXY and PIP_INDEX_URL if your site has its own; then run the command again.",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        "The package index's certificate is not trusted.",
        "Set PIP_CERT to the certificate bundle of your site, then run the same command again.",
    ),
    (
        r"ReadTimeoutError|IncompleteRead|Connection broken|Connection reset|do not match the hashes|BadZipFile",
        "A download was interrupted.",
        "Run the same command again: the finished steps are kept.",
    ),
    (
        r"No matching distribution found for (?P<what>\S+)",
        "The package index has no {what} for this Python and machine.",
        "Use Python 3.10 to 3.13 on Linux; if PIP_INDEX_URL or PIP_NO_INDEX is set, make sure that it offers {what}.",
    ),
)


class BootstrapError(Exception):
    """A failure that the reader can act on: what happened, what to do, and the log that has the details."""

    def __init__(self, message: str, remedy: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.message, self.remedy, self.log = message, remedy, log

    def __str__(self) -> str:
        tail = f"\nLog: {self.log}" if self.log else ""
        return f"Error: {self.message}\nRemedy: {self.remedy}{tail}"


def cache_dir() -> Path:
    """The user's cache directory of vllm-fl (the same as `vllm_fl.cache.cache_dir`)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "vllm-fl"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Steps:
    """Runs commands one after another: one progress line each, their output in one log file."""

    def __init__(self, total: int, log: Path) -> None:
        self.total, self.log, self.number = total, log, 0
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")

    def run(self, title: str, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        """Runs `argv` with its output appended to the log; raises BootstrapError when it fails."""
        self.number += 1
        label = f"[{self.number}/{self.total}] {title}"
        start = time.monotonic()
        begin = self.log.stat().st_size
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(argv)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                list(argv),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
            with _stopped_with_us(process):
                self._wait(process, label, start)
        seconds = time.monotonic() - start
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        if process.returncode == 0:
            say(f"{clear}{label}: done in {seconds:.0f} s")
            return
        say(f"{clear}{label}: failed after {seconds:.0f} s")
        raise explain_failure(title, _read_from(self.log, begin), self.log)

    def skip(self, title: str, why: str) -> None:
        self.number += 1
        say(f"[{self.number}/{self.total}] {title}: {why}")

    def _wait(self, process: subprocess.Popen[bytes], label: str, start: float) -> None:
        terminal = sys.stderr.isatty()
        if not terminal:
            say(f"{label} ...")
        due = start + (0.2 if terminal else PROGRESS_EVERY)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
                return
            now = time.monotonic()
            if now < due:
                continue
            due = now + (0.2 if terminal else PROGRESS_EVERY)
            if terminal:
                width = shutil.get_terminal_size().columns - 1
                line = f"{label} ... {now - start:.0f} s  {_last_line(self.log)}"
                print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)
            else:
                say(f"{label} ... {now - start:.0f} s")


@contextlib.contextmanager
def _stopped_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the process and its children when this script is interrupted, so that nothing stays behind."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", "replace")


def _last_line(path: Path) -> str:
    size = path.stat().st_size
    lines = _read_from(path, max(0, size - 2000)).replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def explain_failure(title: str, output: str, log: Path) -> BootstrapError:
    """Turns the output of a failed step into an error that says what to do."""
    for pattern, message, remedy in FAILURES:
        found = re.search(pattern, output)
        if found:
            names = found.groupdict()
            return BootstrapError(f"{title}: {message.format(**names)}", remedy.format(**names), log)
    lines = [line for line in output.splitlines() if line.strip()]
    last = next(
        (line.strip() for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output"
    )
    return BootstrapError(
        f"{title} failed: {last[:300]}", "Read the log; `--recreate` starts with a new environment.", log
    )


def clean_environment(**extra: str) -> dict[str, str]:
    """The process environment without what would send pip's work elsewhere."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, **extra}


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time: two runs neither build twice nor install into each other."""
    import fcntl

    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another run of this script ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
