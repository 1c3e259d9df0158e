"""A forked child can compute in parallel, although its parent has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_fl_reference import threads

FORK = """
import os, sys, time, torch
if sys.argv[1] == "safe":
    from vllm_fl_reference.threads import make_forks_safe
    make_forks_safe()
    make_forks_safe()
torch.set_num_threads(2)
x = torch.randn(1000, 1000)
x.exp()
child = os.fork()
if child == 0:
    torch.randn(1000, 1000).exp()
    os._exit(7)
deadline = time.monotonic() + float(sys.argv[2])
while time.monotonic() < deadline:
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        print("child", os.waitstatus_to_exitcode(status), "parent", tuple(x.exp().shape), torch.get_num_threads())
        break
    time.sleep(0.02)
else:
    os.kill(child, 9)
    print("child hangs")
"""


def fork(kind: str, patience: float) -> str:
    command = [sys.executable, "-c", FORK, kind, str(patience)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP is found through /proc")
def test_a_forked_child_computes() -> None:
    assert fork("safe", patience=60) == "child 7 parent (1000, 1000) 2"


def test_only_gnus_openmp_is_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maps").write_text(
        "7f00-7f01 r-xp 00000000 08:01 11 /lib/x86_64-linux-gnu/libc.so.6\n"
        "7f02-7f03 r-xp 00000000 08:01 12 /opt/with space/libgomp-a1b2.so.1.0.0\n"
        "7f04-7f05 rw-p 00000000 08:01 12 /opt/with space/libgomp-a1b2.so.1.0.0\n"
        "7f06-7f07 r-xp 00000000 08:01 13 /opt/libiomp5.so\n"
        "7f08-7f09 rw-p 00000000 00:00 0 \n"
    )
    monkeypatch.setattr(threads, "_MAPS", tmp_path / "maps")
    assert threads._gnu_openmp() == {"/opt/with space/libgomp-a1b2.so.1.0.0"}
