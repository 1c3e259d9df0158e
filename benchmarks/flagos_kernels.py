"""Correctness and time of every flagos kernel on an accelerator, beside vLLM's kernels and FlagGems' where they import.

    python benchmarks/flagos_kernels.py --json flagos_kernels.json [--only gdn,rms_norm] [--without vllm]

Prints one JSON line a case and then a table. A case is one operator (or a step of several) on the shapes of a model.

- Correctness: results and written arguments against the reference operators in float64 on the same device, within the
  catalogue's tolerance; `outside` is the share of entries beyond it, `rms` the relative error of the whole (of the
  first result for other providers). A case is right if no more than 1 entry in 1,000 lies outside.
- Time: microseconds a call, the median over replays of a CUDA graph of many calls; `eager` where it cannot be captured.

The cases run in a child process, which is started again behind a case that it does not survive.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import pkgutil
import platform
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from flagos_cases import CASES, Case

from vllm_fl.catalog import CATALOG
from vllm_fl.flagos.register import FLAGGEMS_OPERATORS, TRITON_OPERATORS
from vllm_fl.plugins import load_object

MOST_OUTSIDE = 1e-3
GRAPH_US = 2000.0  # device time that one graph should take
PROVIDERS = ("flagos", "vllm", "flaggems")


def flagos(name: str) -> Callable[..., Any]:
    """Our Triton kernel of that operator."""
    if name not in TRITON_OPERATORS:
        raise LookupError(f"flagos has no kernel for {name}")
    return load_object(f"vllm_fl.flagos.{TRITON_OPERATORS[name]}:{name}")


def flaggems(name: str) -> Callable[..., Any]:
    """FlagGems' kernel behind the catalogue's signature."""
    if name not in FLAGGEMS_OPERATORS:
        raise LookupError(f"FlagGems serves no {name}")
    return load_object(f"vllm_fl.flagos.flaggems:{name}")


@functools.cache
def reference(name: str) -> Callable[..., Any]:
    """The PyTorch implementation: the function of that name in the reference distribution."""
    package = importlib.import_module("vllm_fl_reference.ops")
    for info in pkgutil.iter_modules(package.__path__, "vllm_fl_reference.ops."):
        function = vars(importlib.import_module(info.name)).get(name)
        if function is not None and function.__module__ == info.name:
            return function
    raise LookupError(f"vllm-fl-reference has no {name}")


def copy(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A copy with the strides of `value`; floating tensors in `dtype` if it is given."""
    if not isinstance(value, torch.Tensor):
        return value
    if dtype is not None and value.is_floating_point():
        return value.to(dtype, copy=True)
    out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return out.copy_(value)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among results or arguments."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [x for x in values if isinstance(x, torch.Tensor)]


def in_order(case: Case, args: Sequence[Any], results: Any) -> Any:
    """Results in a form that is the same for all right answers, for operators that leave an order open."""
    canonical = getattr(CATALOG.get(case.name), "canonical", None)
    if canonical is None:
        return results
    names = inspect.signature(CATALOG[case.name].fake).parameters
    return canonical(dict(zip(names, args, strict=False)), results)


def compare(got: list[torch.Tensor], want: list[torch.Tensor], case: Case) -> dict[str, float]:
    """Share of entries outside the tolerance, and relative error of the whole, the worst over all tensors."""
    tolerance = CATALOG[case.operators[-1]].tolerance
    outside, rms = 0.0, 0.0
    for x, y in zip(got, want, strict=True):
        if x.numel() == 0:
            continue
        if x.dtype == torch.float8_e4m3fn:
            rtol, atol = 2**-3, 2**-9  # one step: the last bit of a scale in float32 decides between two neighbours
        else:
            rtol, atol = tolerance(case.inputs or x.dtype) if x.is_floating_point() else (0.0, 0.0)
        x64, y64 = x.double(), y.double()
        error = (x64 - y64).abs_()
        same = (x64 == y64) | (x64.isnan() & y64.isnan())
        outside = max(outside, ((error <= atol + rtol * y64.abs()) | same).logical_not().double().mean().item())
        finite = error.isfinite()
        norm = y64.where(y64.isfinite(), 0).norm().item()
        rms = max(rms, error.where(finite, 0).norm().item() / norm if norm else 0.0)
    return {"outside": outside, "rms": rms}


