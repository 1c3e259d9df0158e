"""Peers that die, hang or are slow: an error that names rank and operation within the timeout, never a hang."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from comm_support import Buffer, Doubles, fault, in_process, on_ranks

from vllm_fl import processes
from vllm_fl_comm.errors import PeerLostError
from vllm_fl_comm.flagcx import Communicator, DataType, Library, Reduction
from vllm_fl_comm.peers import Peer
from vllm_fl_comm.watchdog import EXIT_STATUS, watch

TIMEOUT = 0.6


def all_reduce(communicator: Communicator) -> list[float]:
    buffer = Buffer(ctypes.c_float, [1.0])
    communicator.all_reduce(buffer.address, buffer.address, 1, DataType.FLOAT32, Reduction.SUM, 0)
    return buffer.values


def watched(communicator: Communicator) -> str:
    """The error of an all-reduce on rank 0, whose peers do not come."""
    if communicator.rank != 0:
        return ""
    watch(communicator, TIMEOUT, asynchronous=False)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        all_reduce(communicator)
    assert time.monotonic() - started < TIMEOUT + 10
    with pytest.raises(PeerLostError) as again:
        all_reduce(communicator)
    assert str(again.value) == str(caught.value)
    return str(caught.value)


def test_a_rank_that_does_not_come(library: Library) -> None:
    other = Peer(1, "another host", 7, 1)
    text = on_ranks(library, watched, name="tp:0", peers=(other,))[0]
    assert text.startswith("group 'tp:0', rank 0 of 2: all_reduce of 1 elements did not end in ")
    assert text.endswith(
        f" s (limit {TIMEOUT:g} s, VLLM_FL_COMM_TIMEOUT): rank 1 (process 7) did not take part: stuck, far behind, on"
        " another path, or on a host that cannot be seen"
    )


def test_a_rank_that_hangs_inside_the_library(library: Library) -> None:
    fault(library, "flagcxAllReduce 0 hang")
    assert "all_reduce of 1 elements did not end" in on_ranks(library, watched)[0]


def test_ranks_on_different_paths(doubles: Doubles, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlagCX's kernels on one rank and the plain collective on the other wait for one another."""
    monkeypatch.setenv("FLAGCX_CUSTOM_OP_ENABLE", "1")
    library = doubles.library(14, "CUSTOM")  # of its own: the switch is read once in a library's life
    fault(library, "custom 1 refuse")

    def run(communicator: Communicator) -> str:
        watch(communicator, TIMEOUT, asynchronous=False)
        with pytest.raises(PeerLostError) as caught:
            all_reduce(communicator)
        return str(caught.value)

    texts = on_ranks(library, run)
    fault(library, "")
    assert all("on another path" in text for text in texts)


def test_a_slow_rank_is_waited_for(library: Library) -> None:
    fault(library, f"flagcxAllReduce 1 slow={TIMEOUT / 2}")

    def run(communicator: Communicator) -> list[float]:
        watch(communicator, TIMEOUT * 4, asynchronous=False)
        return all_reduce(communicator)

    assert on_ranks(library, run) == [[2.0], [2.0]]


def rank_process(path: str, identifier: bytes, rank: int, pipe: Any) -> None:
    """A rank in a process of its own: tells who it is, learns the others, then all-reduces until something fails."""
    os.environ["FLAGCX_PATH"] = path
    from vllm_fl_comm.flagcx import load

    pipe.send(Peer.here(rank))
    others = tuple(pipe.recv())
    communicator = Communicator(load(), rank, 2, "tp:0", peers=others)
    watch(communicator, 30.0, asynchronous=False)
    communicator.connect(identifier)
    pipe.send("connected")
    try:
        while True:
            all_reduce(communicator)
    except PeerLostError as error:
        pipe.send(str(error))
    communicator.destroy()


def test_a_rank_whose_process_is_killed(doubles: Doubles) -> None:
    context = multiprocessing.get_context("spawn")
    identifier = doubles.library().unique_id()
    pipes, processes, found = [], [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        process = context.Process(target=rank_process, args=(str(doubles()), identifier, rank, theirs))
        process.start()
        pipes.append(mine)
        processes.append(process)
    found = [pipe.recv() for pipe in pipes]
    for rank, pipe in enumerate(pipes):
        pipe.send([peer for peer in found if peer.rank != rank])
    assert [pipe.recv() for pipe in pipes] == ["connected", "connected"]
    victim = processes[1].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)  # and not waited for: the process stays a zombie meanwhile
    started = time.monotonic()
    text = pipes[0].recv()
    assert time.monotonic() - started < 20  # long before the limit of 30 s
    assert text.startswith("group 'tp:0', rank 0 of 2: all_reduce of 1 elements did not end in ")
    assert text.endswith(f": rank 1 (process {victim}) has ended; the log of that rank says why")
    processes[0].join(20)
    assert processes[0].exitcode == 0
    processes[1].join(20)


