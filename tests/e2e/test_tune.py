"""tune on vLLM, with implementations planted that are slow, wrong, and crash; then what it wrote, in new engines."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Fresh, TinyModel

pytestmark = pytest.mark.more

#: silu_and_mul and rms_norm begin with one that sleeps. One rms_norm would be the fastest and is wrong, one
#: silu_and_mul raises. The rotary embedding sleeps as long as its parameter says.
PLANTED = """
import time, torch
from vllm_fl.dispatch import BackendImplKind, OpImpl, Parameter

def slow_silu_and_mul(x):
    time.sleep(0.003)
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up

def raising_silu_and_mul(x):
    raise RuntimeError("planted")

def rms_norm(x, residual, weight, epsilon):
    total = x if residual is None else x + residual
    y = torch.nn.functional.rms_norm(total, (x.shape[-1],), weight, epsilon)
    return y if residual is None else (y, total)

def slow_rms_norm(x, residual, weight, epsilon):
    time.sleep(0.001)
    return rms_norm(x, residual, weight, epsilon)

def wrong_rms_norm(x, residual, weight, epsilon):
    return x if residual is None else (x, residual)

def paced_rotary_embedding(query, key, cos, sin, position_ids, is_neox_style, *, pause_ms=4):
    from vllm_fl_reference.ops import rotary_embedding
    time.sleep(pause_ms / 1000)
    return rotary_embedding(query, key, cos, sin, position_ids, is_neox_style)

def register(registry):
    registry.register_impl(
        OpImpl(
            "rotary_embedding", "vendor.paced", BackendImplKind.VENDOR, paced_rotary_embedding, vendor="paced",
            parameters=(Parameter("pause_ms", (0, 2, 4, 8), 4),),
        )
    )
    for op, name, fn, priority in (
        ("silu_and_mul", "slow", slow_silu_and_mul, 100),
        ("silu_and_mul", "raising", raising_silu_and_mul, 90),
        ("rms_norm", "slow", slow_rms_norm, 100),
        ("rms_norm", "wrong", wrong_rms_norm, 90),
    ):
        registry.register_impl(
            OpImpl(op, f"vendor.{name}", BackendImplKind.VENDOR, fn, vendor=name, priority=priority)
        )
"""


#: For an engine with torch.compile: the slow silu_and_mul is traced into the code, the slow rms_norm is opaque.
PLANTED_COMPILED = """
import time, torch
from vllm_fl.dispatch import BackendImplKind, OpImpl

def slow_silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    waste = x.new_zeros(400, 400) + x[0, 0] * 0.0
    for _ in range(4):
        waste = waste @ waste
    return torch.nn.functional.silu(gate) * up + waste[0, 0]

def slow_rms_norm(x, residual, weight, epsilon):
    time.sleep(0.002)
    total = x if residual is None else x + residual
    y = torch.nn.functional.rms_norm(total, (x.shape[-1],), weight, epsilon)
    return y if residual is None else (y, total)

def register(registry):
    for op, fn, opaque in (("silu_and_mul", slow_silu_and_mul, False), ("rms_norm", slow_rms_norm, True)):
        registry.register_impl(
            OpImpl(op, "vendor.slow", BackendImplKind.VENDOR, fn, vendor="slow", opaque=opaque)
        )