def check(case: Case, args: tuple[Any, ...], run: Callable[[tuple[Any, ...]], Any]) -> dict[str, float]:
    """Compare our results, and all arguments after the call, with the reference in float64."""
    wanted_args, got_args = tuple(copy(x, torch.float64) for x in args), tuple(copy(x) for x in args)
    want = in_order(case, args, case.run(reference, wanted_args))
    got = in_order(case, args, run(got_args))
    return compare([*tensors(got), *tensors(got_args)], [*tensors(want), *tensors(wanted_args)], case)


def first_result_error(case: Case, args: tuple[Any, ...], call: Callable[[], Any]) -> float | None:
    """Relative error of another provider's first result; None where it has another form."""
    want = tensors(case.run(reference, tuple(copy(x, torch.float64) for x in args)))
    got = tensors(call())
    if not want or not got or got[0].numel() != want[0].numel() or not got[0].is_floating_point():
        return None
    error = (got[0].double().reshape(-1) - want[0].reshape(-1)).norm() / want[0].norm()
    return float(error.item())


def timed(call: Callable[[], Any], calls: int, repeats: int) -> float:
    """Median microseconds a call over `repeats` batches of `calls`."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def measure(call: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """Time of a call inside a CUDA graph, or outside with the reason why it cannot be captured."""
    for _ in range(3):  # compiles, tunes, fills caches
        call()
    torch.cuda.synchronize()
    eager = timed(call, 3, 3)
    calls = max(1, min(50, round(GRAPH_US / eager)))
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graph.replay()
        us = timed(graph.replay, 1, repeats) / calls
    except Exception as error:  # whatever the call did that a stream under capture refuses
        torch.cuda.synchronize()
        return {"us": round(eager, 2), "how": "eager", "why": f"{type(error).__name__}: {error}"[:200]}
    return {"us": round(us, 2), "how": "graph", "eager_us": round(eager, 2)}


def subject(case: Case, provider: str, args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """The call to measure; None where the provider has nothing for the case."""
    if provider == "vllm":
        return None if case.vllm is None else case.vllm(*args)
    if provider == "flaggems" and (not case.name.isidentifier() or case.name not in FLAGGEMS_OPERATORS):
        return None
    lookup = flagos if provider == "flagos" else flaggems
    return lambda: case.run(lookup, args)


def run_case(case: Case, providers: Sequence[str], repeats: int) -> dict[str, Any]:
    """Everything about one case; failures are part of the result."""
    torch.manual_seed(0)
    args = case.args("cuda")
    result: dict[str, Any] = {"case": case.title}
    for provider in providers:
        entry: dict[str, Any] = {}
        try:
            own = tuple(copy(x) for x in args)
            call = subject(case, provider, own)
            if call is None:
                continue
            if provider == "flagos":
                error = check(case, args, lambda given: case.run(flagos, given))
                entry |= {"ok": error["outside"] <= MOST_OUTSIDE, **error}
            elif case.operators:
                entry["rms"] = first_result_error(case, args, call)
            entry |= measure(call, repeats)
        except Exception as problem:  # one failing provider must not hide the others
            entry |= {"error": f"{type(problem).__name__}: {problem}"[:400], "at": traceback.format_exc()[-600:]}
            result[provider] = entry
            torch.cuda.synchronize()  # raises if the device is lost, and ends this process
            continue
        result[provider] = entry
    ours, theirs = result.get("flagos", {}).get("us"), result.get("vllm", {}).get("us")
    if ours and theirs:
        result["vllm/flagos"] = round(theirs / ours, 3)
    return result


def child(names: Sequence[str], options: argparse.Namespace) -> None:
    """Run the cases of these titles, announcing each before it runs."""
    by_title = {case.title: case for case in CASES}
    for name in names:
        print(json.dumps({"started": name}), flush=True)
        faulthandler.dump_traceback_later(options.timeout, exit=True)
        try:
            result = run_case(by_title[name], options.providers, options.repeats)
        except Exception as problem:
            print(json.dumps({"case": name, "error": f"{type(problem).__name__}: {problem}"[:400]}), flush=True)
            os._exit(3)  # the device may be lost
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(result), flush=True)
        torch.cuda.empty_cache()


def results_of(titles: list[str], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Results as they come, from as many children as it takes."""
    environ = {**os.environ, "VLLM_PLUGINS": ""}  # vLLM's own platform, which loads its compiled kernels
    while titles:
        command = [sys.executable, __file__, "--child", json.dumps(titles), "--repeats", str(options.repeats)]
        command += ["--timeout", str(options.timeout), "--providers", ",".join(options.providers)]
        started, before = None, len(titles)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    data = json.loads(line)
                except ValueError:  # something that a library printed
                    print(line, end="", file=sys.stderr)
                    continue
                if "started" in data:
                    started = data["started"]
                elif "case" in data:
                    titles = titles[titles.index(data["case"]) + 1 :]
                    started = None
                    yield data
        if started is not None:
            titles = titles[titles.index(started) + 1 :]
            yield {"case": started, "error": f"the process ended with {process.returncode}"}
        elif len(titles) == before:
            yield {"case": titles.pop(0), "error": f"the process ended with {process.returncode} before any case"}


