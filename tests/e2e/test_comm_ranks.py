"""Two ranks over a simulated FlagCX: the tokens of transformers, a rank that dies, and the benchmark of all-reduce."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Fresh

pytestmark = pytest.mark.more

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "packages/vllm-fl-comm/tests/double/build.py"
#: How long an operation may take; the engine has to be gone soon after a rank is.
LIMIT = 60


@pytest.fixture(scope="session")
def flagcx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment that selects the simulated FlagCX."""
    folder = tmp_path_factory.mktemp("flagcx")
    subprocess.run([sys.executable, str(BUILD), str(folder)], check=True, stdout=subprocess.DEVNULL)
    return {"FLAGCX_PATH": str(folder), "VLLM_FL_COMM_TIMEOUT": str(LIMIT), "OMP_NUM_THREADS": "1"}


def two_ranks(folder: str) -> dict[str, Any]:
    """Greedy tokens of two models on two ranks each, and how the last engine ends when one of its ranks is killed."""
    sys.path.insert(0, str(ROOT / "tests/models"))
    import tiny_models
    from test_models import ask, draw_prompts, engine

    found: dict[str, Any] = {}
    for name in ("qwen3_moe", "qwen3"):
        path = Path(folder) / name
        drawn = draw_prompts(tiny_models.make(name, path))
        prompts = [prompt for prompt, _, _ in drawn]
        settings = {"tensor_parallel_size": 2, "enable_expert_parallel": name == "qwen3_moe"}
        with engine(str(path), settings) as llm:
            found[name] = {"expected": [t for _, t, _ in drawn], "tokens": ask(llm, prompts, together=True)[0]}
            if name == "qwen3":
                found["end"] = end_without_a_rank(lambda llm=llm, prompts=prompts: ask(llm, prompts, together=True))
    return found


def end_without_a_rank(step: Callable[[], Any]) -> dict[str, Any]:
    """The error of the engine whose rank 1 is killed while it runs `step` again and again."""
    ranks = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if b"Worker_TP1" in (entry / "cmdline").read_bytes() and os.getsid(int(entry.name)) == os.getsid(0):
                ranks.append(int(entry.name))
    threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGKILL) for pid in ranks]).start()
    started = time.monotonic()
    try:
        while time.monotonic() - started < LIMIT:
            step()
    except Exception as error:
        return {"ranks": len(ranks), "error": type(error).__name__, "seconds": time.monotonic() - started}
    return {"ranks": len(ranks), "error": None}


def test_tokens_of_two_ranks_and_the_end_when_one_dies(fresh: Fresh, flagcx: dict[str, str], tmp_path: Path) -> None:
    outcome = fresh(two_ranks, env=flagcx, check=False, folder=str(tmp_path))
    assert outcome.value is not None, outcome.log
    for name in ("qwen3_moe", "qwen3"):
        assert outcome.value[name]["tokens"] == outcome.value[name]["expected"], name
    for group in ("tp:0", "ep:0"):
        assert f"group {group!r}: 2 ranks over FlagCX, {flagcx['FLAGCX_PATH']}/lib/libflagcx.so" in outcome.log
    assert outcome.value["end"]["ranks"] == 1
    assert outcome.value["end"]["error"] == "EngineDeadError", outcome.log
    assert outcome.value["end"]["seconds"] < LIMIT


def test_the_benchmark_of_all_reduce_runs(environment: dict[str, str], flagcx: dict[str, str], tmp_path: Path) -> None:
    out, text = tmp_path / "report.json", tmp_path / "table.md"
    command = [
        sys.executable,
        str(ROOT / "benchmarks/allreduce.py"),
        "--device",
        "cpu",
        "--methods",
        "flagcx",
        "one-shot",
    ]
    command += ["--max", "2KiB", "--repeats", "1", "--json", str(out), "--markdown", str(text)]
    done = subprocess.run(command, env={**environment, **flagcx}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert [(entry["size"], entry["mode"]) for entry in report["results"]] == [(1024, "eager"), (2048, "eager")]
    assert all(entry["us"] > 0 for entry in report["results"])
    assert list(report["problems"]) == ["one-shot"]  # which has no CPU form, and did not disturb the other
    assert "| 2 KiB |" in text.read_text()
