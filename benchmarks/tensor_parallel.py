"""Tensor parallelism with the communicator of vllm-fl-comm: the same tokens, the throughput, and a rank that dies.

    python benchmarks/tensor_parallel.py --stand-in --phases tokens,peer,kill --json tensor_parallel.json
    FLAGCX_PATH=/opt/flagcx python benchmarks/tensor_parallel.py --phases throughput --moe FOLDER
    python benchmarks/tensor_parallel.py --phases tokens --dense FOLDER         # adds a model of that shape
    FLAGCX_PATH=... python benchmarks/tensor_parallel.py --device cpu           # with the simulated FlagCX

Phases, each of which fails or ends by itself; the others go on:

- tokens: greedy tokens in float32 of tiny models, and of one of the shape of ``--dense`` (random weights on disk, since
  vLLM's dummy weights differ with the number of ranks): TP 1, TP 2 of vLLM itself, TP 2 through FlagCX with captured
  graphs, and eager, all loaded together. They have to be equal.
- throughput: benchmarks/serving_parity.py with TP 2, vLLM itself against our platform with the communicator, by turns.
- peer: a rank of a plain loop of all-reduces is killed; the other has to end with an error within the limit.
- kill: a worker of a generating TP 2 engine is killed; the engine has to end with an error within the limit.

FOLDER has a config.json. Without FLAGCX_PATH, ``--stand-in`` builds a library that forwards FlagCX's calls to NCCL.
NVLink multicast is kept off.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from sides import Engine, Side, WorkerError, machine, requests, version

ROOT = Path(__file__).resolve().parents[1]
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
COMMON = {**QUIET, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
PHASES = ("tokens", "throughput", "peer", "kill")
PROMPTS = [[3, 5, 7, 9, 11, 13], list(range(10, 66)), [42], [(7 * i) % 280 + 5 for i in range(150)]]
NEW_TOKENS = 24
TINY = ("qwen3", "qwen3_moe")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--phases", default="tokens,peer,kill", help=f"comma-separated, of {', '.join(PHASES)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stand-in", action="store_true", help="build over_nccl.c and let it stand in for FlagCX")
    parser.add_argument("--dense", type=Path, metavar="FOLDER", help="a dense model for the phase tokens")
    parser.add_argument("--moe", type=Path, metavar="FOLDER", help="the model for the phase throughput")
    parser.add_argument("--workloads", default="decode,latency", help="of serving_parity.py (default: decode,latency)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each side in the phase throughput")
    parser.add_argument("--timeout", type=float, default=15.0, help="seconds after which a lost rank must be noticed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / f"tensor-parallel-{os.getpid()}")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.phases = options.phases.split(",")
    unknown = set(options.phases) - set(PHASES)
    if unknown:
        parser.error(f"--phases: {', '.join(sorted(unknown))} is unknown; allowed: {', '.join(PHASES)}")
    if "throughput" in options.phases and options.moe is None:
        parser.error("--phases throughput needs --moe FOLDER")
    for folder in filter(None, (options.dense, options.moe)):
        if not (folder / "config.json").is_file():
            parser.error(f"{folder} is not a folder with a config.json")
    return options


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine outlives us
    options = arguments()
    if options.worker:
        specification = json.loads(options.worker)
        WORKERS[specification["work"]](specification)
        return 0
    options.logs.mkdir(parents=True, exist_ok=True)
    os.environ.update(COMMON)
    os.environ.pop("FLAGCX_CUSTOM_OP_ENABLE", None)
    if options.stand_in:
        build = ROOT / "packages/vllm-fl-comm/tests/double/build.py"
        folder = options.logs / "stand-in"
        subprocess.run([sys.executable, str(build), str(folder), "--over-nccl"], check=True, stdout=subprocess.DEVNULL)
        os.environ["FLAGCX_PATH"] = str(folder)
    if "FLAGCX_PATH" not in os.environ:
        sys.exit("FLAGCX_PATH is not set; set it, or pass --stand-in")
    report: dict[str, Any] = {
        "benchmark": "tensor_parallel",
        "command": sys.argv,
        "library": os.environ["FLAGCX_PATH"] if not options.stand_in else "stand-in over NCCL",
        "machine": machine(),
        "versions": {name: version(name) for name in ("vllm", "torch", "vllm-fl-core", "vllm-fl-comm")},
        "phases": {},
    }
    for phase in options.phases:
        started = time.monotonic()
        try:
            result = globals()[f"phase_{phase}"](options)
        except Exception as error:  # the other phases are still worth their results
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.monotonic() - started, 1)
        report["phases"][phase] = result
        print(f"== {phase}: {json.dumps({k: v for k, v in result.items() if k != 'document'})}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(result["ok"] for result in report["phases"].values()) else 1


# tokens


def phase_tokens(options: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens of every engine of every model."""
    models = {name: ["--tiny", name] for name in TINY}
    if options.dense is not None:
        models[options.dense.name] = ["--dense", str(options.dense.resolve())]
    result: dict[str, Any] = {"ok": True, "models": {}}
    with tempfile.TemporaryDirectory(dir=options.logs) as folder:
        for name, source in models.items():
            path = Path(folder) / name
            make = {"work": "make", "source": source, "path": str(path), "device": options.device}
            subprocess.run([sys.executable, __file__, "--worker", json.dumps(make)], check=True, timeout=300)
            engines = [_token_engine(side, path, options) for side in _token_sides(options)]
            answers = {engine.side.name: _tokens(engine) for engine in engines}
            first = next(iter(answers.values()))
            equal = {name: answer == first and isinstance(first, list) for name, answer in answers.items()}
            result["models"][name] = {"equal": equal, "differences": _differences(first, answers)}
            result["ok"] &= all(equal.values())
            print(f"tokens {name}: {equal}", flush=True)
    return result


