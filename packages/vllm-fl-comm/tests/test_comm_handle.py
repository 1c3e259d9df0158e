"""The communicator's handle: every collective on every form, dtypes, groups, the end, and what it refuses."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from comm_support import FORMS, Buffer, Doubles, count, fault, in_process, on_ranks

from vllm_fl_comm.errors import CommunicationError, FlagCXStatusError
from vllm_fl_comm.flagcx import Communicator, DataType, Library, Reduction, open_communicators
from vllm_fl_comm.flagcx.streams import stream_box

SUM, F32 = Reduction.SUM, DataType.FLOAT32


def collectives(communicator: Communicator) -> dict[str, list[float]]:
    """The results of every collective on this rank; rank r sends r + 1 and 10 (r + 1)."""
    rank, size = communicator.rank, communicator.size
    own = Buffer(ctypes.c_float, [rank + 1, 10 * (rank + 1)])
    many = Buffer(ctypes.c_float, [100 * rank + k for k in range(size)])
    names = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "exchange")
    out = {name: Buffer(ctypes.c_float, [-1] * (2 * size)) for name in names}
    address = {name: buffer.address for name, buffer in out.items()}
    communicator.all_reduce(own.address, address["all_reduce"], 2, F32, SUM, 0)
    communicator.reduce(own.address, address["reduce"], 2, F32, Reduction.MAX, 1, 0)
    communicator.reduce_scatter(many.address, address["reduce_scatter"], 1, F32, SUM, 0)
    communicator.all_gather(own.address, address["all_gather"], 2, F32, 0)
    communicator.broadcast(own.address, address["broadcast"], 2, F32, 1, 0)
    communicator.gather(own.address, address["gather"], 2, F32, 0, 0)
    with communicator.group():
        communicator.send(own.address, 2, F32, (rank + 1) % size, 0)
        communicator.recv(address["exchange"], 2, F32, (rank - 1) % size, 0)
    return {name: buffer.values for name, buffer in out.items()}


@pytest.mark.parametrize("form", FORMS)
def test_every_collective_on_every_form(doubles: Doubles, form: int) -> None:
    first, second, third = on_ranks(doubles.library(form), collectives, ranks=3)
    for result in (first, second, third):
        assert result["all_reduce"][:2] == [6, 60]
        assert result["all_gather"] == [1, 10, 2, 20, 3, 30]
        assert result["broadcast"][:2] == [2, 20]
    assert second["reduce"][:2] == [3, 30]
    assert first["reduce"] == third["reduce"] == [-1] * 6
    assert [result["reduce_scatter"][0] for result in (first, second, third)] == [300, 303, 306]
    assert first["gather"] == [1, 10, 2, 20, 3, 30]
    assert [result["exchange"][:2] for result in (first, second, third)] == [[3, 30], [1, 10], [2, 20]]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (DataType.INT8, ctypes.c_int8),
        (DataType.UINT8, ctypes.c_uint8),
        (DataType.INT32, ctypes.c_int32),
        (DataType.UINT32, ctypes.c_uint32),
        (DataType.INT64, ctypes.c_int64),
        (DataType.UINT64, ctypes.c_uint64),
        (DataType.FLOAT32, ctypes.c_float),
        (DataType.FLOAT64, ctypes.c_double),
    ],
    ids=lambda value: value.name if isinstance(value, DataType) else "",
)
@pytest.mark.parametrize("op", Reduction)
def test_dtypes_and_reductions(library: Library, dtype: DataType, kind: type, op: Reduction) -> None:
    expected = {"SUM": 10, "PRODUCT": 24, "MAX": 6, "MIN": 4, "AVERAGE": 5}[op.name]

    def run(communicator: Communicator) -> list[float]:
        buffer = Buffer(kind, [4 + 2 * communicator.rank])
        communicator.all_reduce(buffer.address, buffer.address, 1, dtype, op, 0)
        return buffer.values

    assert on_ranks(library, run) == [[expected], [expected]]


def test_large_messages_are_whole(library: Library) -> None:
    """Larger than the buffers of the double, and no multiple of them."""
    elements = (3 << 18) + 7

    def run(communicator: Communicator) -> set[float]:
        buffer = Buffer(ctypes.c_float, [1.0] * elements)
        communicator.all_reduce(buffer.address, buffer.address, elements, F32, SUM, 0)
        with communicator.group():
            received = Buffer(ctypes.c_float, [0.0] * elements)
            communicator.send(buffer.address, elements, F32, 1 - communicator.rank, 0)
            communicator.recv(received.address, elements, F32, 1 - communicator.rank, 0)
        return set(buffer.values) | set(received.values)

    assert on_ranks(library, run) == [{2.0}, {2.0}]


def test_one_box_for_a_stream(library: Library) -> None:
    before = count(library, "streams")
    assert stream_box(7) == stream_box(7) != stream_box(8)
    assert ctypes.c_void_p.from_address(stream_box(7)).value == 7

    def run(communicator: Communicator) -> None:
        buffer = Buffer(ctypes.c_float, [0.0])
        for _ in range(20):
            for stream in (7, 8):
                communicator.all_reduce(buffer.address, buffer.address, 1, F32, SUM, stream)

    on_ranks(library, run)
    assert count(library, "streams") == before + 2


def test_an_error_names_function_group_rank_and_library(library: Library) -> None:
    fault(library, "flagcxAllReduce 1 error=4;flagcxAllReduce 0 error=4")

    def run(communicator: Communicator) -> str:
        with pytest.raises(FlagCXStatusError) as caught:
            communicator.all_reduce(0, 0, 1, F32, SUM, 0)
        return str(caught.value)

    assert on_ranks(library, run)[1] == (
        f"flagcxAllReduce (group 'tp:0', rank 1 of 2) returned 4: invalid argument; library {library.path};"
        " FLAGCX_DEBUG=INFO makes it say more"
    )


def test_an_error_of_a_message_names_the_peer(library: Library) -> None:
    def run(communicator: Communicator) -> str:
        with pytest.raises(FlagCXStatusError) as caught:
            communicator.send(0, 1, F32, 5, 0)
        return str(caught.value)

    assert on_ranks(library, run)[0].startswith("flagcxSend (send to rank 5, group 'tp:0', rank 0 of 2) returned 4: ")


def send_twice(communicator: Communicator, buffer: Buffer) -> None:
    with communicator.group():
        communicator.send(buffer.address, 1, F32, 1 - communicator.rank, 0)
        communicator.send(buffer.address, 1, F32, 9, 0)  # there is no such rank


def test_a_group_that_fails_can_be_followed_by_another(library: Library) -> None:
    def run(communicator: Communicator) -> list[float]:
        buffer = Buffer(ctypes.c_float, [1.0])
        with pytest.raises(FlagCXStatusError):
            send_twice(communicator, buffer)
        communicator.all_reduce(buffer.address, buffer.address, 1, F32, SUM, 0)
        return buffer.values

    assert on_ranks(library, run) == [[2.0], [2.0]]


def test_the_ranks_must_agree_on_their_number(library: Library) -> None:
    identifier = library.unique_id()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Communicator.create, library, identifier, 0, 2)
        threading.Event().wait(0.1)
        with pytest.raises(FlagCXStatusError) as caught:
            Communicator.create(library, identifier, 1, 3, "tp:0")
        assert str(caught.value).startswith(
            "flagcxCommInitRank (group 'tp:0', rank 1 of 3) returned 5: invalid usage; library "
        )
        second = Communicator.create(library, identifier, 1, 2)
        second.destroy()
        first.result(30).destroy()


def test_destroyed_once_and_used_no_more(library: Library) -> None:
    def run(communicator: Communicator) -> str:
        communicator.destroy()
        communicator.destroy()
        with pytest.raises(CommunicationError) as caught:
            communicator.all_reduce(0, 0, 1, F32, SUM, 0)
        with pytest.raises(CommunicationError), communicator.group():
            pass
        return str(caught.value)

    before = count(library, "destroyed")
    assert on_ranks(library, run)[1] == (
        "the FlagCX communicator (group 'tp:0', rank 1 of 2) cannot be used: it has been destroyed"
    )
    assert count(library, "destroyed") == before + 2


def test_a_communicator_that_was_never_connected(library: Library) -> None:
    communicator = Communicator(library, 0, 1)
    communicator.destroy()
    with pytest.raises(CommunicationError, match="it is not connected yet"):
        communicator.all_reduce(0, 0, 1, F32, SUM, 0)


def test_destruction_that_waits_is_left_behind(
    library: Library, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """As when captured graphs hold the communicator."""
    monkeypatch.setattr("vllm_fl_comm.flagcx.communicator.DESTROY_SECONDS", 0.05)
    fault(library, "flagcxCommDestroy * slow=0.3")
    before = count(library, "destroyed")
    communicator = Communicator.create(library, library.unique_id(), 0, 1, "tp:0")
    communicator.destroy()
    assert warnings == [
        "flagcxCommDestroy (group 'tp:0', rank 0 of 1) has not returned after 0.05 s, probably because captured graphs"
        " hold the communicator; it is left to the end of the process"
    ]
    while count(library, "destroyed") == before:  # the other tests count, too
        time.sleep(0.01)


def test_a_thousand_cycles_leave_nothing(library: Library) -> None:
    before, files = count(library, "open"), len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        communicator = Communicator.create(library, library.unique_id(), 0, 1)
        communicator.destroy()
    gc.collect()
    assert count(library, "open") == before
    assert count(library, "created") >= 1000
    assert open_communicators() == []
    assert len(os.listdir("/proc/self/fd")) == files
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"flagcx-double-{os.getpid()}")] == []


def test_two_groups_at_once(library: Library) -> None:
    """Every rank is in two groups and uses them by turns."""
    identifiers = [library.unique_id(), library.unique_id()]

    def run(rank: int) -> list[float]:
        groups = [Communicator.create(library, uid, rank, 2, name) for uid, name in zip(identifiers, "ab", strict=True)]
        buffer = Buffer(ctypes.c_float, [1.0])
        for _ in range(5):
            for group in groups:
                group.all_reduce(buffer.address, buffer.address, 1, F32, SUM, 0)
        for group in groups:
            group.destroy()
        return buffer.values

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[1024.0], [1024.0]]


def test_a_forked_child_may_not_use_it(doubles: Doubles) -> None:
    code = """
