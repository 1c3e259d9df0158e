"""The selection trace of a running server: each of its processes writes it to a file when it is asked.

Opt-in: with ``VLLM_FL_TRACE_DIR`` set to a directory, every process that dispatches leaves a file there and writes it
anew at SIGUSR2. Nothing listens, nothing runs between two questions, and nobody but the user who started the server (or
root) can ask: the kernel lets no one else send the signal, and the files are readable by the owner alone.

``vllm-fl explain OP --live DIR`` and ``vllm-fl info --live DIR`` ask every process that left a file and is still the
same process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

from vllm_fl.dispatch import forks
from vllm_fl.dispatch.oplist import current_rank
from vllm_fl.errors import FLError
from vllm_fl.logging import get_logger
from vllm_fl.processes import catches, owner, started

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpManager

SIGNAL = signal.SIGUSR2
_PREFIX = "dispatch-"
_POLL_S = 0.02


class Tracer:
    """Writes the trace of one manager's process.

    Args:
        manager: held weakly.
        directory: where to write; made, for the owner alone, if it is not there.
        origin: who asked for it, for messages.
    """

    def __init__(self, manager: OpManager, directory: Path, origin: str) -> None:
        self._manager = ref(manager)
        self._directory = directory
        self._origin = origin
        self._lock = threading.Lock()  # two questions at a time would write the same draft

    def start(self) -> None:
        """Install the signal's handler and leave the first file; what prevents it is reported, never raised."""
        if threading.current_thread() is not threading.main_thread():
            self._report("dispatch started outside of the main thread, which alone can install a signal's handler")
            return
        present = signal.getsignal(SIGNAL)
        is_ours = isinstance(getattr(present, "__self__", None), Tracer)
        # A handler of compiled code, such as faulthandler's, is one that Python does not know.
        if not is_ours and (present is not signal.SIG_DFL or catches(os.getpid(), SIGNAL)):
            shown = "that of a compiled library" if present in (signal.SIG_DFL, None) else repr(present)
            self._report(f"{SIGNAL.name} has a handler already: {shown}")
            return
        signal.signal(SIGNAL, self._handle)
        forks.reset_in_child(self)
        self._write({})

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._write({})

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        # In a thread of its own: the handler may have interrupted code that holds a lock which the trace needs. Where
        # no thread can be had, the question goes without an answer; the code that was interrupted must not fail by it.
        with suppress(RuntimeError):
            threading.Thread(target=self._dump, name="vllm-fl trace", daemon=True).start()

    def _dump(self) -> None:
        manager = self._manager()
        if manager is not None:
            with self._lock:
                try:
                    self._write(_trace(manager))
                except FLError as error:
                    self._write({"error": str(error)})

    def _write(self, trace: dict[str, Any]) -> None:
        document = {
            "pid": os.getpid(),
            "started": started(os.getpid()),
            "rank": current_rank(),
            "command": sys.argv[:1],
            "time": time.time(),
            **trace,
        }
        target = self._directory / f"{_PREFIX}{os.getpid()}.json"
        draft = target.with_suffix(".draft")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.unlink(missing_ok=True)
            # O_EXCL follows no link that somebody may have put there; the rename replaces the whole file at once.
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(document, file)
            draft.replace(target)
        except OSError as error:
            self._report(str(error))

    def _report(self, why: str) -> None:
        get_logger(__name__).warning("%s: no trace of this process is written: %s", self._origin, why)


def _trace(manager: OpManager) -> dict[str, Any]:
    from .explain import explain_all

    return {
        "frozen": manager.frozen,
        "operators": [explanation.as_dict() for explanation in explain_all(manager)],
        "failures": [{**asdict(r), "shapes": {n: list(s) for n, s in r.shapes.items()}} for r in manager.failures()],
    }


@dataclass(frozen=True)
class LiveProcess:
    """The answer of one process.

    Args:
        pid: its id.
        rank: its rank.
        problem: why there is no answer; empty if there is one.
        frozen: why its selection is frozen, if it is.
        operators: an explanation of every operator, as :meth:`Explanation.as_dict` gives it.
        failures: the first failure of each implementation.
    """

    pid: int
    rank: int
    problem: str = ""
    frozen: str | None = None
    operators: Sequence[dict[str, Any]] = ()
    failures: Sequence[dict[str, Any]] = ()


def ask_processes(directory: Path, timeout_s: float = 10.0) -> list[LiveProcess]:
    """Ask every process that left a file in `directory`, which ``VLLM_FL_TRACE_DIR`` names where they were started.

    Files of processes that have ended are removed. A process that computes without a pause answers at its next one.

    Raises:
        FileNotFoundError: there is no such directory.
        PermissionError: the processes belong to somebody else.
    """
    asked, silent = [], []
    for path in sorted(directory.iterdir()):
        before = _read(path) if path.name.startswith(_PREFIX) and path.suffix == ".json" else None
        if before is None:
            continue
        pid = before["pid"]
        # A process id is used again some day; the time of the start tells whether it is the same process.
        if before["started"] != started(pid) or before["started"] is None:
            path.unlink(missing_ok=True)
            continue
        # The signal ends a process that does not catch it: one that has become another program since. And a directory
        # that others can write to may hold files that name whatever process they like.
        if catches(pid, SIGNAL) and path.lstat().st_uid == owner(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)
            asked.append((path, before))
        else:
            silent.append(LiveProcess(pid, before.get("rank", 0), "it does not take questions any more"))
    deadline = time.monotonic() + timeout_s
    return [*silent, *(_await(path, before, deadline) for path, before in asked)]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_ours = isinstance(document, dict) and {"started", "time"} <= set(document)
    return document if is_ours and isinstance(document.get("pid"), int) else None


def _await(path: Path, before: dict[str, Any], deadline: float) -> LiveProcess:
    pid, rank = before["pid"], before.get("rank", 0)
    while True:
        now = _read(path)
        if now is not None and now["time"] != before["time"]:
            problem = now.get("error", "")
            operators, failures = now.get("operators", ()), now.get("failures", ())
            return LiveProcess(pid, now.get("rank", rank), problem, now.get("frozen"), operators, failures)
        if started(pid) != before["started"]:
            return LiveProcess(pid, rank, "it ended before it answered")
        if time.monotonic() > deadline:
            return LiveProcess(pid, rank, "it did not answer in time; it may be computing without a pause")
        time.sleep(_POLL_S)