def _token_sides(options: argparse.Namespace) -> list[Side]:
    native = {"VLLM_PLUGINS": ""} if options.device == "cuda" else {"VLLM_FL_COMM": "native"}
    return [
        Side("TP 1", environment=native),
        Side("TP 2", environment=native),
        Side("TP 2 FlagCX", environment={}),
        Side("TP 2 FlagCX eager", environment={}, eager=True),
    ]


def _token_engine(side: Side, model: Path, options: argparse.Namespace) -> Engine:
    specification = {"work": "tokens", "model": str(model), "ranks": int(side.name[3]), "device": options.device}
    log = options.logs / f"tokens-{model.name}-{side.name.replace(' ', '-')}.log"
    return Engine(side, Path(__file__), specification, log)


def _tokens(engine: Engine) -> Any:
    try:
        engine.load()
        answer = engine.measure()["tokens"]
    except WorkerError as error:
        return str(error)
    finally:
        engine.close()
    if "FlagCX" in engine.side.name and "ranks over FlagCX" not in engine.log.read_text("utf-8", "replace"):
        return f"{engine.log} does not say that FlagCX is used"
    return answer


def _differences(first: Any, answers: dict[str, Any]) -> dict[str, Any]:
    """For each side that differs: its error, or (prompt, position) of the first other token of each prompt."""
    found: dict[str, Any] = {}
    for name, answer in answers.items():
        if isinstance(answer, str):
            found[name] = answer[:900]
        elif isinstance(first, list) and answer != first:
            pairs = enumerate(zip(first, answer, strict=True))
            places = ((i, [k for k, (a, b) in enumerate(zip(*pair, strict=True)) if a != b]) for i, pair in pairs)
            found[name] = [(prompt, positions[0]) for prompt, positions in places if positions]
    return found


def work_tokens(specification: dict[str, Any]) -> None:
    """Load an engine, then answer with its greedy tokens."""
    replies = os.fdopen(specification["reply_fd"], "w", buffering=1)
    import vllm

    engine = _engine(specification)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    for _ in requests(specification, {"vllm": vllm.__version__}, replies):
        outputs = engine.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
        print(json.dumps({"tokens": [list(output.outputs[0].token_ids) for output in outputs]}), file=replies)


