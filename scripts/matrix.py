#!/usr/bin/env python3
"""Runs tiny models on several versions of vLLM and writes docs/compatibility.md from what came out.

    python scripts/matrix.py                                 every version and every model
    python scripts/matrix.py --versions 0.27.1 0.33.0 --models llama gemma2
    python scripts/matrix.py --render                        only the document, from the results that are there
    python scripts/matrix.py --here FILE                     this Python's vLLM on this machine's device, into FILE
    python scripts/matrix.py --collect FILE                  what another machine wrote, into the results

Each version runs in an environment of its own (matrix_environments.py) on the CPU platform. A model passes if greedy
tokens in float32 are those of transformers, or its embeddings (tests/matrix/run_cells.py). Results are merged into
tests/matrix/results.json. `--here` makes no environment and drops no variable: it is for a machine with a device, and
a vLLM that has its kernels. Exit codes: 0 nothing failed, 1 a model failed, 2 wrong arguments, 3 an environment cannot
be made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import features
import matrix_page
import vllm_tests_page
from matrix_environments import describe, describe_here, prepare
from processes import end_with_signal, run_group, vllm_environment
from steps import BootstrapError, cache_dir, locked, say

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "matrix" / "results.json"
VLLM_TESTS = ROOT / "tests" / "matrix" / "vllm_tests.json"
PAGE = ROOT / "docs" / "compatibility.md"
VERSIONS = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
#: Models once more: under torch.compile, with latent attention in the place of plain heads, and with both.
VARIANTS = (
    *(f"{name}-compiled" for name in ("llama", "qwen3", "qwen3_moe", "gemma2", "deepseek_v3")),
    *("deepseek_v2-mla", "deepseek_v3-mla", "deepseek_v3-mla-compiled"),
)
SECONDS_A_MODEL = 400.0
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

Cell = dict[str, Any]


def run_version(
    version: str,
    python: Path,
    models: Sequence[str],
    inherited: Mapping[str, str] | None = None,
    logs: Path | None = None,
) -> Iterator[Cell]:
    """One cell a model, as each comes out. A process that ends early is followed by one for the models that remain.

    Args:
        version: of vLLM; the column of the table.
        inherited: the environment of the processes; by default a clean one.
        logs: folder of the logs; by default in the user's cache.
    """
    logs = logs or cache_dir() / "logs"
    remaining = list(models)
    while remaining:
        with tempfile.TemporaryDirectory() as folder:
            answers = Path(folder) / "answers"
            log = logs / f"matrix-run-{re.sub('[^a-zA-Z0-9.]+', '-', version)}-{remaining[0]}.log"
            environment = {**(vllm_environment(Path(folder)) if inherited is None else inherited), **SETTINGS}
            ended = _run(python, answers, remaining, environment, log)
            lines = answers.read_text(encoding="utf-8").splitlines() if answers.exists() else []
        for line in lines:
            cell = json.loads(line)
            remaining.remove(cell["model"])
            yield {"vllm": version, **cell}
        if remaining and (not lines or json.loads(lines[-1])["outcome"] != "failed"):
            reason = f"the process {ended}; log: {log.name}"
            yield {"vllm": version, "model": remaining.pop(0), "outcome": "failed", "reason": reason, "seconds": 0}


def _run(python: Path, answers: Path, models: Sequence[str], environment: Mapping[str, str], log: Path) -> str:
    """How the process ended."""
    command = [str(python), str(ROOT / "tests" / "matrix" / "run_cells.py"), str(answers), *models]
    return run_group(command, environment, log, SECONDS_A_MODEL * len(models))


def run_here(file: Path, models: Sequence[str], jobs: int) -> list[Cell]:
    """Run `models` in this environment, a process each, and write the results to `file` after each."""
    column, packages = describe_here()
    cells: list[Cell] = []
    writing = Lock()

    def run(model: str) -> None:
        (cell,) = run_version(column, Path(sys.executable), [model], os.environ, file.parent / "logs")
        tell(cell)
        with writing:
            cells.append(cell)
            results = merge({"environments": {}, "cells": []}, {column: packages}, cells)
            file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    file.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, models))
    return cells


def tell(cell: Cell) -> None:
    say(f"{cell['vllm']:8} {cell['model']:16} {cell['outcome']:10} {cell['seconds']:4} s  {cell['reason']}")


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
    PAGE.write_text(document(results), encoding="utf-8")


def document(results: dict[str, Any]) -> str:
    """docs/compatibility.md: these results, and those of other scripts that are there."""
    more = vllm_tests_page.section(json.loads(VLLM_TESTS.read_text(encoding="utf-8"))) if VLLM_TESTS.exists() else []
    return matrix_page.render(results, [*features.section(features.read_results()), *more])


def known_models() -> list[str]:
    """Names of tests/models/tiny_models.py, read without importing it (this Python may have no torch), and VARIANTS."""
    import ast

    names: list[str] = []
    body = ast.parse((ROOT / "tests/models/tiny_models.py").read_text(encoding="utf-8")).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for node in body:
        target = getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id in {"CONFIGURATIONS", "ENCODERS"}:
            names.extend(found.id for found in ast.walk(node) if isinstance(found, ast.Name) and found.id in functions)
    return [*names, *VARIANTS]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    models = known_models()
    parser = argparse.ArgumentParser(description="Runs tiny models on several versions of vLLM.")
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS), choices=VERSIONS, metavar="VERSION")
    parser.add_argument("--models", nargs="+", default=models, choices=models, metavar="MODEL")
    parser.add_argument("--base", type=Path, default=ROOT / ".venv", help="the environment with torch (default: .venv)")
    parser.add_argument(
        "--jobs", type=int, default=2, help="versions, or models of --here, that run at a time (default: 2)"
    )
    parser.add_argument("--render", action="store_true", help="only write the document")
    parser.add_argument("--here", type=Path, metavar="FILE", help="run on this Python's vLLM, and write FILE")
    parser.add_argument("--collect", type=Path, metavar="FILE", help="take over the results of --here")
    parser.add_argument("--keep", action="store_true", help="report only: leave the results and the document alone")
    arguments = parser.parse_args(argv)
    if arguments.collect and not arguments.collect.is_file():
        parser.error(
            f"argument --collect: there is no file {arguments.collect}; `--here {arguments.collect}` writes it"
        )
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    end_with_signal()
    if arguments.render:
        write(read_results())
        return 0
    if arguments.collect:
        found = json.loads(arguments.collect.read_text(encoding="utf-8"))
        with locked("matrix-results"):
            write(merge(read_results(), found["environments"], found["cells"]))
        return 0
    if arguments.here:
        cells = run_here(arguments.here, arguments.models, arguments.jobs)
        return int(any(cell["outcome"] == "failed" for cell in cells))
    try:
        pythons = {version: prepare(version, arguments.base.absolute()) for version in arguments.versions}
    except BootstrapError as error:
        say(str(error))
        return 3
    cells = []

    def run(version: str) -> None:
        for cell in run_version(version, pythons[version], arguments.models):
            cells.append(cell)
            tell(cell)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, arguments.versions))
    if not arguments.keep:
        environments = {version: describe(python) for version, python in pythons.items()}
        with locked("matrix-results"):
            write(merge(read_results(), environments, cells))
    return int(any(cell["outcome"] == "failed" for cell in cells))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
