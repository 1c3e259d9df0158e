"""Policies that a command line names, and the workloads of the tools."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from vllm_fl.catalog import CATALOG
from vllm_fl.config import get_settings
from vllm_fl.dispatch import SelectionPolicy, get_policy, reset_global_policy
from vllm_fl.engines import Engine, Workload
from vllm_fl.errors import CommandError, ConfigError, Exit
from vllm_fl.flagos.aten import asked_for
from vllm_fl.policies import environment_of, from_plain, parse_policies, parse_policy, to_plain

pytest.importorskip("vllm_fl_reference", reason="a policy names its implementations")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, no_settings: None, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_present_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", "rms_norm=reference")
    reset_global_policy()
    assert parse_policy("present", "--a") == get_policy()
    vendor = parse_policy("vendor", "--a")
    assert (vendor.prefer, vendor.per_op_order) == ("vendor", (("rms_norm", ("reference",)),))
    assert vendor.origin("prefer") == "--a"


def test_orders_are_added_to_the_present_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", "rms_norm=reference;moe_sum=flagos")
    reset_global_policy()
    policy = parse_policy("rms_norm=flagos|reference;silu_and_mul=impl:reference.torch", "--against")
    assert policy.per_op_order_dict == {
        "moe_sum": ["flagos"],
        "rms_norm": ["flagos", "reference"],
        "silu_and_mul": ["impl:reference.torch"],
    }


def test_a_file_stands_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", "rms_norm=reference")
    reset_global_policy()
    Path("my.yaml").write_text("prefer: reference\nstrict: yes\n")
    policy = parse_policy("my.yaml", "--a")
    assert (policy.prefer, policy.strict, policy.per_op_order) == ("reference", True, ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "vender",
            "--a: 'vender' is not a policy (a YAML file, 'present', 'flagos', 'vendor', 'reference', or "
            "'op=token|token;op=token'); did you mean 'vendor'?",
        ),
        ("rmsnorm=vendor", "--a: op_backends: unknown operator 'rmsnorm' ("),
        ("rms_norm=vendr", "--a: rms_norm: 'vendr' is not a token ("),
        ("rms_norm=impl:reference.troch", "did you mean 'reference.torch'?"),
        ("rms_norm", "--a: 'rms_norm' is not a policy ("),
        ("nowhere.yaml", "--a: file 'nowhere.yaml' does not exist; "),
        ("broken.yaml", "broken.yaml:1:9: prefer: 'flaggems' is not one of"),
        ("unknown.yaml", "unknown.yaml:1:15: op_backends: unknown operator 'rmsnorm' ("),
    ],
)
def test_no_policy(text: str, message: str) -> None:
    Path("broken.yaml").write_text("prefer: flaggems\n")
    Path("unknown.yaml").write_text("op_backends: {rmsnorm: vendor}\n")
    with pytest.raises(ConfigError) as caught:
        parse_policy(text, "--a")
    assert message in str(caught.value)


POLICIES = {
    "default": SelectionPolicy(),
    "everything": SelectionPolicy(
        prefer="vendor",
        strict=True,
        per_op_order=(("moe_sum", ("reference", "flagos")), ("rms_norm", ("impl:reference.torch",))),
        deny_vendors=frozenset({"acme"}),
        allow_vendors=frozenset({"nvidia", "ascend"}),
        flagos_blacklist=frozenset({"moe_sum"}),
    ),
    "restrictions": SelectionPolicy(
        allow_vendors=frozenset(), flagos_enabled=False, flagos_whitelist=frozenset({"rms_norm"})
    ),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_survive_the_way_to_other_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = POLICIES[name]
    assert from_plain(to_plain(policy)) == policy
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "metax")
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    reset_global_policy()
    before = get_policy()
    with environment_of(policy):
        assert get_policy() == policy
        path = Path(os.environ["VLLM_FL_CONFIG"])
    assert get_policy() == before
    assert "VLLM_FL_CONFIG" not in os.environ
    assert not path.exists()


def test_a_policy_does_not_ask_for_flaggems_in_place_of_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, asked in ((None, False), ("0", False), ("1", True)):
        if variable is not None:
            monkeypatch.setenv("USE_FLAGGEMS", variable)
        reset_global_policy()
        with environment_of(SelectionPolicy(prefer="reference")):
            assert get_policy().flagos_enabled
            assert asked_for(get_settings())[0] is asked
    with environment_of(SelectionPolicy(flagos_enabled=False)):
        assert not get_policy().flagos_enabled


def test_nothing_of_other_layers_shows_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PER_OP", "rms_norm=reference;moe_sum=vendor")
    monkeypatch.setenv("VLLM_FL_TUNED", "auto")
    reset_global_policy()
    with environment_of(SelectionPolicy(prefer="flagos", per_op_order=(("moe_sum", ("reference",)),))):
        orders = get_policy().per_op_order_dict
        assert orders == {"moe_sum": ["reference"], "rms_norm": SelectionPolicy(prefer="flagos").get_default_order()}
        assert "VLLM_FL_TUNED" not in os.environ
    assert os.environ["VLLM_FL_TUNED"] == "auto"
    with environment_of(get_policy()):
        assert os.environ["VLLM_FL_TUNED"] == "auto"


@pytest.mark.parametrize("text", ["present", "vendor"])
def test_what_is_tuned_model_by_model_cannot_be_compared(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_TUNED", "auto")
    with pytest.raises(ConfigError, match=f"^--b {text}: VLLM_FL_TUNED is set, "):
        parse_policies(a="rms_norm=reference", b=text)


def test_the_rest_of_the_users_file_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.yaml").write_text("log_level: DEBUG\nprefer: vendor\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", "mine.yaml")
    reset_global_policy()
    with environment_of(SelectionPolicy(prefer="reference")):
        assert (get_settings().log_level, get_policy().prefer) == ("DEBUG", "reference")
        assert yaml.safe_load(Path(os.environ["VLLM_FL_CONFIG"]).read_text())["log_level"] == "DEBUG"
    assert os.environ["VLLM_FL_CONFIG"] == "mine.yaml"
    assert get_policy().prefer == "vendor"


def test_an_order_may_be_longer_than_the_name_of_a_file() -> None:
    text = ";".join(f"{name}=reference" for name in CATALOG)
    assert len(text) > 255
    assert set(parse_policy(text, "--a").per_op_order_dict) == set(CATALOG)


def test_an_extension_of_the_user_is_refused() -> None:
    with pytest.raises(CommandError) as caught:
        Engine({"model": "some/model", "worker_extension_cls": "a.B"}, "c.D")
    assert caught.value.code == Exit.USAGE
    assert caught.value.message == "The workers have an extension already."


def test_workloads_repeat_and_differ() -> None:
    work = Workload(3, 5, 7, seed=1)
    prompts = work.prompts(1000)
    assert prompts == work.prompts(1000)
    assert prompts != work.prompts(1000, variant=1)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert {token for prompt in prompts for token in prompt} <= set(range(100, 1000))
    assert max(max(prompt) for prompt in work.prompts(8)) < 8
    assert str(work) == "3 requests, 5 tokens in, 7 out"