def _engine(specification: dict[str, Any]) -> Any:
    import vllm

    # Engines that start together cannot measure what is free.
    more: dict[str, Any] = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 256 << 20}
    if specification["device"] == "cpu":
        more = {"kv_cache_memory_bytes": 32 << 20}
    elif not specification["eager"]:
        more["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
    return vllm.LLM(
        model=specification["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=400,
        max_num_seqs=8,
        enforce_eager=specification["eager"],
        tensor_parallel_size=specification["ranks"],
        seed=0,
        **more,
    )


def work_make(specification: dict[str, Any]) -> None:
    """Write a checkpoint of random weights."""
    kind, source = specification["source"]
    path = Path(specification["path"])
    if kind == "--tiny":
        sys.path.insert(0, str(ROOT / "tests/models"))
        import tiny_models

        tiny_models.make(source, path)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    # With a shared matrix a random model only repeats its last token.
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    with torch.device(specification["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)


# throughput


def phase_throughput(options: argparse.Namespace) -> dict[str, Any]:
    """serving_parity.py with two ranks; its document."""
    out = options.logs / "throughput.json"
    command = [sys.executable, str(ROOT / "benchmarks/serving_parity.py"), str(options.moe.resolve())]
    command += ["--workloads", options.workloads, "--sides", "native,vendor", "--repeats", str(options.repeats)]
    command += ["--resident", "--options", json.dumps({"tensor_parallel_size": 2}), "--output", str(out)]
    command += ["--logs", str(options.logs / "serving")]
    done = subprocess.run(command, check=False)
    document = json.loads(out.read_text())
    logs = "".join(log.read_text("utf-8", "replace") for log in (options.logs / "serving").glob("*vendor.log"))
    ratios = {f"{r['side']} {r['workload']}": (r["median"], r["ratio"]) for r in document["results"]}
    used = "ranks over FlagCX" in logs
    return {"ok": done.returncode == 0 and used, "over_flagcx": used, "medians": ratios, "document": document}


# a rank that dies


def phase_peer(options: argparse.Namespace) -> dict[str, Any]:
    """Kill one of two ranks that all-reduce in a loop; how the other ends, and when."""
    return _lost(options, "peer", limit=options.timeout + 30)


def phase_kill(options: argparse.Namespace) -> dict[str, Any]:
    """Kill one worker of a generating engine; how the engine ends, and when."""
    return _lost(options, "kill", limit=options.timeout + 60)


def _lost(options: argparse.Namespace, work: str, limit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.logs) as folder:
        specification = {"work": work, "device": options.device, "ranks": 2, "eager": True, "folder": folder}
        if work == "kill":
            make = {"work": "make", "source": ["--tiny", "qwen3"], "path": f"{folder}/model"}
            subprocess.run([sys.executable, __file__, "--worker", json.dumps(make)], check=True, timeout=120)
            specification["model"] = f"{folder}/model"
        log = options.logs / f"{work}.log"
        environment = {**os.environ, "VLLM_FL_COMM_TIMEOUT": str(options.timeout), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, "--worker", json.dumps(specification)],
                env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            victim = _victim(Path(folder), process, log)
            started = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            seconds = round(time.monotonic() - started, 2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text("utf-8", "replace").splitlines()
    named = [
        line for line in lines if re.search(r"did not end|a peer was lost|EngineDeadError|died unexpectedly", line)
    ]
    ok = code not in (None, 0) and bool(named)
    return {"ok": ok, "exit_status": code, "seconds_to_end": seconds, "said": [line[-300:] for line in named[:3]]}


def _victim(folder: Path, process: subprocess.Popen[bytes], log: Path, limit: float = 240.0) -> int:
    """The process to kill, which the worker writes down when it is busy."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError, ValueError):
            return int((folder / "victim").read_text())
        time.sleep(0.1)
    raise RuntimeError(f"the engine did not come up; log: {log}\n{log.read_text('utf-8', 'replace')[-800:]}")


def work_peer(specification: dict[str, Any]) -> None:
    """Two ranks, each a process; this one becomes rank 0 after it has started the other."""
    from tensor_parallel_peer import run

    run(specification)


def work_kill(specification: dict[str, Any]) -> None:
    """An engine that generates for ever; the process of its last rank is written down once tokens flow."""
    import threading

    import vllm

    engine = _engine(specification)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    engine.generate(prompts, sampling, use_tqdm=False)
    victim = list(_processes("Worker_TP1"))[-1]
    target = Path(specification["folder"]) / "victim"
    threading.Timer(1.0, lambda: target.write_text(str(victim))).start()
    while True:
        engine.generate(prompts, sampling, use_tqdm=False)


def _processes(title: str) -> Iterator[int]:
    """Descendants of this session whose title, which vLLM sets, contains `title`."""
    session = os.getsid(0)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if title.encode() in (entry / "cmdline").read_bytes() and os.getsid(int(entry.name)) == session:
                yield int(entry.name)


WORKERS = {"tokens": work_tokens, "make": work_make, "peer": work_peer, "kill": work_kill}

if __name__ == "__main__":
    sys.exit(main())