import os
from vllm_fl_comm.errors import CommunicationError
from vllm_fl_comm.flagcx import Communicator, DataType, Reduction, load
library = load()
communicator = Communicator.create(library, library.unique_id(), 0, 1, "tp:0")
pid = os.fork()
if pid == 0:
    try:
        communicator.all_reduce(0, 0, 0, DataType.FLOAT32, Reduction.SUM, 0)
    except CommunicationError as error:
        communicator.destroy()
        answer([os.getpid(), str(error)])
    os._exit(0)
os.waitpid(pid, 0)
communicator.destroy()
"""
    _, (pid, text), _ = in_process(code, {"FLAGCX_PATH": str(doubles())})
    assert text == (
        "the FlagCX communicator (group 'tp:0', rank 0 of 1) cannot be used: it belongs to the process that process"
        f" {pid} was forked from; make one of its own"
    )


def test_questions(doubles: Doubles) -> None:
    library = doubles.library(13, "CUSTOM")
    assert on_ranks(library, lambda c: c.is_homogeneous()) == [True, True]
    assert on_ranks(library, lambda c: c.probe_device_communicator(True, 36)) == [None, None]
    fault(library, "flagcxIsHomoComm * error=0;flagcxDevCommCreate 1 error=9")
    assert on_ranks(library, lambda c: c.is_homogeneous()) == [False, False]
    assert on_ranks(library, lambda c: c.probe_device_communicator(True, 36)) == [
        None,
        "flagcxDevCommCreate returned 9",
    ]
    fault(library, "")
    plain = doubles.library()
    assert (
        on_ranks(plain, lambda c: c.probe_device_communicator(False, 36))
        == [f"{plain.path} has no flagcxDevCommCreate"] * 2
    )
