"""Scripts that run commands in groups leave none behind, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from repository_tree import ROOT

import processes

STARTER = """
import os, sys, threading
from pathlib import Path
import processes

def start_for_ever(name):
    while True:
        command = f"echo $$ >> {name}; exec sleep 60"
        processes.run_group(["sh", "-c", command], os.environ, Path(name + ".log"), 60)

processes.end_with_signal()
for number in range(3):
    threading.Thread(target=start_for_ever, args=(sys.argv[1] + str(number),), daemon=True).start()
while not all(Path(sys.argv[1] + str(number)).exists() for number in range(3)):
    pass
print("started", flush=True)
threading.Event().wait()
"""


def ended(pid: str) -> bool:
    """Whether a process ends within ten seconds; the kernel kills when it comes to it."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_a_signal_ends_every_group(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "pid")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        for _ in range(2):  # as `timeout` does, to the process and to its group
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    pids = [line for number in range(3) for line in (tmp_path / f"pid{number}").read_text().split()]
    assert all(map(ended, pids))


def test_what_a_command_leaves_behind_is_ended(tmp_path: Path) -> None:
    command = ["sh", "-c", f"sleep 60 & echo $! > {tmp_path}/left; exit 3"]
    assert processes.run_group(command, os.environ, tmp_path / "log", 30) == "ended with code 3"
    assert ended((tmp_path / "left").read_text().strip())


def test_a_command_that_takes_too_long(tmp_path: Path) -> None:
    assert processes.run_group(["sleep", "60"], os.environ, tmp_path / "log", 0.1) == "took too long"
