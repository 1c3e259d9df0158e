"""profile, compare and bisect on vLLM: the documents' own commands, with a slow and a wrong implementation planted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Fresh, TinyModel

pytestmark = pytest.mark.more

DOCS = Path(__file__).parents[2] / "docs"
LAYERS = 2

#: silu_and_mul sleeps in each call and, while a profiler runs, says for how long. rms_norm is off in one entry, of the
#: norm after attention in layer 1, the fourth of a step, at step 7. The first norm of a step has no residual.
PLANTED = """
import os, time, torch
from vllm_fl.dispatch import BackendImplKind, OpImpl

def silu_and_mul(x):
    begin = time.perf_counter()
    gate, up = x.chunk(2, dim=-1)
    time.sleep(0.05)
    y = torch.nn.functional.silu(gate) * up
    if torch.autograd._profiler_enabled():
        with open(os.environ["PLANTED_LOG"], "a") as log:
            log.write(f"{begin} {time.perf_counter()}\\n")
    return y

step = norm = 0

def rms_norm(x, residual, weight, epsilon):
    global step, norm
    step, norm = (step, norm + 1) if residual is not None else (1 if x.shape[0] > 2 else step + 1, 1)
    total = x if residual is None else x + residual
    y = torch.nn.functional.rms_norm(total, (x.shape[-1],), weight, epsilon)
    if (step, norm) == (7, 4):
        y[0, 5] += 1000.0
    return y if residual is None else (y, total)

def register(registry):
    for fn in (silu_and_mul, rms_norm):
        registry.register_impl(
            OpImpl(fn.__name__, "vendor.planted", BackendImplKind.VENDOR, fn, vendor="planted", priority=100)
        )
"""


def documented() -> list[str]:
    """The commands of the documents that start an engine."""
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("profiling.md", "comparing.md"))
    return re.findall(r"^\$ vllm-fl (\w+ quickstart.*)$", text, re.MULTILINE)


def run_all(commands: list[str], model: str, folder: str) -> dict[str, Any]:
    """First what the processes of an engine say of themselves. Then each command in turn, with a tiny model in place of
    the quickstart's; profiles before the others, since their engines are processes of their own."""
    from vllm_fl.cli import main
    from vllm_fl.diagnostics import ask_processes
    from vllm_fl.engines import Engine

    os.chdir(folder)
    arguments = {"model": model, "dtype": "float32", "max_model_len": 128, "enforce_eager": True}
    with Engine(arguments):
        live = [
            (process.pid, process.problem, {o["operator"]: o["chosen"] for o in process.operators})
            for process in ask_processes(Path("traces"))
        ]
    results = []
    for command in commands:
        name, _, *options = shlex.split(command)
        extra = ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager"]
        size = ["--input-len", "16", "--output-len", "10", "--requests", "2"]
        printed = Path("printed.json")
        with printed.open("w") as out, contextlib.redirect_stdout(out):
            code = main([name, model, *options, *size, *extra, "--json"])
        results.append({"code": code, "out": printed.read_text()})
    return {"pid": os.getpid(), "live": live, "results": results}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def ran(fresh: Fresh, tiny_llama: TinyModel, folder: Path) -> dict[str, Any]:
    (folder / "planted.py").write_text(PLANTED)
    commands = documented()
    env = {
        "PYTHONPATH": str(folder),
        "VLLM_FL_PLUGIN_MODULES": "planted",
        "PLANTED_LOG": str(folder / "slept.txt"),
        "VLLM_FL_TRACE_DIR": str(folder / "traces"),
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "OMP_NUM_THREADS": "1",
    }
    outcome = fresh(run_all, commands=commands, model=str(tiny_llama.path), folder=str(folder), env=env)
    for result in outcome.value["results"]:
        assert result["code"] in (0, 1), outcome.log
        result["document"] = json.loads(result["out"])
    return outcome.value


