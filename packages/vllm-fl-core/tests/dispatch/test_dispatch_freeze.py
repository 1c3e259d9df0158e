"""After compilation or capture the selection may not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dispatch_helpers import manager_of, reference, silu, vendor

from vllm_fl.dispatch import (
    OpManager,
    SelectionPolicy,
    freeze_dispatch,
    get_frozen_dispatch_manifest,
    get_policy,
    is_dispatch_frozen,
    policy_context,
    reset_global_policy,
    set_global_policy,
    thaw_dispatch,
)
from vllm_fl.dispatch.policy import bump_policy_epoch
from vllm_fl.errors import FrozenError, NoImplementationError

REASON = "vLLM has compiled the model with it"


def enter(policy: SelectionPolicy) -> None:
    with policy_context(policy):
        raise AssertionError("entered")


@pytest.mark.parametrize(
    ("action", "change"),
    [
        ("set_global_policy", lambda: set_global_policy(SelectionPolicy(strict=True))),
        ("reset_global_policy", reset_global_policy),
        ("bump_policy_epoch", bump_policy_epoch),
        ("policy_context", lambda: enter(SelectionPolicy(strict=True))),
    ],
)
def test_policy_changes_raise(action: str, change: Callable[[], Any]) -> None:
    manager = manager_of(reference("silu_and_mul", silu("reference")))
    manager.freeze(REASON)
    manager.freeze("something else")
    assert manager.frozen == REASON
    try:
        with pytest.raises(FrozenError) as caught:
            change()
        assert str(caught.value) == (
            f"{action}: the selection is frozen because {REASON}; change the policy before that, or call thaw() on the"
            " manager and compile again"
        )
        assert isinstance(caught.value, RuntimeError)
        assert not get_policy().strict
    finally:
        manager.thaw()
    change_after = SelectionPolicy(strict=True)
    set_global_policy(change_after)
    assert get_policy() is change_after


def test_registration_raises() -> None:
    manager = manager_of(reference("silu_and_mul", silu("reference")))
    manager.freeze(REASON)
    with pytest.raises(FrozenError) as caught:
        manager.registry.register_impl(vendor("acme", "silu_and_mul", silu("acme")))
    assert str(caught.value) == (
        f"nothing can be registered: the selection is frozen because {REASON}; register before that, or call thaw() on"
        " the manager and compile again"
    )
    assert manager.call("silu_and_mul", 1) == "reference"
    manager.thaw()
    manager.registry.register_impl(vendor("acme", "silu_and_mul", silu("acme")))
    assert manager.call("silu_and_mul", 1) == "acme"


def test_frozen_managers_still_resolve_and_fall_back() -> None:
    manager = manager_of(
        vendor("acme", "silu_and_mul", silu(ValueError("bad"))), reference("silu_and_mul", silu("reference"))
    )
    manager.freeze(REASON)
    assert manager.call("silu_and_mul", 1) == "reference"
    assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.acme"}}
    manager.thaw()


def test_names_of_the_peer(default: Callable[..., OpManager]) -> None:
    manager = default(reference("silu_and_mul", silu(0)), vendor("acme", "moe_sum", lambda input, output: None))
    assert not is_dispatch_frozen()
    assert get_frozen_dispatch_manifest() is None
    manifest = freeze_dispatch()
    assert manifest.selections == {"moe_sum": "vendor.acme", "silu_and_mul": "reference.torch"}
    assert manifest.unresolved == ()
    assert manifest.fingerprint == manager.fingerprint()
    assert manifest.policy_fingerprint == get_policy().fingerprint()
    assert is_dispatch_frozen()
    assert get_frozen_dispatch_manifest() is manifest
    with pytest.raises(RuntimeError, match="the selection is frozen because freeze_dispatch"):
        set_global_policy(SelectionPolicy())
    thaw_dispatch()
    assert not is_dispatch_frozen()
    set_global_policy(SelectionPolicy())


def test_operators_that_cannot_be_frozen(default: Callable[..., OpManager]) -> None:
    default(reference("silu_and_mul", silu(0)))
    with pytest.raises(NoImplementationError):
        freeze_dispatch(["silu_and_mul", "rms_norm"])
    assert not is_dispatch_frozen()
    assert freeze_dispatch(["silu_and_mul", "rms_norm"], strict=False).unresolved == ("rms_norm",)
    thaw_dispatch()
