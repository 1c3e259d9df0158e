#!/usr/bin/env python3
"""Runs tiny models on several versions of vLLM and writes docs/compatibility.md from what came out.

    python scripts/matrix.py                                 every version and every model
    python scripts/matrix.py --versions 0.27.1 0.33.0 --models llama gemma2
    python scripts/matrix.py --render                        only the document, from the results that are there

Each version runs in an environment of its own (matrix_environments.py) on the CPU platform. A model passes if greedy
tokens in float32 are those of transformers, or its embeddings (tests/matrix/run_cells.py). Results are merged into
tests/matrix/results.json. Exit codes: 0 nothing failed, 1 a model failed, 2 wrong arguments, 3 an environment cannot be
made.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matrix_page
from matrix_environments import describe, prepare
from steps import BootstrapError, cache_dir, clean_environment, locked, say

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "matrix" / "results.json"
PAGE = ROOT / "docs" / "compatibility.md"
VERSIONS = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
#: Models that run compiled, too, under the name with this suffix.
COMPILED = ("llama", "qwen3", "qwen3_moe", "gemma2", "deepseek_v3")
SUFFIX = "-compiled"
SECONDS_A_MODEL = 400.0

Cell = dict[str, Any]


def run_version(version: str, python: Path, models: Sequence[str]) -> Iterator[Cell]:
    """One cell a model, as each comes out. A process that ends early is followed by one for the models that remain."""
    remaining = list(models)
    while remaining:
        with tempfile.TemporaryDirectory() as folder:
            answers = Path(folder) / "answers"
            log = cache_dir() / "logs" / f"matrix-run-{version}-{remaining[0]}.log"
            ended = _run(python, answers, remaining, Path(folder), log)
            lines = answers.read_text(encoding="utf-8").splitlines() if answers.exists() else []
        for line in lines:
            cell = json.loads(line)
            remaining.remove(cell["model"])
            yield {"vllm": version, **cell}
        if remaining and (not lines or json.loads(lines[-1])["outcome"] != "failed"):
            reason = f"the process {ended}; log: {log.name}"
            yield {"vllm": version, "model": remaining.pop(0), "outcome": "failed", "reason": reason, "seconds": 0}


def _run(python: Path, answers: Path, models: Sequence[str], home: Path, log: Path) -> str:
    """How the process ended."""
    settings = {
        "HOME": str(home),
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_MLA_DISABLE": "1",  # latent attention as plain heads
        "OMP_NUM_THREADS": "1",
    }
    environment = {k: v for k, v in clean_environment().items() if not k.startswith(("VLLM_", "XDG_"))}
    command = [str(python), str(ROOT / "tests" / "matrix" / "run_cells.py"), str(answers), *models]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**environment, **settings}, stdout=output, stderr=output, start_new_session=True
        )
        _running.add(process)
        try:
            code = process.wait(SECONDS_A_MODEL * len(models))
        except subprocess.TimeoutExpired:
            return "took too long"
        finally:
            _running.discard(process)
            _kill_group(process)
    return f"ended with code {code}"


_running: set[subprocess.Popen[bytes]] = set()


def _stop(number: int, frame: object) -> None:
    """End with everything that was started; the threads that wait for it would go on after an exception."""
    for process in list(_running):
        _kill_group(process)
    os._exit(128 + number)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def read_results() -> dict[str, Any]:
    """Environments by version of vLLM, and cells."""
    if not RESULTS.exists():
        return {"environments": {}, "cells": []}
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def merge(results: dict[str, Any], environments: dict[str, dict[str, str]], cells: Iterable[Cell]) -> dict[str, Any]:
    """`results` with these environments and cells in the place of older ones, in a fixed order."""
    found = {(cell["vllm"], cell["model"]): cell for cell in [*results["cells"], *cells]}
    merged = {**results["environments"], **environments}
    order = sorted(found, key=lambda key: (matrix_page.version_key(key[0]), key[1]))
    return {
        "environments": {version: merged[version] for version in sorted(merged, key=matrix_page.version_key)},
        "cells": [found[key] for key in order],
    }


def write(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(matrix_page.render(results), encoding="utf-8")


def known_models() -> list[str]:
    """Names of tests/models/tiny_models.py, read without importing it (this Python may have no torch), and compiled."""
    import ast

    names: list[str] = []
    for node in ast.parse((ROOT / "tests/models/tiny_models.py").read_text(encoding="utf-8")).body:
        target = getattr(node, "target", None)
        listed = isinstance(target, ast.Name) and target.id in {"CONFIGURATIONS", "ENCODERS"}
        if listed and isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):
            names.extend(ast.literal_eval(key) for key in node.value.keys if key is not None)
    return [*names, *(name + SUFFIX for name in COMPILED)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    models = known_models()
    parser = argparse.ArgumentParser(description="Runs tiny models on several versions of vLLM.")
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), choices=VERSIONS, metavar="VERSION")
    parser.add_argument("--models", nargs="+", default=models, choices=models, metavar="MODEL")
    parser.add_argument("--base", type=Path, default=ROOT / ".venv", help="the environment with torch (default: .venv)")
    parser.add_argument("--jobs", type=int, default=2, help="versions that run at a time (default: 2)")
    parser.add_argument("--render", action="store_true", help="only write the document")
    parser.add_argument("--keep", action="store_true", help="report only: leave the results and the document alone")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    if arguments.render:
        write(read_results())
        return 0
    try:
        pythons = {version: prepare(version, arguments.base.absolute()) for version in arguments.versions}
    except BootstrapError as error:
        say(str(error))
        return 3
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    cells: list[Cell] = []

    def run(version: str) -> None:
        for cell in run_version(version, pythons[version], arguments.models):
            cells.append(cell)
            say(f"{version:8} {cell['model']:16} {cell['outcome']:10} {cell['seconds']:4} s  {cell['reason']}")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, arguments.versions))
    if not arguments.keep:
        environments = {version: describe(python) for version, python in pythons.items()}
        with locked("matrix-results"):
            write(merge(read_results(), environments, cells))
    return int(any(cell["outcome"] == "failed" for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
