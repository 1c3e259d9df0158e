"""Latency of all-reduce by message size: FlagCX, NCCL, vLLM's custom all-reduce and torch's symmetric memory.

    python benchmarks/allreduce.py --json allreduce.json --markdown allreduce.md --plot allreduce.png
    FLAGCX_PATH=/opt/flagcx python benchmarks/allreduce.py --methods flagcx nccl pynccl
    python benchmarks/allreduce.py --stand-in             # our binding over NCCL, where FlagCX is not installed
    python benchmarks/allreduce.py --device cpu --max 64KiB            # gloo, to see that it works
    FLAGCX_PATH=... python benchmarks/allreduce.py --host-cost         # what a call costs the host, one rank, no device

Each method runs in processes of its own, one a rank, with a time limit: one that fails or hangs is reported, and the
others go on. A figure is the time of one call in microseconds: the median over repeats of (time of a series of calls /
calls), of the slowest rank. Eager calls follow one another without a wait, so that small ones show what they cost the
host; in graphs the series is captured once and replayed. Every method and size is checked for the right sum first.

Methods that need their input in a buffer of their own include the copies, as a model would have to make them.
NVLink multicast is kept off (NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1), so that FlagCX's custom
all-reduce and the multimem methods of others do not take part.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).resolve().parent))

DTYPES = ("bfloat16", "float16", "float32")
#: name -> what it is, in the order of the table.
METHODS = {
    "flagcx": "FlagCX, plain, through vllm-fl-comm (FLAGCX_PATH, or --stand-in)",
    "nccl": "NCCL through torch.distributed, in place",
    "pynccl": "NCCL through vLLM's PyNcclCommunicator",
    "custom": "vLLM's custom all-reduce",
    "one-shot": "torch symmetric memory, one-shot, with the copy into its buffer",
    "two-shot": "torch symmetric memory, two-shot, with the copies into and out of its buffer",
    "gloo": "gloo through torch.distributed, in place",
}
ON_CPU = ("flagcx", "gloo")
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)(|KiB|MiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 65536, 64KiB or 8MiB")
    return int(match[1]) << {"": 0, "KiB": 10, "MiB": 20}[match[2]]


def show_size(size: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if size % (1 << shift) == 0:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="methods: " + "; ".join(f"{name}: {text}" for name, text in METHODS.items()),
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    parser.add_argument("--ranks", type=int, help="default: every GPU, or 2 on a CPU")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all of the device")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--min", type=parse_size, default=1 << 10, help="smallest message (default: 1KiB)")
    parser.add_argument("--max", type=parse_size, default=64 << 20, help="largest message (default: 64MiB)")
    parser.add_argument("--modes", nargs="+", choices=("eager", "graph"), default=["eager", "graph"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--method-timeout", type=float, default=100.0, metavar="SECONDS", help="default: 100")
    parser.add_argument("--stand-in", action="store_true", help="build over_nccl.c and let it stand in for FlagCX")
    parser.add_argument("--host-cost", action="store_true", help="only the host's time a call, on a simulated FlagCX")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="needs matplotlib")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.worker:
        from allreduce_worker import work

        work(json.loads(options.worker))
        return 0
    if options.min > options.max or options.repeats < 1:
        sys.exit("--min is at most --max, and --repeats at least 1")
    if options.host_cost:
        return host_cost(options.json)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(options, Path(folder))
    text = markdown(report)
    print(text)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(text)
    if options.plot is not None and report["results"]:
        plot(report, options.plot)
    return 0 if report["results"] else 1


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run every method, one after the other, and gather what they found."""
    devices = _gpus()
    device = options.device or ("cuda" if devices else "cpu")
    ranks = options.ranks or (devices if device == "cuda" else 2)
    if device == "cuda" and not 2 <= ranks <= devices:
        sys.exit(f"{ranks} ranks on {devices} GPUs: an all-reduce needs 2 at least, and a GPU for each (--device cpu)")
    environment = {**os.environ, **QUIET}
    environment.pop("FLAGCX_CUSTOM_OP_ENABLE", None)
    if options.stand_in:
        build = ROOT / "packages/vllm-fl-comm/tests/double/build.py"
        command = [sys.executable, str(build), str(folder / "stand-in"), "--over-nccl"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        environment["FLAGCX_PATH"] = str(folder / "stand-in")
    methods = options.methods or [name for name in METHODS if (name in ON_CPU) == (device == "cpu") or name == "flagcx"]
    if not options.methods and "FLAGCX_PATH" not in environment:
        methods.remove("flagcx")
        print("FLAGCX_PATH is not set: without FlagCX", flush=True)
    sizes = [1 << bit for bit in range(40) if options.min <= 1 << bit <= options.max]
    report: dict[str, Any] = {
        "benchmark": "allreduce", "unit": "us", "command": sys.argv, "ranks": ranks, "device": device,
        "stand_in": options.stand_in, "machine": {}, "methods": {}, "results": [], "problems": {},
    }  # fmt: skip
    for method in methods:
        spec = {
            "method": method, "device": device, "ranks": ranks, "sizes": sizes, "dtypes": options.dtypes,
            "modes": options.modes if device == "cuda" else ["eager"], "repeats": options.repeats,
            "port": _free_port(), "out": str(folder / f"{method}.jsonl"),
        }  # fmt: skip
        started = time.monotonic()
        problem = run_method(spec, environment, options.method_timeout, folder)
        lines = Path(spec["out"]).read_text().splitlines() if Path(spec["out"]).exists() else []
        found = [json.loads(line) for line in lines]
        for entry in found:
            report["machine"].update(entry.pop("machine", {}))
            report["methods"].update(entry.pop("methods", {}))
        report["results"] += [entry for entry in found if entry]
        if problem:
            report["problems"][method] = problem
        ended = f"{len(found)} lines in {time.monotonic() - started:.1f} s"
        print(f"{method}: {ended}{'; ' + problem if problem else ''}", flush=True)
    return report


def run_method(spec: dict[str, Any], environment: dict[str, str], timeout: float, folder: Path) -> str | None:
    """Run one method's ranks; None, or what went wrong. Nothing of it is left running."""
    logs = [folder / f"{spec['method']}.{rank}.log" for rank in range(spec["ranks"])]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, __file__, "--worker", json.dumps({**spec, "rank": rank})]
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            )
    deadline, problem = time.monotonic() + timeout, None
    while problem is None and any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed:
            time.sleep(1)  # for the others to write down what they see of it
            problem = f"rank {failed[0]} failed: {_tail(logs[failed[0]])}"
        elif time.monotonic() > deadline:
            problem = f"stopped after {timeout:g} s: {_tail(logs[0])}"
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if problem is None and process.wait() != 0:
            problem = f"rank {rank} failed: {_tail(logs[rank])}"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return problem


