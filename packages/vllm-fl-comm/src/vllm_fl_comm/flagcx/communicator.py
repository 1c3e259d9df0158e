"""One FlagCX communicator: a handle that checks every status, knows its peers, and cannot be destroyed twice."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple, NoReturn

from vllm_fl.logging import get_logger
from vllm_fl_comm.errors import CommunicationError
from vllm_fl_comm.peers import Peer

from .abi import DeviceCommRequirements, UniqueId
from .library import Library
from .streams import stream_box

#: Seconds that flagcxCommDestroy gets: it may wait for captured graphs that still hold the communicator.
DESTROY_SECONDS = 5.0

#: id -> every communicator that is open in this process; copied before it is iterated over.
_open: dict[int, weakref.ref[Communicator]] = {}


class Pending(NamedTuple):
    """An operation that the library has not returned from: its name, its elements, and when it began."""

    operation: str
    elements: int
    started: float

    def __str__(self) -> str:
        return f"{self.operation} of {self.elements} elements" if self.elements else self.operation


class Communicator:
    """A rank's handle of a communicator. Buffers and streams are addresses; counts are in elements.

    Data types and reductions are :class:`~.abi.DataType` and :class:`~.abi.Reduction`, or their numbers.
    On a device whose streams are asynchronous a method returns when the operation is queued, as with any such library.
    Make one with :meth:`create`; not for use by two threads at a time.

    Args:
        library: the loaded FlagCX.
        rank: of this process in the group, from 0.
        size: ranks in the group.
        name: of the group, for messages.
        peers: processes of the other ranks, for messages and for the watchdog.
        on_thread: called first on every thread that ends the communicator, to select the device there.
    """

    def __init__(
        self,
        library: Library,
        rank: int,
        size: int,
        name: str = "",
        *,
        peers: tuple[Peer, ...] = (),
        on_thread: Callable[[], None] | None = None,
    ) -> None:
        self.library, self.rank, self.size, self.name = library, rank, size, name
        self.peers = peers
        self.pending: Pending | None = None
        self.failure: CommunicationError | None = None
        self.is_closed = False  #: destroyed, given up, or left to the parent process
        self._on_thread = on_thread
        self._handle: int | None = None
        self._unusable: str | None = "it is not connected yet"
        self._all_reduce = library.functions["flagcxAllReduce"]

    @classmethod
    def create(
        cls, library: Library, unique_id: bytes, rank: int, size: int, name: str = "", **options: Any
    ) -> Communicator:
        """Join the communicator of `unique_id`; returns when all `size` ranks have joined.

        Raises:
            FlagCXStatusError: FlagCX could not connect the ranks.
        """
        communicator = cls(library, rank, size, name, **options)
        communicator.connect(unique_id)
        return communicator

    def connect(self, unique_id: bytes) -> None:
        """Join the other ranks; see :meth:`create`."""
        identifier, handle = UniqueId.from_buffer_copy(unique_id), ctypes.c_void_p()
        init = self.library.functions["flagcxCommInitRank"]
        with self._operation("the creation of the communicator"):
            code = init(ctypes.byref(handle), self.size, ctypes.byref(identifier), self.rank)
        self._settle("flagcxCommInitRank", code)
        if not handle.value:
            self.library.fail(3, "flagcxCommInitRank", f"{self.where}: it set no communicator")
        self._handle, self._unusable = handle.value, None
        _open[id(self)] = weakref.ref(self)

    @property
    def where(self) -> str:
        """Group and rank, for messages."""
        group = f"group {self.name!r}, " if self.name else ""
        return f"{group}rank {self.rank} of {self.size}"

    # --- collectives ---

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce `count` elements over all ranks into `recv` of every rank."""
        # Written out, since this is the one that is called for every layer: see benchmarks/allreduce.py --host-cost.
        if self._unusable is not None:
            self._refuse()
        self.pending = Pending("all_reduce", count, monotonic())
        code = self._all_reduce(send, recv, count, dtype, op, self._handle, stream_box(stream))
        self.pending = None
        if code or self._unusable is not None:
            self._settle("flagcxAllReduce", code)

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
        """Reduce `count` elements over all ranks into `recv` of `root`."""
        self._call("flagcxReduce", "reduce", count, send, recv, count, dtype, op, root, stream=stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Reduce ``size * count`` elements over all ranks; rank r keeps the r-th `count` of them."""
        self._call("flagcxReduceScatter", "reduce_scatter", count, send, recv, count, dtype, op, stream=stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:
        """Gather `count` elements of every rank, in the order of ranks, into `recv` of every rank."""
        self._call("flagcxAllGather", "all_gather", count, send, recv, count, dtype, stream=stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Copy `count` elements of `root`'s `send` into `recv` of every rank; `send` of the others is not read."""
        self._call("flagcxBroadcast", "broadcast", count, send, recv, count, dtype, root, stream=stream)

    def gather(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Gather `count` elements of every rank into `recv` of `root`; `recv` of the others is not written."""
        self._call("flagcxGather", "gather", count, send, recv, count, dtype, root, stream=stream)

    def send(self, buffer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send `count` elements to the rank `peer`, which has to receive them."""
        self._call("flagcxSend", f"send to rank {peer}", count, buffer, count, dtype, peer, stream=stream)

    def recv(self, buffer: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive `count` elements that the rank `peer` sends."""
        self._call("flagcxRecv", f"receive from rank {peer}", count, buffer, count, dtype, peer, stream=stream)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Operations inside are begun together when the block ends, so that their order cannot deadlock."""
        self._call("flagcxGroupStart", "the start of a group", 0)
        try:
            yield
        except BaseException:
            # FlagCX counts starts and ends in the thread; an open group would swallow every later operation.
            with self._operation("the end of a group that failed"):
                self.library.functions["flagcxGroupEnd"](self._handle)
            raise
        self._call("flagcxGroupEnd", "the end of a group", 0)

    # --- questions ---

    def is_homogeneous(self) -> bool:
        """Whether all ranks have devices of one vendor, so that the vendor's own library does the work.

        True where the library cannot say: such a release knows nothing else.
        """
        ask = self.library.functions.get("flagcxIsHomoComm")
        if ask is None:
            return True
        answer = ctypes.c_int()
        self._settle("flagcxIsHomoComm", ask(self._usable_handle(), ctypes.byref(answer)))
        return bool(answer.value)

    def probe_device_communicator(self, multicast: bool, barriers: int) -> str | None:
        """Whether FlagCX can make what its kernels need, by making and destroying it; None, or why not. Collective."""
        create = self.library.functions.get("flagcxDevCommCreate")
        destroy = self.library.functions.get("flagcxDevCommDestroy")
        if create is None or destroy is None:
            return f"{self.library.path} has no flagcxDevCommCreate"
        wanted = DeviceCommRequirements(intra_multicast=multicast, intra_barrier_count=barriers, inter_context_count=4)
        made = ctypes.c_void_p()
        with self._operation("the probe of the device communicator"):
            code = create(self._usable_handle(), ctypes.byref(wanted), ctypes.byref(made))
        if code or not made.value:
            return f"flagcxDevCommCreate returned {code}" if code else "flagcxDevCommCreate made nothing"
        self._settle("flagcxDevCommDestroy", destroy(self._handle, made))
        return None

    # --- the end ---

    def destroy(self) -> None:
        """End it; a second call does nothing. Captured graphs that use it may not be replayed any more.

        Raises:
            FlagCXStatusError: FlagCX reports an error.
        """
        handle, self._handle = self._handle, None
        self.is_closed = True
        if handle is None:
            return
        self._unusable = "it has been destroyed"
        _open.pop(id(self), None)
        ended = self._end("flagcxCommDestroy", handle, DESTROY_SECONDS)
        if ended is None:
            get_logger(__name__).warning(
                "flagcxCommDestroy (%s) has not returned after %g s, probably because captured graphs hold the"
                " communicator; it is left to the end of the process",
                self.where,
                DESTROY_SECONDS,
            )
        else:
            self.library.check(ended, "flagcxCommDestroy", self.where)

    def give_up(self, failure: CommunicationError) -> None:
        """Refuse every further operation with `failure`, and make the one that waits return, if FlagCX can.

        For the watchdog, on its own thread. After an abort FlagCX must not destroy the communicator again.
        """
        self.failure, self._unusable, self.is_closed = failure, str(failure), True
        handle, self._handle = self._handle, None
        _open.pop(id(self), None)
        if handle is not None and self.library.features.abort:
            self._end("flagcxCommAbort", handle, DESTROY_SECONDS)

    def orphan(self) -> None:
        """In a forked child: the communicator is the parent's, and may be neither used nor destroyed here."""
        self._handle, self.pending, self.is_closed = None, None, True
        self._unusable = f"it belongs to the process that process {os.getpid()} was forked from; make one of its own"

    def _end(self, function: str, handle: int, seconds: float) -> int | None:
        result: list[int] = []

        def run() -> None:
            if self._on_thread is not None:
                self._on_thread()
            result.append(self.library.functions[function](handle))

        thread = threading.Thread(target=run, name=function, daemon=True)
        thread.start()
        thread.join(seconds)
        return result[0] if result else None

    # --- status ---

    def _call(self, function: str, operation: str, count: int, *arguments: Any, stream: int | None = None) -> None:
        handle = self._usable_handle()
        self.pending = Pending(operation, count, monotonic())
        tail = () if stream is None else (stream_box(stream),)
        code = self.library.functions[function](*arguments, handle, *tail)
        self.pending = None
        if code or self._unusable is not None:
            self._settle(function, code, operation)

    @contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        self.pending = Pending(name, 0, monotonic())
        try:
            yield
        finally:
            self.pending = None

    def _settle(self, function: str, code: int, operation: str = "") -> None:
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        self.library.check(code, function, f"{operation}, {self.where}" if operation else self.where)

    def _usable_handle(self) -> int | None:
        if self._unusable is not None:
            self._refuse()
        return self._handle

    def _refuse(self) -> NoReturn:
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        raise CommunicationError(f"the FlagCX communicator ({self.where}) cannot be used: {self._unusable}")


def open_communicators() -> list[Communicator]:
    """The communicators that are open in this process."""
    alive = {key: communicator for key, reference in list(_open.items()) if (communicator := reference()) is not None}
    for key in set(_open) - set(alive):
        _open.pop(key, None)
    return list(alive.values())


def _after_fork() -> None:
    for communicator in open_communicators():
        communicator.orphan()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