UNSTOPPABLE = """
import time
from vllm_fl_comm import watchdog
from vllm_fl_comm.flagcx import Communicator, DataType, Reduction, load
from vllm_fl_comm.peers import Peer
watchdog._RETURN_SECONDS = 0.2
library = load()
communicator = Communicator(library, 0, RANKS, "tp:0", peers=(Peer(1, "elsewhere", 7, 1),))
watchdog.watch(communicator, 0.4, asynchronous=False)
time.sleep(0.6)  # another rank may be late with the id
communicator.connect(library.unique_id())
communicator.all_reduce(0, 0, 0, DataType.FLOAT32, Reduction.SUM, 0)
"""


@pytest.mark.parametrize(
    ("defines", "action", "ranks", "operation"),
    [
        ((), "deaf", 1, "all_reduce"),
        (("WITHOUT_ABORT",), "hang", 1, "all_reduce"),
        ((), "deaf", 2, "the creation of the communicator"),
    ],
    ids=["deaf to abort", "no abort", "while connecting"],
)
def test_what_cannot_be_taken_back_ends_the_process(
    doubles: Doubles, defines: tuple[str, ...], action: str, ranks: int, operation: str
) -> None:
    env = {"FLAGCX_PATH": str(doubles(13, *defines)), "FLAGCX_DOUBLE_FAULT": f"flagcxAllReduce * {action}"}
    code, _, log = in_process(UNSTOPPABLE.replace("RANKS", str(ranks)), env, check=False)
    assert code == EXIT_STATUS, log
    assert f"group 'tp:0', rank 0 of {ranks}: {operation} did not end in " in log
    assert "this process is ended, because an operation that waits for the lost rank cannot be taken back" in log


def test_an_idle_communicator_outlives_its_peer_by_the_timeout(library: Library) -> None:
    """On a device operations wait in a stream, where nothing is pending for the host."""
    code = f"""
import os, subprocess, sys, time
from vllm_fl_comm.flagcx import Communicator, load
from vllm_fl.processes import started
from vllm_fl_comm.peers import Peer
from vllm_fl_comm.watchdog import watch
other = subprocess.Popen(["sleep", "60"])
own = Peer.here(0)
peer = Peer(1, own.host, other.pid, started(other.pid))
assert peer.is_visible()
communicator = Communicator(load(), 0, 1, "tp:0", peers=(peer,))
watch(communicator, {TIMEOUT}, asynchronous=True)
communicator.connect(communicator.library.unique_id())
time.sleep(1)
other.kill()
time.sleep(30)
"""
    folder = str(Path(library.path).parents[1])
    status, _, log = in_process(code, {"FLAGCX_PATH": folder}, check=False)
    assert status == EXIT_STATUS, log
    assert "group 'tp:0', rank 0 of 1: a peer was lost" in log
    assert "has ended; the log of that rank says why" in log


def test_a_closed_communicator_is_no_longer_watched(library: Library) -> None:
    from vllm_fl_comm import watchdog

    communicator = Communicator.create(library, library.unique_id(), 0, 1)
    watch(communicator, TIMEOUT, asynchronous=False)
    communicator.destroy()
    deadline = time.monotonic() + 5
    while watchdog._watched and time.monotonic() < deadline:
        time.sleep(0.05)
    assert watchdog._watched == []


def test_this_process_is_visible_and_alive() -> None:
    own = Peer.here(3)
    assert (own.rank, own.pid) == (3, os.getpid())
    assert own.is_visible()
    assert not own.has_ended()
    assert str(own) == f"rank 3 (process {os.getpid()})"


def test_another_process_of_the_same_id_is_not_the_peer() -> None:
    own = Peer.here(0)
    earlier = Peer(0, own.host, own.pid, own.started - 1)
    assert earlier.has_ended()
    assert not earlier.is_visible()
    assert not Peer(0, "elsewhere", own.pid, own.started).is_visible()


def test_without_proc_nobody_is_visible(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    own = Peer.here(0)
    assert own.started == 0
    assert not own.is_visible()
