"""Commands that start vLLM: each in a process group of its own, in a clean environment, its output in a log."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock

from steps import clean_environment


def vllm_environment(home: Path, **settings: str) -> dict[str, str]:
    """What a process of vLLM needs: caches in `home`, no network, one thread, and none of the caller's settings."""
    environment = {k: v for k, v in clean_environment().items() if not k.startswith(("VLLM_", "XDG_", "HF_"))}
    return {
        **environment,
        "HOME": str(home),
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        **settings,
    }


def run_group(
    command: Sequence[str], environment: Mapping[str, str], log: Path, timeout: float, cwd: Path | None = None
) -> str:
    """Run a command, end whatever it left behind, and say how it ended: its code, or that it took too long.

    Args:
        log: takes what the command wrote; replaced.
        timeout: seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        with _starting:
            process = subprocess.Popen(
                command, env=dict(environment), cwd=cwd, stdout=output, stderr=output, start_new_session=True
            )
            _running.add(process)
        try:
            return f"ended with code {process.wait(timeout)}"
        except subprocess.TimeoutExpired:
            return "took too long"
        finally:
            _running.discard(process)
            _kill(process)


def end_with_signal() -> None:
    """From here on SIGINT and SIGTERM end this process and all groups that it runs.

    An exception would not do: the threads that wait for the groups would go on.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)


_running: set[subprocess.Popen[bytes]] = set()
_starting = RLock()


def _stop(number: int, frame: object) -> None:
    _starting.acquire()  # for ever: a thread whose group is killed here starts no other
    for process in list(_running):
        _signal(process)
    os._exit(128 + number)


def _kill(process: subprocess.Popen[bytes]) -> None:
    _signal(process)
    process.wait()


def _signal(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
