"""Throughput of vLLM on a GPU: native, with this project's 100 % Triton selection, and with the vendor mix; in one run.

    python benchmarks/serving_parity.py MODEL [--workloads decode,prefill,latency] [--modes compiled,eager]
        [--sides native,triton,triton-mm,vendor,mixed] [--repeats 3] [--resident | --devices 0,1] [--coverage decode]
        [--output FILE]

MODEL is a folder with a config.json; the weights are random. All sides run the same vLLM: `native` with its plug-ins
switched off, `vendor` with the platform's own selection, `triton` with the file policies/nvidia-triton-MODE.yaml,
`triton-mm` the same with FlagGems' matrix products in the place of ATen's, `mixed` with policies/nvidia-mixed.yaml.
The sides take turns, in alternating order, so that drift hits all alike. With --resident all engines of a mode start
together and stay loaded, each with --kv-cache-gib for its cache; otherwise each turn of a side loads its engine again
(from its compile cache after the first time), for models of which only one fits. With --devices each side stays loaded
on a device of its own; run it again with the devices exchanged, since no two are equally fast. The figure of a round is
output tokens a second, prefill included, prefix caching off; of a side the median of its rounds, and its ratio to the
native median.

--coverage adds one profiled pass of each side for the workloads it names: the share of GPU time by provider and by
operator.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sides import Engine, Side, WorkerError, machine, requests, version

POLICIES = Path(__file__).parent / "policies"
SIDES = ("native", "triton", "vendor", "mixed")  # by default
ALLOWED_SIDES = (*SIDES, "triton-mm")
#: ATen's functions that `triton-mm` replaces by FlagGems'.
MATRIX_PRODUCTS = ("mm", "addmm", "bmm")
MODES = ("compiled", "eager")


@dataclass(frozen=True)
class Workload:
    """Requests that start together: how many, tokens of each prompt, tokens of each answer."""

    prompts: int
    input: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompts} x {self.input} -> {self.output}"


WORKLOADS = {
    "decode": Workload(256, 512, 128),
    "prefill": Workload(64, 4096, 16),
    "latency": Workload(1, 512, 256),
    "decode128": Workload(128, 512, 64),
}


# The worker: one engine


def worker(configuration: dict[str, Any]) -> None:
    """Loads the engine, warms each workload up, then measures the workload that a request names."""
    replies = os.fdopen(configuration["reply_fd"], "w", buffering=1)
    started = time.perf_counter()
    import torch
    import vllm

    workloads = {name: Workload(**fields) for name, fields in configuration["workloads"].items()}
    options = dict(configuration["options"])
    if configuration["trace"]:
        options["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": configuration["trace"],
            "torch_profiler_with_stack": False,
            "torch_profiler_use_gzip": False,
            "torch_profiler_dump_cuda_time_total": False,
        }
    llm = vllm.LLM(
        model=configuration["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=max(w.input + w.output for w in workloads.values()) + 8,
        max_num_seqs=max(256, *(w.prompts for w in workloads.values())),
        **configuration["memory"],
        enforce_eager=configuration["eager"],
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
        **options,
    )
    loaded = time.perf_counter() - started
    for workload in workloads.values():
        _round(llm, workload)
    current = type(vllm.platforms.current_platform)
    report = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": vllm.platforms.current_platform.get_device_name(),
        "platform": f"{current.__module__}.{current.__qualname__}",
        "load_s": round(loaded, 1),
    }
    for request in requests(configuration, report, replies):
        workload = workloads[request["workload"]]
        if request.get("profile"):
            answer = _profiled(llm, workload, Path(configuration["trace"]))
        else:
            answer = _round(llm, workload)
        print(json.dumps(answer), file=replies)


def _round(llm: Any, workload: Workload, output: int | None = None) -> dict[str, Any]:
    import vllm

    from vllm_fl.engines import held

    tokens = random.Random(0)
    prompts = [
        {"prompt_token_ids": [tokens.randrange(1000, 50000) for _ in range(workload.input)]}
        for _ in range(workload.prompts)
    ]
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=output or workload.output, ignore_eos=True, detokenize=False
    )
    with held(llm):  # else each round begins with other requests, as many as have arrived
        llm.enqueue(prompts, sampling, use_tqdm=False)
        start = time.perf_counter()
    outputs = llm.wait_for_completion(use_tqdm=False)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "output_tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        "first": list(outputs[0].outputs[0].token_ids[:8]),
    }


def _profiled(llm: Any, workload: Workload, folder: Path) -> dict[str, Any]:
    """Share of GPU time by provider, of a pass of at most 8 output tokens a request."""
    from vllm_fl.profile.coverage import coverage

    output = min(8, workload.output)
    _round(llm, workload, output)  # its steps have other batches: what is tuned for those must not count
    before = set(folder.rglob("*.json*"))
    llm.start_profile()
    _round(llm, workload, output)
    llm.stop_profile()
    deadline = time.monotonic() + 120
    while not (traces := sorted(set(folder.rglob("*.json*")) - before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not traces:
        return {"error": f"no trace appeared in {folder}"}
    size = -1
    while size != (size := traces[0].stat().st_size):
        time.sleep(1.0)
    return coverage(traces[0]).as_dict(most_kernels=25)


# The parent


def environment(side: str, mode: str, device: str | None) -> dict[str, str]:
    """What makes the side; the same vLLM and the same packages in all. `device`: the one it may use; None: all."""
    from vllm_fl.catalog import CATALOG

    triton = {"VLLM_FL_CONFIG": str(POLICIES / f"nvidia-triton-{mode}.yaml")}
    own = {
        "native": {"VLLM_PLUGINS": ""},
        "triton": triton,
        "triton-mm": {**triton, "VLLM_FL_FLAGOS_WHITELIST": ",".join([*CATALOG, *MATRIX_PRODUCTS])},
        "mixed": {"VLLM_FL_CONFIG": str(POLICIES / "nvidia-mixed.yaml")},
    }
    visible = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    return {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", **visible, **own.get(side, {})}


class Session:
    """The sides of one mode, their engines, and what they answered."""

    def __init__(self, arguments: argparse.Namespace, mode: str) -> None:
        self.arguments, self.mode = arguments, mode
        self.sides = [
            Side(name, eager=mode == "eager", environment=environment(name, mode, device))
            for name, device in zip(arguments.sides, arguments.devices or [None] * len(arguments.sides), strict=True)
        ]
        self.stay = arguments.resident or bool(arguments.devices)
        self.engines: dict[str, Engine] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self.answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.shares: dict[tuple[str, str], Any] = {}
        self.interrupted = False

    def run(self) -> list[dict[str, Any]]:
        """All rounds; one record for each side and workload.

        A side that fails leaves the others their figures, an interrupt (SIGINT, SIGTERM) those of the rounds so far.
        """
        try:
            if self.stay:
                for side in self.sides:
                    self.start(side)
                for side in list(self.sides):  # all must be there before one is measured
                    self.attempt(side, lambda side: None)
            for number in range(self.arguments.repeats):
                last = number == self.arguments.repeats - 1
                for side in list(self.sides if number % 2 == 0 else reversed(self.sides)):
                    self.attempt(side, lambda side, last=last: self.turn(side, last))
        except KeyboardInterrupt:
            say(f"{self.mode}: interrupted")
            self.interrupted = True
        finally:
            for engine in self.engines.values():
                engine.close()
        return [
            _record(self.mode, side, name, self.reports[side], answers, self.shares.get((side, name)))
            for (side, name), answers in sorted(self.answers.items())
        ]

    def attempt(self, side: Side, action: Callable[[Side], None]) -> None:
        try:
            self.load(side)
            action(side)
        except WorkerError as error:
            say(f"{self.mode} {side.name} failed: {error}")
            self.sides.remove(side)
            self.engines.pop(side.name).close()

    def start(self, side: Side) -> None:
        memory: dict[str, Any] = {"gpu_memory_utilization": 0.88}
        if self.arguments.resident:  # engines that start together cannot measure what is free
            memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": int(self.arguments.kv_cache_gib * 2**30)}
        logs = self.arguments.logs
        configuration = {
            "model": str(self.arguments.model),
            "workloads": {name: asdict(WORKLOADS[name]) for name in self.arguments.workloads},
            "options": self.arguments.options,
            "memory": memory,
            "trace": str(logs / f"trace-{self.mode}-{side.name}") if self.arguments.coverage else "",
        }
        log = logs / f"{self.mode}-{side.name}.log"
        self.engines[side.name] = Engine(side, Path(__file__), configuration, log)

    def load(self, side: Side) -> None:
        if side.name not in self.engines:
            self.start(side)
            side.report = {}
        if not side.report:
            self.engines[side.name].load()
            visible = side.environment.get("CUDA_VISIBLE_DEVICES")
            self.reports.setdefault(side.name, {**side.report, "visible_device": visible})
            say(f"{self.mode} {side.name}: loaded in {side.report['load_s']} s")

    def turn(self, side: Side, last: bool) -> None:
        engine = self.engines[side.name]
        for name in self.arguments.workloads:
            answer = engine.measure({"workload": name})
            self.answers.setdefault((side.name, name), []).append(answer)
            say(f"{self.mode} {side.name} {name}: {answer['output_tokens'] / answer['seconds']:.1f} tok/s")
            if name in self.arguments.coverage and last:
                self.shares[side.name, name] = engine.measure({"workload": name, "profile": True})
        if not self.stay:
            self.engines.pop(side.name).close()


def _record(
    mode: str, side: str, name: str, report: dict[str, Any], answers: list[dict[str, Any]], shares: Any
) -> dict[str, Any]:
    one = Side(side, rounds=[round(a["output_tokens"] / a["seconds"], 2) for a in answers])
    return {
        "mode": mode,
        "side": side,
        "workload": name,
        "shape": str(WORKLOADS[name]),
        "rounds": one.rounds,
        "median": one.median,
        "first": answers[-1]["first"],
        "coverage": shares,
        **report,
    }


def add_ratios(records: list[dict[str, Any]]) -> None:
    """To each record the ratio of its median to the native one of the same mode and workload."""
    native = {(r["mode"], r["workload"]): r["median"] for r in records if r["side"] == "native"}
    for record in records:
        base = native.get((record["mode"], record["workload"]))
        record["ratio"] = round(record["median"] / base, 4) if base else None


def show(records: list[dict[str, Any]]) -> None:
    """A table without any library: this also runs where there is nothing but vLLM."""
    for r in records:
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.3f}"
        spread = f"({min(r['rounds']):.1f}-{max(r['rounds']):.1f})"
        say(f"{r['mode']:9} {r['workload']:10} {r['side']:8} {r['median']:10.1f} tok/s {spread:20} {ratio}")
        for share in (r["coverage"] or {}).get("providers", ()):
            say(f"{'':12}{share['provider']:20} {share['share']:7.1%}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    top.add_argument("model", nargs="?", type=Path, help="folder with a config.json")
    top.add_argument("--workloads", default="decode", help=f"comma-separated, of {', '.join(WORKLOADS)}")
    top.add_argument("--modes", default="compiled", help=f"comma-separated, of {', '.join(MODES)}")
    top.add_argument("--sides", default=",".join(SIDES), help=f"comma-separated, of {', '.join(ALLOWED_SIDES)}")
    top.add_argument("--repeats", type=int, default=3, help="measured rounds of each side, at least 3 (default: 3)")
    top.add_argument("--resident", action="store_true", help="keep all engines of a mode loaded")
    top.add_argument("--devices", default="", metavar="N,N", help="a device for each side, which stays loaded there")
    top.add_argument("--kv-cache-gib", type=float, default=26, help="of each resident engine (default: 26)")
    top.add_argument("--coverage", default="", metavar="WORKLOADS", help="profile one pass of each side of these")
    top.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    top.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there instead of standard output")
    top.add_argument("--logs", type=Path, default=Path("/tmp") / f"serving-parity-{os.getpid()}")
    top.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    return top


def check(arguments: argparse.Namespace) -> None:
    """Judges the arguments before anything is started."""
    for option, allowed in (("workloads", WORKLOADS), ("modes", MODES), ("sides", ALLOWED_SIDES)):
        values = [value.strip() for value in getattr(arguments, option).split(",")]
        for value in values:
            if value not in allowed:
                parser().error(f"--{option}: {value!r} is unknown; allowed: {', '.join(allowed)}")
        setattr(arguments, option, values)
    arguments.coverage = [name.strip() for name in arguments.coverage.split(",") if name]
    for name in arguments.coverage:
        if name not in arguments.workloads:
            parser().error(f"--coverage: {name!r} is not one of --workloads ({', '.join(arguments.workloads)})")
    arguments.devices = [device.strip() for device in arguments.devices.split(",") if device]
    if arguments.devices and len(set(arguments.devices)) != len(arguments.sides):
        parser().error(f"--devices: one for each side ({', '.join(arguments.sides)}), each another")
    if arguments.devices and arguments.resident:
        parser().error("--devices: its engines stay loaded already; leave out --resident, which shares one device")
    if arguments.repeats < 3:
        parser().error(f"--repeats: {arguments.repeats} is too few for a median; at least 3")
    if arguments.model is None or not (arguments.model / "config.json").is_file():
        parser().error(f"MODEL: {arguments.model} is not a folder with a config.json")


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no engine outlives us
    arguments = parser().parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return 0
    check(arguments)
    arguments.logs.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = []
    for session in (Session(arguments, mode) for mode in arguments.modes):
        records += session.run()
        if session.interrupted:
            break
    add_ratios(records)
    show(records)
    document = {
        "benchmark": "serving_parity",
        "model": arguments.model.name,
        "machine": machine(),
        "versions": {name: version(name) for name in ("vllm", "torch", "triton", "vllm-fl-core", "vllm-fl-nvidia")},
        "results": records,
    }
    text = json.dumps(document, indent=1)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 130 if session.interrupted else int(not records)


if __name__ == "__main__":
    sys.exit(main())
