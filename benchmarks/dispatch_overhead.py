"""What dispatch costs: a bound operator, call_op, resolve_op and the first resolution, by number of implementations.

    python benchmarks/dispatch_overhead.py --json dispatch_overhead.json

Costs are nanoseconds over a direct call of the same Python function, which takes the arguments of rms_norm and returns
at once. Subjects take turns within each repeat, and the least time of all repeats counts: it is the one that other work
on the machine has disturbed least.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_fl import __version__
from vllm_fl.catalog import CATALOG
from vllm_fl.dispatch import (
    BackendImplKind,
    OpImpl,
    OpManager,
    Parameter,
    ParameterPath,
    SelectionPolicy,
    set_global_policy,
)
from vllm_fl.dispatch.default import adopt_default_manager, call_op, resolve_op

OPERATOR = "rms_norm"
TUNED = "gemma_rms_norm"  # takes the same, and its implementation's parameters are not the defaults
PARAMETERS = (Parameter("block", (64, 128), 64), Parameter("warps", (4, 8), 4))
POLICY = SelectionPolicy(
    parameters=tuple((ParameterPath(TUNED, "vendor.chosen", p.name), str(p.values[1])) for p in PARAMETERS)
)
ARGUMENTS = "x, None, weight, 1e-6"
BUDGET_NS = {"bound operator": 100.0, "bound operator with two parameters": 100.0, "call_op": 300.0}


def direct(x: Any, residual: Any, weight: Any, epsilon: float, *, block: int = 64, warps: int = 4) -> Any:
    """The implementation that every subject ends in."""
    return x


def make_manager(implementations: int) -> OpManager:
    """A manager with that many implementations, spread over the operators of the catalogue."""
    manager = OpManager(register_builtins=False)
    manager.registry.register_many(_implementations(implementations))
    return manager


def _implementations(count: int) -> Iterator[OpImpl]:
    chosen: dict[str, Any] = {"vendor": "chosen", "priority": 10_000}
    yield OpImpl(OPERATOR, "vendor.chosen", BackendImplKind.VENDOR, direct, **chosen)
    yield OpImpl(TUNED, "vendor.chosen", BackendImplKind.VENDOR, direct, **chosen, parameters=PARAMETERS)
    names = list(CATALOG)
    for index in range(count - 1):
        spec = CATALOG[names[index % len(names)]]
        vendor = f"v{index // len(names)}"
        yield OpImpl(spec.name, f"vendor.{vendor}", BackendImplKind.VENDOR, spec.fake, vendor=vendor, priority=100)


def measure(implementations: int, repeats: int, calls: int) -> dict[str, float]:
    """Nanoseconds a call of each subject, and of the first resolution."""
    manager = make_manager(implementations)
    adopt_default_manager(manager)
    bound, tuned = manager.bind(OPERATOR), manager.bind(TUNED)
    names = {"direct": direct, "bound": bound, "tuned": tuned, "x": 1, "weight": 2}
    names |= {"call_op": call_op, "resolve_op": resolve_op}
    for operator in (bound, tuned):
        operator(1, None, 2, 1e-6)
    timers = {
        "direct call": timeit.Timer(f"direct({ARGUMENTS})", globals=names),
        "bound operator": timeit.Timer(f"bound.fn({ARGUMENTS})", globals=names),
        "bound operator with two parameters": timeit.Timer(f"tuned.fn({ARGUMENTS})", globals=names),
        "bound object": timeit.Timer(f"bound({ARGUMENTS})", globals=names),
        "call_op": timeit.Timer(f"call_op({OPERATOR!r}, {ARGUMENTS})", globals=names),
        "resolve_op": timeit.Timer(f"resolve_op({OPERATOR!r})", globals=names),
    }
    least = dict.fromkeys(timers, float("inf"))
    for _ in range(repeats):
        for name, timer in timers.items():
            least[name] = min(least[name], timer.timeit(calls) / calls * 1e9)
    return {**least, "first resolution": first_resolution(implementations)}


def first_resolution(implementations: int, samples: int = 15) -> float:
    """Nanoseconds of the first call after registration (probing, selection, binding, the call), median of samples."""
    return median(_timed(make_manager(implementations)) for _ in range(samples))


def _timed(manager: OpManager) -> int:
    gc.collect()
    start = perf_counter_ns()
    manager.call(OPERATOR, 1, None, 2, 1e-6)
    return perf_counter_ns() - start


def over_direct(times: dict[str, float]) -> dict[str, float]:
    """The cost over the direct call, for what ends in one."""
    names = ("bound operator", "bound operator with two parameters", "bound object", "call_op")
    return {name: times[name] - times["direct call"] for name in names}


def _over_direct(name: str, times: dict[str, float]) -> float:
    return over_direct(times)[name]


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "vllm_fl": __version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def show(results: dict[int, dict[str, float]], console: Console) -> None:
    over = {f"{name}, over direct": name for name in over_direct(next(iter(results.values())))}
    subjects: dict[str, Callable[[dict[str, float]], float]] = {
        "direct call": lambda times: times["direct call"],
        **{title: partial(_over_direct, name) for title, name in over.items()},
        "resolve_op": lambda times: times["resolve_op"],
        "first resolution": lambda times: times["first resolution"],
    }
    table = Table("ns a call, by implementations", *map(str, results), "budget")
    for title, value in subjects.items():
        budget = BUDGET_NS.get(title.partition(",")[0])
        cells = (f"{value(times):,.0f}" for times in results.values())
        table.add_row(title, *cells, f"{budget:,.0f}" if budget else "")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--implementations", type=int, nargs="+", default=[10, 100, 1000], metavar="N")
    parser.add_argument("--repeats", type=int, default=40, help="rounds over all subjects (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=50_000, help="calls a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too; - is standard output")
    options = parser.parse_args()
    if min(options.implementations, default=0) < 1 or options.repeats < 1 or options.calls < 1:
        parser.error("counts are at least 1")
    console = Console(stderr=True)
    set_global_policy(POLICY)  # not the configuration of whoever runs this
    counts = track(options.implementations, description="measuring", console=console, transient=True)
    results = {count: measure(count, options.repeats, options.calls) for count in counts}
    show(results, console)
    if options.json is not None:
        report = {
            "benchmark": "dispatch_overhead",
            "unit": "ns",
            "machine": machine(),
            "repeats": options.repeats,
            "calls": options.calls,
            "results": [
                {"implementations": count, "times": times, "over_direct": over_direct(times)}
                for count, times in results.items()
            ],
        }
        text = json.dumps(report, indent=2) + "\n"
        sys.stdout.write(text) if str(options.json) == "-" else options.json.write_text(text)


if __name__ == "__main__":
    main()
