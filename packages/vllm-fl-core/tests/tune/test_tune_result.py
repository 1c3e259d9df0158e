"""The policy file, the page, the table, and the arguments of the command."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.cli import main
from vllm_fl.config import ENVIRONMENT, load_file, reset_settings
from vllm_fl.dispatch import (
    BackendImplKind,
    OpImpl,
    Parameter,
    ParameterPath,
    get_default_manager,
    get_policy,
    reset_default_manager,
    reset_global_policy,
)
from vllm_fl.errors import ConfigError
from vllm_fl.tune import (
    Entry,
    Found,
    History,
    Operator,
    SearchSpace,
    Trial,
    TuneReport,
    look_up,
    store,
    table,
    use_tuned,
)
from vllm_fl.tune.sequential import Comparison

SPACE = SearchSpace((Operator("rms_norm", ("vendor.slow", "vendor.fast"), 0.3),))
KEY: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "shape": {"hidden_size": 64},
    "dtype": "bfloat16",
    "device": "a chip",
    "tensor_parallel_size": 1,
    "versions": {"vllm": "1.0", "triton": "3.0"},
}
ORDER = ["impl:vendor.fast", "impl:vendor.slow"]


BLOCK = ParameterPath("rms_norm", "vendor.fast", "block")
PLACE = "the table of VLLM_FL_TUNED"


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float, *, block: int = 64) -> Any:
    raise AssertionError("nothing is computed here")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    for name in list(os.environ):
        if name in ENVIRONMENT:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(table, "key_of", lambda _: KEY)
    manager = reset_default_manager() or get_default_manager()
    manager.ensure_initialized()
    for name, parameters in (("slow", ()), ("fast", (Parameter("block", (64, 128, 256), 64),))):
        fields: dict[str, Any] = {"vendor": name, "parameters": parameters}
        manager.registry.register_impl(OpImpl("rms_norm", f"vendor.{name}", BackendImplKind.VENDOR, rms_norm, **fields))
    reset_global_policy()
    yield
    monkeypatch.undo()
    reset_settings()
    reset_global_policy()
    reset_default_manager()


def report(trials: tuple[Trial, ...] = (), rejected: Any = None, layers: tuple[str, ...] = ()) -> TuneReport:
    mix = {"rms_norm": "vendor.fast(block=128)"}
    found = Found(mix, Comparison("better", 0.1, 0.05, 0.15, 30), "trials", History(SPACE, trials), rejected, 12.0)
    policy = get_policy().derive("test", per_op_order=(("rms_norm", tuple(ORDER)),), parameters=((BLOCK, "128"),))
    return TuneReport("m", "throughput", "8 requests", 0.95, SPACE, found, policy, {"rms_norm": 1.0}, KEY, 1, layers)


def test_the_policy_file_is_a_configuration_with_the_same_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("comm_timeout: 5\nprefer: vendor\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(own))
    reset_global_policy()
    path = tmp_path / "policy.yaml"
    path.write_text(report().policy_file())
    settings = load_file(path)
    assert settings.policy() == report().policy
    assert settings.parameters == {BLOCK: "128"}
    assert settings.comm_timeout == 5.0
    assert settings.prefer == "vendor"


def test_the_page_needs_nothing_else() -> None:
    failed = Trial(1, {"rms_norm": "vendor.fast"}, SPACE.baseline, "failed", reason="crash", text="<planted>")
    page = report((failed,)).page()
    assert "crash: &lt;planted&gt;" in page
    assert "1.105" in page
    assert "http" not in page
    assert "<script" not in page


def test_the_report_says_what_is_doubtful() -> None:
    slower = Trial(1, {"rms_norm": "vendor.fast"}, SPACE.baseline, "better", 0.1, drift=0.3)
    assert report((slower,), rejected={"rms_norm": "vendor.slow"}, layers=("fused_moe", "gated_delta_net")).remarks == [
        "The trials found a better mix that the last comparison did not confirm: the baseline stays.",
        "The machine's speed changed by up to 35% between trials; within a trial that cancels.",
        "In a new engine layers of vLLM's own serve fused_moe, gated_delta_net; the ratio was measured with ours.",
    ]
    assert json.loads(json.dumps(report((slower,)).as_dict()))["trials"][0]["changed"] == {"rms_norm": "vendor.fast"}


def entry(parameters: dict[str, Any] | None = None, **changed: Any) -> Entry:
    return Entry({**KEY, **changed}, {"rms_norm": ORDER}, 1.1, parameters or {})


def test_the_table_keeps_orders_and_parameters() -> None:
    kept = report().entry()
    assert kept == Entry(KEY, {"rms_norm": ORDER}, kept.ratio, {"rms_norm": {"vendor.fast": {"block": 128}}})
    assert kept.ratio == pytest.approx(1.105, abs=1e-3)
    store(kept)
    assert look_up(KEY) == (kept, [])


def test_the_nearest_entry_is_taken_and_its_differences_told() -> None:
    store(entry(tensor_parallel_size=2, versions={"vllm": "0.9"}))
    store(entry(dtype="float32"))
    found = look_up(KEY)
    assert found is not None
    assert found[1] == [
        "tensor_parallel_size 2 there, 1 here",
        "triton absent there, 3.0 here",
        "vllm 0.9 there, 1.0 here",
    ]
    store(entry())
    assert look_up(KEY) == (entry(), [])


@pytest.mark.parametrize("name", ["architecture", "shape", "dtype", "device"])
def test_an_entry_of_something_else_is_not_taken(name: str) -> None:
    store(entry({}, **{name: "other"}))
    assert look_up(KEY) is None


def test_the_table_is_asked_only_if_wanted() -> None:
    store(entry())
    use_tuned(None)
    assert get_policy().per_op_order == ()


def test_auto_selects_by_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    store(entry())
    monkeypatch.setenv("VLLM_FL_TUNED", "auto")
    use_tuned(None)
    assert get_policy().get_per_op_order("rms_norm") == ORDER
    assert get_policy().origin("op_backends.rms_norm") == PLACE


def test_another_model_does_not_inherit_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    store(entry(PARAMETERS))
    monkeypatch.setenv("VLLM_FL_TUNED", "auto")
    before = get_policy()
    use_tuned(None)
    monkeypatch.setattr(table, "key_of", lambda vllm_config: {**KEY, "architecture": "GemmaForCausalLM"})
    use_tuned(None)
    assert get_policy() == before


PARAMETERS: dict[str, Any] = {"rms_norm": {"vendor.fast": {"block": 128}}}


def test_auto_sets_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    store(entry(PARAMETERS))
    monkeypatch.setenv("VLLM_FL_TUNED", "auto")
    for _ in range(2):  # every worker of a process asks
        use_tuned(None)
        assert get_policy().parameters == ((BLOCK, "128"),)
        assert get_policy().origin(f"parameters.{BLOCK}") == PLACE


def test_a_parameter_that_the_user_sets_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store(entry(PARAMETERS))
    (tmp_path / "own.yaml").write_text("parameters: {rms_norm: {vendor.fast: {block: 256}}}\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(tmp_path / "own.yaml"))
    monkeypatch.setenv("VLLM_FL_TUNED", "auto")
    reset_global_policy()
    use_tuned(None)
    assert get_policy().parameters == ((BLOCK, "256"),)
    assert get_policy().get_per_op_order("rms_norm") == ORDER


def test_what_the_user_orders_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    store(entry())
    monkeypatch.setenv("VLLM_FL_TUNED", "auto")
    monkeypatch.setenv("VLLM_FL_PER_OP", "rms_norm=reference")
    reset_global_policy()
    use_tuned(None)
    assert get_policy().get_per_op_order("rms_norm") == ["reference"]


WARNINGS = [
    (
        {"versions": {"vllm": "0.9", "triton": "3.0"}},
        {"rms_norm": ORDER},
        "VLLM_FL_TUNED: tuned for something else: vllm 0.9 there, 1.0 here; tune again",
    ),
    (
        {},
        {"rms_norm": ["impl:gone", *ORDER]},
        "VLLM_FL_TUNED: impl:gone of operator rms_norm is not installed here; the operator is not tuned",
    ),
    (
        {"parameters": {"rms_norm": {"vendor.fast": {"block": 100}}}},
        {"rms_norm": ORDER},
        "VLLM_FL_TUNED: rms_norm.vendor.fast.block: '100' is not one of 64, 128, 256; it is not tuned",
    ),
    (
        {"device": "another chip"},
        {"rms_norm": ORDER},
        "VLLM_FL_TUNED: nothing was tuned for LlamaForCausalLM in bfloat16 on a chip; run `vllm-fl tune MODEL`",
    ),
]


@pytest.mark.parametrize(
    ("changed", "orders", "warning"), WARNINGS, ids=["versions", "implementation", "parameter", "device"]
)
def test_what_does_not_fit_draws_a_warning(
    changed: dict[str, Any], orders: dict[str, list[str]], warning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = changed.get("parameters", {})
    changed = {name: value for name, value in changed.items() if name != "parameters"}
    store(Entry({**KEY, **changed}, orders, 1.1, parameters))
    monkeypatch.setenv("VLLM_FL_TUNED", "auto")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(table.get_logger(table.__name__), "handlers", [handler])
    use_tuned(None)
    assert said == [warning]


def test_the_variable_has_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_TUNED", "atuo")
    with pytest.raises(ConfigError) as caught:
        use_tuned(None)
    assert str(caught.value) == (
        "environment variable VLLM_FL_TUNED: 'atuo' is not 'auto', its only value; did you mean 'auto'?"
    )


def test_a_broken_entry_is_an_error_that_names_it() -> None:
    path = store(entry())
    path.write_text("{}")
    with pytest.raises(ConfigError) as caught:
        look_up(KEY)
    assert str(caught.value) == f"{path} is no entry of the table of VLLM_FL_TUNED ('key'); remove it"


@pytest.mark.parametrize(
    ("arguments", "error", "remedy"),
    [
        (["--budget", "soon"], "--budget: 'soon' is not a time.", "Write 90s, 20m or 1h."),
        (["--budget", "0m"], "--budget: '0m' is not a time.", "Write 90s, 20m or 1h."),
        (
            ["--objective", "troughput"],
            "--objective: 'troughput' is not one of throughput, ttft, tpot, goodput; did you mean 'throughput'?",
            "",
        ),
        (["--sampler", "cmaes"], "--sampler: 'cmaes' is not one of auto, greedy, tpe, gp", ""),
    ],
)
def test_wrong_arguments(
    arguments: list[str], error: str, remedy: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["tune", "quickstart", *arguments, "--out", str(tmp_path / "out"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {"error": error, "remedy": remedy, "log": None, "exit_code": 2}
    assert not (tmp_path / "out").exists()