@pytest.fixture(scope="module")
def results(ran: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each command gave, by the command."""
    return dict(zip(documented(), ran["results"], strict=True))


def test_the_processes_of_an_engine_explain_themselves(ran: dict[str, Any]) -> None:
    """The one that asks, and that of the engine, which it has forked."""
    pids = [pid for pid, _, _ in ran["live"]]
    assert ran["pid"] in pids
    assert len(pids) == 2
    for _, problem, chosen in ran["live"]:
        assert problem == ""
        assert (chosen["rms_norm"], chosen["rotary_embedding"]) == ("vendor.planted", "reference.torch")


def test_the_documents_have_these_commands() -> None:
    assert [command.split()[0] for command in documented()] == ["profile", "profile", "compare", "bisect"]


def test_profile_ranks_the_slow_one_first_with_its_true_share(results: dict[str, Any], folder: Path) -> None:
    result = results["profile quickstart"]
    assert result["code"] == 0
    (report,) = result["document"]["reports"]
    first = report["rows"][0]
    assert (first["operator"], first["implementation"]) == ("silu_and_mul", "vendor.planted")
    # The log begins with the calls of this profile: from the first to the last one, less than a step more at both ends.
    lines = (folder / "slept.txt").read_text().splitlines()[: first["calls"]]
    calls = [tuple(map(float, line.split())) for line in lines]
    slept, span = sum(end - begin for begin, end in calls), calls[-1][1] - calls[0][0]
    assert first["time_us"] == pytest.approx(slept * 1e6, rel=0.02)
    awake_in_a_step = (span - slept) / (len(calls) / LAYERS)
    assert slept / (span + 2 * awake_in_a_step) - 0.02 <= first["share"] <= slept / span + 0.02
    assert sum(row["share"] for row in report["rows"]) == pytest.approx(1.0)
    assert {row["operator"] for row in report["rows"]} >= {"attention_backend", "rms_norm", "rotary_embedding"}
    assert report["selection"]["rms_norm"] == "vendor.planted"


def test_profile_writes_a_page_and_timelines(results: dict[str, Any], folder: Path) -> None:
    from vllm_fl.profile import timeline
    from vllm_fl.profile.trace import read_trace

    document = results["profile quickstart"]["document"]
    (trace,) = document["reports"][0]["traces"]
    assert Path(trace) == folder / "vllm-fl-profile" / "trace-rank0.json.gz"
    assert timeline(read_trace(trace)).total_us == pytest.approx(document["reports"][0]["total_us"])
    page = (folder / "vllm-fl-profile" / "profile.html").read_text()
    assert "silu_and_mul" in page
    assert json.loads((folder / "vllm-fl-profile" / "profile.json").read_text()) == document["reports"]


def test_profile_of_two_policies(results: dict[str, Any]) -> None:
    (result,) = [results[command] for command in results if "--against" in command]
    present, reference = result["document"]["reports"]
    assert (present["policy"], reference["policy"]) == ("present", "reference")
    of = [
        {row["operator"]: row for row in report["rows"] if row["operator"] == "silu_and_mul"}["silu_and_mul"]
        for report in (present, reference)
    ]
    assert [row["implementation"] for row in of] == ["vendor.planted", "reference.torch"]
    assert of[0]["share"] > of[1]["share"]


def test_compare_names_the_wrong_one_with_layer_and_step(results: dict[str, Any], folder: Path) -> None:
    (result,) = [results[command] for command in results if command.startswith("compare")]
    assert result["code"] == 1
    document = result["document"]
    assert document["culprit"] == "rms_norm"
    first = document["operators"][0]
    assert (first["operator"], first["second"], first["outside"]) == ("rms_norm", "vendor.planted", 1)
    assert (first["step"], first["module"]) == (7, "model.layers.1.post_attention_layernorm")
    assert "in 1 of " in first["text"]
    assert "at [0, 5]" in first["text"]
    right = {o["operator"]: o["outside"] for o in document["operators"][1:]}
    assert right == {"silu_and_mul": 0}
    layer = document["layers"][0]
    assert (layer["step"], layer["module"]) == (7, "model.layers.1")
    token = document["tokens"][0]
    assert (token["request"], token["position"]) == (0, 6)
    dump = Path(first["dump"])
    assert dump.is_file() or (folder / dump).is_file()
    assert "step7" in dump.name


def test_bisect_finds_the_wrong_one(results: dict[str, Any]) -> None:
    (result,) = [results[command] for command in results if command.startswith("bisect")]
    assert result["code"] == 1
    document = result["document"]
    assert document["candidates"] == ["rms_norm", "silu_and_mul"]
    assert document["culprits"] == ["rms_norm"]
    assert document["others_agree"] is True
    culprit = document["comparison"]["operators"][0]
    assert (culprit["step"], culprit["module"]) == (7, "model.layers.1.post_attention_layernorm")
