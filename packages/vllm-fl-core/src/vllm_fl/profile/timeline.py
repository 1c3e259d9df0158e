"""Where a worker's thread spent its time, from a trace: the self time of ranges and of torch's operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from .trace import MODEL_RANGE, Event, served_of

#: What a part of the time belongs to: a dispatched call, an operator of torch outside of such calls, compiled code of
#: inductor, the rest of the model's forward, everything outside of it.
Kind = Literal["operator", "torch", "compiled", "model", "outside"]

_COMPILED = ("## Call CompiledFxGraph", "Torch-Compiled Region")
_CATEGORIES = frozenset({"cpu_op", "user_annotation"})


class Owner(NamedTuple):
    """Who a part of the time belongs to: `name` is the operator, `detail` the implementation, if any."""

    kind: Kind
    name: str = ""
    detail: str = ""


MODEL = Owner("model")
OUTSIDE = Owner("outside")
COMPILED = Owner("compiled")


@dataclass(frozen=True)
class Span:
    """Calls and time of one owner, microseconds; what it called and what belongs to others is not in the time."""

    owner: Owner
    calls: int
    time_us: float


@dataclass(frozen=True)
class Timeline:
    """The time of the threads that ran the model, from the first thing of the model to the last.

    Args:
        spans: every owner, the longest first.
    """

    spans: tuple[Span, ...]

    @cached_property
    def total_us(self) -> float:
        """The whole, microseconds."""
        return sum(span.time_us for span in self.spans)


def timeline(events: Iterable[Event]) -> Timeline:
    """The timeline of a trace; empty if nothing in it belongs to a model or a dispatched call."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _CATEGORIES:
            threads[event.get("pid"), event.get("tid")].append(event)
    times: dict[Owner, float] = defaultdict(float)
    calls: dict[Owner, int] = defaultdict(int)
    for marks in threads.values():
        if any(_is_ours(event) for event in marks):
            _account(marks, times, calls)
    ordered = sorted(times, key=lambda owner: -times[owner])
    return Timeline(tuple(Span(owner, calls[owner], times[owner]) for owner in ordered))


def _is_ours(event: Event) -> bool:
    return event["cat"] == "user_annotation" and (event["name"] == MODEL_RANGE or served_of(event["name"]) is not None)


def _account(marks: list[Event], times: dict[Owner, float], calls: dict[Owner, int]) -> None:
    """Add the self time of every event of one thread to its owner's."""
    ours = [event for event in marks if _is_ours(event)]
    begin = min(float(event["ts"]) for event in ours)
    end = max(float(event["ts"]) + float(event["dur"]) for event in ours)
    opened: list[tuple[float, Owner]] = [(end, OUTSIDE)]
    now = begin

    def pass_time(until: float) -> None:
        nonlocal now
        while len(opened) > 1 and opened[-1][0] <= until:
            finish, owner = opened.pop()
            times[owner] += max(0.0, finish - now)
            now = max(now, finish)
        times[opened[-1][1]] += max(0.0, until - now)
        now = max(now, until)

    for start, finish, event in _inside(marks, begin, end):
        pass_time(start)
        own = _own(event, opened[-1][1])
        if own is not None:
            calls[own] += 1
        opened.append((finish, own or opened[-1][1]))
    pass_time(end)


def _inside(marks: Iterable[Event], begin: float, end: float) -> Iterator[tuple[float, float, Event]]:
    """(start, end, event) of what begins in the window, the outer before the inner."""
    spans = [(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event) for event in marks]
    spans.sort(key=lambda span: (span[0], -span[1]))
    return ((start, min(finish, end), event) for start, finish, event in spans if begin <= start < end)


def _own(event: Event, outer: Owner) -> Owner | None:
    """Who the time inside `event` belongs to; None if that is `outer`, which owns the time around it."""
    name = str(event["name"])
    if name.startswith(_COMPILED):
        return COMPILED
    if event["cat"] == "user_annotation":
        served = served_of(name)
        if served is not None:
            return Owner("operator", served.operator, served.implementation)
        return MODEL if name == MODEL_RANGE else None
    return None if outer.kind in ("operator", "torch") else Owner("torch", name)
