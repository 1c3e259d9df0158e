"""Ends what waits for a rank that will not come.

A collective waits for every rank, so that one rank that dies or is stuck would stop all others for ever. One thread a
process looks at every open communicator:

- an operation that the library has not returned from for `timeout` seconds, or for :data:`GRACE_SECONDS` after
  the process of a peer has ended, is given up;
- a communicator one of whose peers ended `timeout` seconds ago is given up though no operation waits: on a device,
  operations wait in a stream, unseen from here.

Giving up means: the error is logged, FlagCX is asked to abort, and the operation, as every later one, raises
:class:`~vllm_fl_comm.errors.PeerLostError`. If the operation does not return even then, or where results are computed
in a stream, so that a wrong one could not be held back, the process is ended (exit status 70).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import weakref
from dataclasses import dataclass, field
from time import monotonic, sleep

from vllm_fl.logging import get_logger

from .errors import PeerLostError
from .flagcx.communicator import Communicator, Pending
from .peers import Peer

__all__ = ["EXIT_STATUS", "GRACE_SECONDS", "watch"]

#: Seconds that an operation may go on after a peer has ended: the peer may have done its part before.
GRACE_SECONDS = 2.0
#: Exit status of a process that is ended because of a lost peer (EX_SOFTWARE of sysexits.h).
EXIT_STATUS = 70

_INTERVAL_SECONDS = 0.25
_RETURN_SECONDS = 10.0


@dataclass(eq=False)
class _Watched:
    communicator: weakref.ref[Communicator]
    timeout: float
    asynchronous: bool
    visible: tuple[Peer, ...]
    ended: dict[int, float] = field(default_factory=dict)  # rank -> when it was first seen to have ended


_watched: list[_Watched] = []
_thread: threading.Thread | None = None


def watch(communicator: Communicator, timeout: float, *, asynchronous: bool) -> None:
    """Watch `communicator` until it is closed or collected.

    Args:
        communicator: with its peers.
        timeout: seconds that an operation may take.
        asynchronous: operations run in a device's stream after the call has returned.
    """
    global _thread
    visible = tuple(peer for peer in communicator.peers if peer.is_visible())
    _watched.append(_Watched(weakref.ref(communicator), timeout, asynchronous, visible))
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_run, name="vllm-fl-comm watchdog", daemon=True)
        _thread.start()


def _run() -> None:
    while True:
        sleep(_INTERVAL_SECONDS)
        for entry in list(_watched):
            communicator = entry.communicator()
            if communicator is None or communicator.is_closed:
                _watched.remove(entry)
                continue
            try:
                _look(entry, communicator)
            except Exception:  # the others must be watched on
                get_logger(__name__).exception("the watchdog failed on %s", communicator.where)
                _watched.remove(entry)
            del communicator  # or it would live until the next round


def _look(entry: _Watched, communicator: Communicator) -> None:
    now, pending = monotonic(), communicator.pending
    for peer in entry.visible:
        if peer.rank not in entry.ended and peer.has_ended():
            entry.ended[peer.rank] = now
    since_end = now - min(entry.ended.values(), default=now)
    if pending is not None:
        waited = now - pending.started
        if waited > entry.timeout or min(waited, since_end) > min(GRACE_SECONDS, entry.timeout):
            _give_up(entry, communicator, pending, waited)
    elif since_end > entry.timeout:
        _give_up(entry, communicator, None, since_end)


def _give_up(entry: _Watched, communicator: Communicator, pending: Pending | None, seconds: float) -> None:
    failure = PeerLostError(_message(entry, communicator, pending, seconds))
    get_logger(__name__).error("%s", failure)
    communicator.give_up(failure)
    deadline = monotonic() + _RETURN_SECONDS
    while pending is not None and communicator.pending is pending and monotonic() < deadline:
        sleep(0.01)
    if entry.asynchronous or (pending is not None and communicator.pending is pending):
        _end_process()


def _message(entry: _Watched, communicator: Communicator, pending: Pending | None, seconds: float) -> str:
    gone = [peer for peer in entry.visible if peer.rank in entry.ended]
    if gone:
        verb = "has" if len(gone) == 1 else "have"
        why = f"{' and '.join(map(str, gone))} {verb} ended; the log of that rank says why"
    else:
        others = ", ".join(map(str, communicator.peers)) or "the other ranks"
        why = f"{others} did not take part: stuck, far behind, on another path, or on a host that cannot be seen"
    what = f"{pending} did not end in {seconds:.1f} s" if pending is not None else "a peer was lost"
    limit = f"limit {entry.timeout:g} s, VLLM_FL_COMM_TIMEOUT"
    return f"{communicator.where}: {what} ({limit}): {why}"


def _end_process() -> None:
    log = get_logger(__name__)
    try:
        log.critical("this process is ended, because an operation that waits for the lost rank cannot be taken back")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        faulthandler.dump_traceback(all_threads=True)
    finally:
        os._exit(EXIT_STATUS)


def _after_fork() -> None:
    global _thread
    _watched.clear()
    _thread = None


os.register_at_fork(after_in_child=_after_fork)
