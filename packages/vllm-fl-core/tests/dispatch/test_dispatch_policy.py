"""The policy: its own checks, where it comes from, what changes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_fl.dispatch import (
    SelectionPolicy,
    get_policy,
    policy_context,
    policy_from_config,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from vllm_fl.dispatch.policy import VALID_PREFER_VALUES, bump_policy_epoch, get_policy_epoch, policy_from_env
from vllm_fl.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prefer": "flaggems"},
            "prefer: 'flaggems' is not a kind (flagos, vendor, reference); did you mean 'flagos'?",
        ),
        (
            {"per_op_order": (("rms_norm", ("vendorr:cuda",)),)},
            "per_op_order of rms_norm: 'vendorr:cuda' is not a token (flagos, reference, vendor, vendor:NAME, impl:ID);"
            " did you mean 'vendor:cuda'?",
        ),
        (
            {"per_op_order": (("rms_norm", ("vendor",)), ("rms_norm", ("flagos",)))},
            "per_op_order names the operator 'rms_norm' twice; give one order",
        ),
    ],
    ids=["prefer", "token", "twice"],
)
def test_wrong_policy(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SelectionPolicy(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("prefer", "order"),
    [
        ("flagos", ["flagos", "vendor", "reference"]),
        ("vendor", ["vendor", "flagos", "reference"]),
        ("reference", ["reference", "flagos", "vendor"]),
    ],
)
def test_default_order(prefer: str, order: list[str]) -> None:
    assert SelectionPolicy(prefer=prefer).get_default_order() == order
    assert prefer in VALID_PREFER_VALUES


def test_from_dict() -> None:
    policy = SelectionPolicy.from_dict(
        prefer="vendor", strict=True, per_op_order={"rms_norm": ["vendor:a"]}, deny_vendors={"b"}, allow_vendors=set()
    )
    assert policy.get_per_op_order("rms_norm") == ["vendor:a"]
    assert policy.get_per_op_order("moe_sum") is None
    assert policy.per_op_order_dict == {"rms_norm": ["vendor:a"]}
    assert not policy.is_vendor_allowed("a"), "an empty allow-list allows nobody"
    assert SelectionPolicy.from_dict().is_vendor_allowed("a")


def test_fingerprint_and_equality_leave_origins_out() -> None:
    plain, told = SelectionPolicy(), SelectionPolicy(origins={"prefer": "my.yaml:1:1"})
    assert plain == told
    assert hash(plain) == hash(told)
    assert plain.fingerprint() == told.fingerprint()
    changed = [
        SelectionPolicy(prefer="vendor"),
        SelectionPolicy(strict=True),
        SelectionPolicy(per_op_order=(("rms_norm", ("vendor",)),)),
        SelectionPolicy(deny_vendors=frozenset({"a"})),
        SelectionPolicy(allow_vendors=frozenset({"a"})),
        SelectionPolicy(allow_vendors=frozenset()),
        SelectionPolicy(flagos_enabled=False),
        SelectionPolicy(flagos_whitelist=frozenset()),
        SelectionPolicy(flagos_blacklist=frozenset({"rms_norm"})),
    ]
    assert len({policy.fingerprint() for policy in [plain, *changed]}) == len(changed) + 1


def test_global_policy_goes_before_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    reset_global_policy()
    assert get_policy().prefer == "vendor"
    assert get_policy().origin("prefer") == "environment variable VLLM_FL_PREFER"
    old = set_global_policy(SelectionPolicy(prefer="reference"))
    assert old.prefer == "vendor"
    assert get_policy().prefer == "reference"
    monkeypatch.setenv("VLLM_FL_PREFER", "flagos")
    reset_global_policy()
    assert get_policy().prefer == "flagos"


def test_wrong_environment_is_an_error_of_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_STRICT", "maybe")
    reset_global_policy()
    with pytest.raises(ConfigError, match="VLLM_FL_STRICT"):
        get_policy()


def test_policy_from_env_reads_now(monkeypatch: pytest.MonkeyPatch) -> None:
    assert policy_from_env().strict is False
    monkeypatch.setenv("VLLM_FL_STRICT", "1")
    assert policy_from_env().strict is True


def test_policy_from_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    path = tmp_path / "my.yaml"
    path.write_text("prefer: vendor\nop_backends:\n  rms_norm: [vendor:acme, reference]\n")
    policy = policy_from_config(path)
    assert policy.prefer == "vendor"
    assert policy.get_per_op_order("rms_norm") == ["vendor:acme", "reference"]
    assert policy.origin("prefer") == str(path)


def test_policy_from_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        policy_from_config(tmp_path / "nowhere.yaml")


def test_contexts_nest_and_end() -> None:
    with with_preference("vendor") as outer, with_denied_vendors("a"):
        assert outer.prefer == "vendor"
        with with_denied_vendors("b"), with_strict_mode(), with_allowed_vendors("c"):
            policy = get_policy()
            assert policy.prefer == "vendor"
            assert policy.deny_vendors == {"a", "b"}
            assert policy.strict
            assert policy.allow_vendors == {"c"}
            assert policy.origin("strict") == "with_strict_mode"
        assert get_policy().deny_vendors == {"a"}
    assert get_policy() == SelectionPolicy()


def test_context_ends_when_the_block_raises() -> None:
    with pytest.raises(KeyError), policy_context(SelectionPolicy(strict=True)):
        raise KeyError
    assert not get_policy().strict


@pytest.mark.parametrize(
    "use", [set_global_policy, lambda policy: policy_context(policy).__enter__()], ids=["set", "context"]
)
def test_not_a_policy(use: Any) -> None:
    with pytest.raises(TypeError) as caught:
        use("vendor")
    assert str(caught.value) == "expected a SelectionPolicy, got 'vendor'"


def test_epoch_counts_changes() -> None:
    start = get_policy_epoch()
    set_global_policy(SelectionPolicy(strict=True))
    reset_global_policy()
    assert bump_policy_epoch() == get_policy_epoch() == start + 3