def _tail(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"\S*(Error|Exception)\b", line)]
    return (errors or lines or ["it wrote nothing"])[-1][:400]


def _gpus() -> int:
    """GPUs of this machine, asked in a process of its own: this one must not hold any."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def host_cost(out: Path | None) -> int:
    """Time that one all_reduce takes the host, between ranks that do nothing: one rank of a simulated FlagCX."""
    import ctypes
    import timeit

    from vllm_fl_comm.flagcx import Communicator, DataType, Reduction, load

    library = load()
    communicator = Communicator.create(library, library.unique_id(), 0, 1, "one")
    buffer = (ctypes.c_float * 2)()
    address, calls = ctypes.addressof(buffer), 20_000
    names = {"c": communicator, "a": address, "d": int(DataType.FLOAT32), "o": int(Reduction.SUM)}
    timer = timeit.Timer("c.all_reduce(a, a, 2, d, o, 0)", globals=names)
    best = min(timer.repeat(15, calls)) / calls * 1e6
    communicator.destroy()
    print(f"{best:.2f} us a call, least of 15 series of {calls}; library {library.path}")
    if out is not None:
        out.write_text(json.dumps({"benchmark": "allreduce host cost", "unit": "us", "call": best}) + "\n")
    return 0


def markdown(report: dict[str, Any]) -> str:
    """A table for each dtype and mode: sizes down, methods across, the fastest in bold."""
    methods = list(dict.fromkeys(entry["method"] for entry in report["results"]))
    parts = [f"All-reduce, {report['ranks']} ranks on {report['device']}, microseconds a call.\n"]
    parts += [f"- {key}: {value}\n" for key, value in report["machine"].items()]
    parts += [f"- `{name}`: {report['methods'].get(name, METHODS[name])}\n" for name in methods]
    parts += [f"- `{name}` did not finish: {problem}\n" for name, problem in report["problems"].items()]
    groups = dict.fromkeys((entry["dtype"], entry["mode"]) for entry in report["results"])
    for dtype, mode in groups:
        cells = {(e["size"], e["method"]): e for e in report["results"] if (e["dtype"], e["mode"]) == (dtype, mode)}
        parts += [f"\n{dtype}, {mode}:\n\n| Size |", *(f" {name} |" for name in methods), "\n|"]
        parts += [" ---: |"] * (len(methods) + 1)
        for size in sorted({size for size, _ in cells}):
            row = [cells.get((size, name)) for name in methods]
            fastest = min((entry["us"] for entry in row if entry and "us" in entry), default=None)
            parts.append(f"\n| {show_size(size)} |")
            parts += [f" {_cell(entry, fastest)} |" for entry in row]
        parts.append("\n")
    return "".join(parts)


def _cell(entry: dict[str, Any] | None, fastest: float | None) -> str:
    if entry is None or "us" not in entry:
        return str(entry["skipped"]) if entry else ""
    text = f"{entry['us']:.1f}" if entry["us"] < 1000 else f"{entry['us']:.0f}"
    return f"**{text}**" if entry["us"] == fastest else text


def plot(report: dict[str, Any], path: Path) -> None:
    """One panel for each dtype and mode: latency over size, both logarithmic."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = list(dict.fromkeys((entry["dtype"], entry["mode"]) for entry in report["results"]))
    figure, axes = pyplot.subplots(1, len(groups), figsize=(6 * len(groups), 4.5), squeeze=False, sharey=True)
    for axis, (dtype, mode) in zip(axes[0], groups, strict=True):
        for method in METHODS:
            points = [
                (e["size"], e["us"]) for e in report["results"]
                if (e["method"], e["dtype"], e["mode"]) == (method, dtype, mode) and "us" in e
            ]  # fmt: skip
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=method)
        axis.set(xscale="log", yscale="log", xlabel="bytes", title=f"{dtype}, {mode}, {report['ranks']} ranks")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0][0].set_ylabel("microseconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