def table(results: list[dict[str, Any]]) -> str:
    """One line a case: right or not, times, and how much faster than vLLM."""
    lines = [f"{'case':<52}{'right':>7}{'rms':>10}{'flagos':>10}{'vllm':>10}{'flaggems':>10}{'vllm/ours':>10}"]
    for result in results:
        ours = result.get("flagos", {})
        right = (
            "FAILED" if "error" in result or "error" in ours else {True: "yes", False: "NO"}.get(ours.get("ok"), "-")
        )
        times = []
        for provider in PROVIDERS:
            entry = result.get(provider, {})
            mark = "*" if entry.get("how") == "eager" else ""
            times.append(f"{entry['us']:.1f}{mark}" if "us" in entry else "failed" if entry else "-")
        rms = f"{ours['rms']:.1e}" if "rms" in ours else "-"
        columns = "".join(f"{cell:>10}" for cell in (*times, result.get("vllm/flagos", "-")))
        lines.append(f"{result['case']:<52}{right:>7}{rms:>10}{columns}")
    return "\n".join([*lines, "microseconds a call inside a CUDA graph; * outside, with the cost of the launches"])


def environment() -> dict[str, str]:
    """What the figures belong to."""
    import triton

    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for name in ("vllm", "flag_gems"):
        try:
            found[name] = importlib.metadata.version(name.replace("_", "-"))
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {**found, "python": platform.python_version()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write everything to this file as well")
    parser.add_argument(
        "--only", default="", help="comma-separated parts of titles; a case runs if one is in its title"
    )
    parser.add_argument("--without", default="", help="comma-separated providers to leave out: vllm, flaggems")
    parser.add_argument("--repeats", type=int, default=15, help="replays of each graph (default: 15)")
    parser.add_argument("--timeout", type=int, default=240, help="seconds a case may take (default: 240)")
    parser.add_argument("--list", action="store_true", help="print the titles and stop")
    parser.add_argument("--providers", default=",".join(PROVIDERS), help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    left_out = options.without.split(",")
    options.providers = [name for name in options.providers.split(",") if name not in left_out]
    return options


def main() -> int:
    options = parse()
    if options.child:
        child(json.loads(options.child), options)
        return 0
    wanted = options.only.split(",")
    titles = [case.title for case in CASES if any(part in case.title for part in wanted)]
    if options.list:
        print("\n".join(titles))
        return 0
    if not titles:
        print(f"no title has one of {wanted} in it; --list shows the titles", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("no CUDA device; the kernels' tests run without one: tox -e flagos", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"environment": environment(), "results": []}
    print(json.dumps(report["environment"]), flush=True)
    for result in results_of(titles, options):
        print(json.dumps(result), flush=True)
        report["results"].append(result)
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(table(report["results"]))
    wrong = [r["case"] for r in report["results"] if "error" in r or not r.get("flagos", {}).get("ok", False)]
    print(
        f"{len(report['results']) - len(wrong)} of {len(report['results'])} right" + "".join(f"\n  {w}" for w in wrong)
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
