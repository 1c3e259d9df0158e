"""Reads the Chrome traces that ``torch.profiler`` writes, and tells whose range a device kernel was launched in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Event = Mapping[str, Any]
#: A file of a trace, what it holds, its events, or (name, microseconds) of kernels alone.
Trace = str | Path | Mapping[str, Any] | Iterable[Event] | Iterable[tuple[str, float]]

#: The name of the range around a call of an implementation is this, the operator, "/" and the implementation's id.
RANGE_PREFIX = "vllm_fl::"
#: The name of the range around a forward of the model.
MODEL_RANGE = "vllm_fl model"

_KERNEL = "kernel"
_COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "privateuse1_runtime", "privateuse1_driver"})


class Served(NamedTuple):
    """An operator and the implementation that served it."""

    operator: str
    implementation: str


class DeviceEvent(NamedTuple):
    """Something that the device did: a kernel or a copy; `served` is the range that launched it, if one did."""

    name: str
    duration_us: float
    is_copy: bool
    served: Served | None


def read_trace(trace: Trace) -> list[Event]:
    """The events of a trace, those of kernels alone made of pairs.

    Args:
        trace: path of a JSON file (``.gz`` or not), the parsed file, its list of events, or pairs of a kernel's name
            and its duration in microseconds.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no trace.
    """
    content = _read_file(Path(trace)) if isinstance(trace, (str, Path)) else trace
    if isinstance(content, Mapping):
        if not isinstance(content.get("traceEvents"), list):
            raise ValueError("not a Chrome trace: it has no list 'traceEvents'")
        content = content["traceEvents"]
    return [entry if isinstance(entry, Mapping) else _kernel(*entry) for entry in content]


def _kernel(name: str, duration_us: float) -> Event:
    return {"ph": "X", "cat": _KERNEL, "name": name, "ts": 0.0, "dur": duration_us}


def _read_file(path: Path) -> Mapping[str, Any]:
    data = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is not a Chrome trace: {error}") from error
    return document if isinstance(document, Mapping) else {"traceEvents": document}


def served_of(name: str) -> Served | None:
    """The operator and the implementation that a range's name says; None for any other range."""
    if not name.startswith(RANGE_PREFIX):
        return None
    operator, _, implementation = name[len(RANGE_PREFIX) :].partition("/")
    return Served(operator, implementation) if implementation else None


def device_events(events: Iterable[Event]) -> list[DeviceEvent]:
    """The kernels and copies of a trace, in its order.

    A kernel belongs to the innermost of our ranges that was open in the thread that launched it; both are tied by the
    correlation id of the launch. A kernel that a graph replayed was launched by the graph, outside of all ranges.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    launched = _launches_in_ranges(complete)
    found = []
    for event in complete:
        category = event.get("cat")
        if category == _KERNEL or category in _COPIES:
            served = launched.get((event.get("args") or {}).get("correlation"))
            found.append(DeviceEvent(str(event["name"]), float(event["dur"]), category in _COPIES, served))
    return found


def _launches_in_ranges(complete: Iterable[Event]) -> dict[Any, Served]:
    """Correlation id of a launch to the range around it."""
    threads: dict[tuple[Any, Any], list[tuple[float, int, float, Event]]] = {}
    for event in complete:
        category = event.get("cat")
        is_range = category == "user_annotation" and served_of(event["name"]) is not None
        if is_range or category in _LAUNCHES:
            start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
            # A range comes before a launch that starts with it.
            threads.setdefault((event.get("pid"), event.get("tid")), []).append((start, not is_range, end, event))
    found: dict[Any, Served] = {}
    for marks in threads.values():
        marks.sort(key=lambda mark: (mark[0], mark[1], -mark[2]))
        _follow(marks, found)
    return found


def _follow(marks: Iterable[tuple[float, int, float, Event]], found: dict[Any, Served]) -> None:
    opened: list[tuple[float, Served]] = []
    for start, _, end, event in marks:
        while opened and opened[-1][0] <= start:
            opened.pop()
        served = served_of(event["name"])
        if served is not None:
            opened.append((end, served))
        elif opened and "correlation" in (event.get("args") or {}):
            found[event["args"]["correlation"]] = opened[-1][1]