"""


def tune_compiled(model: str, folder: str) -> dict[str, Any]:
    """Tune an engine with torch.compile; the printed document and the exit code."""
    from vllm_fl.cli import main

    os.chdir(folder)
    size = ["--input-len", "16", "--output-len", "8", "--requests", "2"]
    extra = ["--dtype", "float32", "--max-model-len", "128", "--max-num-batched-tokens", "128"]
    printed = Path("printed.json")
    with printed.open("w") as out, contextlib.redirect_stdout(out):
        code = main(["tune", model, *size, *extra, "--budget", "10m", "--sampler", "greedy", "--json"])
    return {"code": code, "out": printed.read_text()}


def tune_and_use(model: str, folder: str) -> dict[str, Any]:
    """Tune; then the selections by the policy file, and those of an engine that looks the table up."""
    from vllm_fl.cli import main
    from vllm_fl.dispatch import policy_context
    from vllm_fl.engines import Engine
    from vllm_fl.policies import parse_policy
    from vllm_fl.tune.host import request_times

    os.chdir(folder)
    size = ["--input-len", "16", "--output-len", "8", "--requests", "2"]
    extra = ["--dtype", "float32", "--max-model-len", "128", "--enforce-eager"]
    printed = Path("printed.json")
    with printed.open("w") as out, contextlib.redirect_stdout(out):
        code = main(["tune", model, *size, *extra, "--budget", "10m", "--sampler", "greedy", "--json"])
    policy = parse_policy("vllm-fl-tune/policy.yaml", "--policy")
    with policy_context(policy):
        by_file = _chosen()
    os.environ["VLLM_FL_TUNED"] = "auto"
    arguments = {"model": model, "dtype": "float32", "max_model_len": 128, "enforce_eager": True}
    arguments["disable_log_stats"] = False
    with Engine(arguments, in_process=True) as engine:
        by_table = _chosen()
        (output,) = engine.outputs([[5] * 8], 4)
    times = request_times(output.metrics)
    selections = {"file": by_file, "table": by_table}
    return {"code": code, "out": printed.read_text(), "selections": selections, "times": times}


def _chosen() -> dict[str, str]:
    from vllm_fl.dispatch import get_default_manager

    return {op: s.chosen.variant for op, s in get_default_manager().selections().items() if s.chosen}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tune")


def environment_of(folder: Path, planted: str) -> dict[str, str]:
    (folder / "planted.py").write_text(planted)
    return {
        "PYTHONPATH": str(folder),
        "VLLM_FL_PLUGIN_MODULES": "planted",
        "VLLM_FL_PREFER": "vendor",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def tuned(fresh: Fresh, tiny_llama: TinyModel, folder: Path) -> dict[str, Any]:
    env = {**environment_of(folder, PLANTED), "VLLM_FL_PER_OP": "rotary_embedding=vendor:paced"}
    outcome = fresh(tune_and_use, model=str(tiny_llama.path), folder=str(folder), env=env)
    log = folder / "vllm-fl-tune" / "vllm.log"
    assert outcome.value["code"] == 0, outcome.log + outcome.value["out"] + log.read_text()
    return {**outcome.value, "document": json.loads(outcome.value["out"])}


def test_the_slow_ones_are_replaced_and_the_gain_is_certain(tuned: dict[str, Any]) -> None:
    document = tuned["document"]
    assert document["baseline"]["silu_and_mul"] == document["baseline"]["rms_norm"] == "vendor.slow"
    assert document["changed"].keys() >= {"silu_and_mul", "rms_norm"}
    assert document["stop"] == "nothing left to try"
    assert document["ratio"]["low"] > 1.0


def test_a_parameter_goes_to_its_best_value(tuned: dict[str, Any]) -> None:
    assert tuned["document"]["baseline"]["rotary_embedding"] == "vendor.paced"
    assert tuned["document"]["changed"]["rotary_embedding"] == "vendor.paced(pause_ms=0)"


def test_the_wrong_and_the_crashing_one_are_refused_with_their_reasons(tuned: dict[str, Any]) -> None:
    failed = {next(iter(t["changed"].items())): t for t in tuned["document"]["trials"] if t["outcome"] == "failed"}
    assert failed.keys() == {("silu_and_mul", "vendor.raising"), ("rms_norm", "vendor.wrong")}
    assert failed["silu_and_mul", "vendor.raising"]["reason"] == "crash"
    assert failed["rms_norm", "vendor.wrong"]["reason"] == "inaccurate"
    assert tuned["document"]["engine_starts"] == 2


@pytest.mark.parametrize("how", ["file", "table"])
def test_what_was_written_selects_the_mix(tuned: dict[str, Any], how: str) -> None:
    mix = tuned["document"]["mix"]
    assert {operator: tuned["selections"][how][operator] for operator in mix} == mix


def test_vllm_gives_the_times_of_a_request(tuned: dict[str, Any]) -> None:
    ttft_s, tpot_s, tokens = tuned["times"]
    assert ttft_s > 0.0
    assert tpot_s > 0.0
    assert tokens == 4


def test_the_page_shows_every_trial(tuned: dict[str, Any], folder: Path) -> None:
    page = (folder / "vllm-fl-tune" / "tune.html").read_text()
    assert page.count("<circle") == len(tuned["document"]["trials"])
    assert "rms_norm=vendor.wrong" in page


def test_an_engine_with_torch_compile_is_traced_anew(fresh: Fresh, tiny_llama: TinyModel, tmp_path: Path) -> None:
    env = environment_of(tmp_path, PLANTED_COMPILED)
    outcome = fresh(tune_compiled, model=str(tiny_llama.path), folder=str(tmp_path), env=env)
    log = tmp_path / "vllm-fl-tune" / "vllm.log"
    assert outcome.value["code"] == 0, outcome.log + outcome.value["out"] + log.read_text()
    document = json.loads(outcome.value["out"])
    assert document["baseline"]["silu_and_mul"] == document["baseline"]["rms_norm"] == "vendor.slow"
    assert document["changed"].keys() >= {"silu_and_mul", "rms_norm"}
    assert [trial["reason"] for trial in document["trials"] if trial["reason"]] == []
    assert document["ratio"]["low"] > 1.0
    assert document["engine_starts"] == 1
