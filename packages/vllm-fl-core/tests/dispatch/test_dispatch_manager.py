"""The manager: binding, resolution, what is asked how often, and the default manager."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from dispatch_helpers import flagos, manager_of, reference, silu, vendor

from vllm_fl.catalog import CATALOG
from vllm_fl.dispatch import (
    BoundOp,
    OpManager,
    SelectionPolicy,
    bind,
    call_op,
    get_default_manager,
    reset_default_manager,
    resolve_op,
    set_global_policy,
)
from vllm_fl.dispatch.default import adopt_default_manager
from vllm_fl.errors import NoImplementationError, UnknownOperatorError


def test_the_three_ways_to_call(default: Callable[..., OpManager]) -> None:
    implementation = silu("served")
    manager = default(reference("silu_and_mul", implementation))
    bound = bind("silu_and_mul")
    assert call_op("silu_and_mul", 1) == call_op("silu_and_mul", x=1) == "served"
    assert bound(1) == bound(x=1) == bound.fn(1) == bound.fn(x=1) == "served"
    assert manager.call("silu_and_mul", 1) == "served"
    assert resolve_op("silu_and_mul") is manager.resolve("silu_and_mul") is implementation
    assert repr(bound) == "<BoundOp silu_and_mul>"


def test_after_the_first_call_the_bound_function_is_final(default: Callable[..., OpManager]) -> None:
    default(reference("silu_and_mul", silu(0)))
    bound = bind("silu_and_mul")
    before = bound.fn
    bound(1)
    after = bound.fn
    assert after is not before
    bound(1)
    call_op("silu_and_mul", 1)
    assert bound.fn is after


def test_resolution_looks_at_nothing_again(monkeypatch: pytest.MonkeyPatch, default: Callable[..., OpManager]) -> None:
    """The call path reads no environment, policy, context variable or registry and takes no lock."""
    manager = default(reference("silu_and_mul", silu("served")))
    bound = bind("silu_and_mul")
    bound(1)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("asked on the call path")

    with monkeypatch.context() as patch:
        patch.setattr(manager, "_lock", None)
        patch.setattr(manager, "_policies", None)
        patch.setattr(manager, "registry", None)
        patch.setattr("os.environ", None)
        patch.setattr("vllm_fl.dispatch.policy._override", None)
        for name in ("find", "look", "selection", "ensure_initialized"):
            patch.setattr(manager, name, forbidden)
        answers = [bound(1), bound.fn(1), call_op("silu_and_mul", 1), manager.call("silu_and_mul", 1)]
    assert answers == ["served"] * 4


def test_probes_are_asked_once_per_registry_generation() -> None:
    asked = []

    class Acme:
        def is_available(self) -> bool:
            asked.append(1)
            return True

        def silu_and_mul(self, x: Any) -> Any:
            return x

        def rms_norm(self, x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
            return x

    acme = Acme()
    manager = manager_of(vendor("acme", "silu_and_mul", acme.silu_and_mul), vendor("acme", "rms_norm", acme.rms_norm))
    for _ in range(3):
        manager.call("silu_and_mul", 1)
        manager.call("rms_norm", 1, None, None, 0.0)
        manager.selections()
        manager.bump_policy_epoch()
    assert len(asked) == 1
    manager.registry.register_impl(reference("silu_and_mul", silu(0)))
    manager.call("silu_and_mul", 1)
    assert len(asked) == 2


def test_later_registration_is_seen_everywhere() -> None:
    manager = manager_of(reference("silu_and_mul", silu("reference")))
    bound = manager.bind("silu_and_mul")
    assert bound(1) == "reference"
    better = silu("flagos")
    manager.registry.register_impl(flagos("silu_and_mul", better))
    assert bound(1) == manager.call("silu_and_mul", 1) == "flagos"
    assert manager.resolve("silu_and_mul") is better
    assert manager.get_selected_impl_id("silu_and_mul") == "default.flagos"
    assert [impl.impl_id for impl in manager.resolve_candidates("silu_and_mul")] == [
        "default.flagos",
        "reference.torch",
    ]


def test_two_implementations_that_share_a_function_keep_their_ids() -> None:
    shared = silu(0)
    manager = manager_of(vendor("a", "silu_and_mul", shared), vendor("b", "silu_and_mul", shared, priority=200))
    assert manager.get_selected_impl_id("silu_and_mul") == "vendor.b"


def test_policy_change_rebinds() -> None:
    manager = manager_of(vendor("acme", "silu_and_mul", silu("acme")), reference("silu_and_mul", silu("reference")))
    bound = manager.bind("silu_and_mul")
    assert bound(1) == "acme"
    set_global_policy(SelectionPolicy(prefer="reference"))
    assert bound(1) == manager.call("silu_and_mul", 1) == "reference"
    epoch = manager.policy_epoch
    assert manager.bump_policy_epoch() == manager.policy_epoch == epoch + 1
    assert bound(1) == "reference"


def test_call_of_an_unknown_operator() -> None:
    manager = manager_of(reference("silu_and_mul", silu(0)))
    adopt_default_manager(manager)
    for call in (call_op, manager.call, lambda name, x: bind(name)(x)):
        with pytest.raises(UnknownOperatorError) as caught:
            call("rms_nrom", 1)
        assert str(caught.value) == (
            "operator 'rms_nrom' is neither in the catalogue nor registered; did you mean 'rms_norm'?"
        )
        assert isinstance(caught.value, LookupError)


def test_operator_without_implementation() -> None:
    with pytest.raises(NoImplementationError) as caught:
        manager_of().call("moe_sum", 1, 2)
    assert str(caught.value) == (
        "no implementation of moe_sum is registered; install a distribution that has one: vllm-fl-reference has every"
        " operator of the catalogue"
    )


def test_no_implementation_left() -> None:
    acme = vendor("acme", "silu_and_mul", silu(0))
    acme.fn._is_available = lambda: False  # type: ignore[attr-defined]
    manager = manager_of(acme, reference("silu_and_mul", silu(0)))
    set_global_policy(SelectionPolicy(per_op_order=(("silu_and_mul", ("vendor:acme",)),)))
    for ask in (manager.bind("silu_and_mul"), lambda x: manager.resolve("silu_and_mul")):
        with pytest.raises(NoImplementationError) as caught:
            ask(1)
        assert str(caught.value) == (
            "no implementation of silu_and_mul is left:\n"
            "silu_and_mul(x): no implementation\n"
            "  - vendor.acme      rejected: not available: its availability check says no\n"
            "  - reference.torch  rejected: no token of vendor:acme matches (set by code)\n"
            "change the settings named above, or install a backend that this machine can run"
        )
    assert not manager.selection("silu_and_mul").accepted


def test_an_operator_that_had_none_gets_one() -> None:
    manager = manager_of()
    bound = manager.bind("silu_and_mul")
    with pytest.raises(NoImplementationError):
        bound(1)
    manager.registry.register_impl(reference("silu_and_mul", silu("served")))
    assert bound(1) == "served"


def test_selections_name_every_operator() -> None:
    manager = manager_of(reference("silu_and_mul", silu(0)))
    selections = manager.selections()
    assert list(selections) == sorted(CATALOG)
    chosen = selections["silu_and_mul"].chosen
    assert chosen is not None
    assert chosen.impl.impl_id == "reference.torch"
    assert selections["rms_norm"].candidates == ()


def test_fingerprint_is_that_of_the_selection() -> None:
    def make(*impls: Any) -> str:
        return manager_of(*impls).fingerprint()

    ours, theirs = reference("silu_and_mul", silu(0)), vendor("acme", "silu_and_mul", silu(1))
    assert make(ours, theirs) == make(theirs, ours) == make(reference("silu_and_mul", silu(5)), theirs)
    opaque = vendor("acme", "silu_and_mul", silu(1), opaque=True)
    assert len({make(), make(ours), make(theirs), make(ours, theirs), make(opaque)}) == 5
    before = make(ours, theirs)
    set_global_policy(SelectionPolicy(prefer="reference"))
    assert make(ours, theirs) != before


def test_counting() -> None:
    manager = manager_of(vendor("acme", "silu_and_mul", silu(0)), reference("moe_sum", lambda input, output: None))
    bound = manager.bind("silu_and_mul")
    bound(1)
    assert manager.call_counts() == {}
    manager.count_calls()
    bound(1)
    bound.fn(1)
    manager.call("moe_sum", 1, 2)
    assert manager.call_counts() == {("silu_and_mul", "vendor.acme"): 2, ("moe_sum", "reference.torch"): 1}
    manager.count_calls(False)
    bound(1)
    assert manager.call_counts()["silu_and_mul", "vendor.acme"] == 2
    assert "hook" not in str(manager.bind("silu_and_mul").fn.__code__.co_freevars)
    manager.count_calls(True)
    assert manager.call_counts() == {}


def test_counting_names_who_served() -> None:
    manager = manager_of(
        vendor("acme", "silu_and_mul", silu(NotImplementedError())), reference("silu_and_mul", silu(0))
    )
    manager.count_calls()
    manager.call("silu_and_mul", 1)
    manager.call("silu_and_mul", 1)
    assert manager.call_counts() == {("silu_and_mul", "reference.torch"): 2}


def test_bound_operators_are_shared_and_survive_copies() -> None:
    manager = manager_of(reference("silu_and_mul", silu(0)))
    bound = manager.bind("silu_and_mul")
    assert manager.bind("silu_and_mul") is bound
    assert copy.copy(bound) is copy.deepcopy(bound) is bound
    with pytest.raises(TypeError) as caught:
        pickle.dumps(bound)
    assert (
        str(caught.value) == "<BoundOp silu_and_mul> belongs to a manager of this process; pickle the operator's name"
    )


def test_bound_operators_of_the_default_manager_outlive_it(default: Callable[..., OpManager]) -> None:
    early = bind("silu_and_mul")
    default(reference("silu_and_mul", silu("first")))
    assert early(1) == call_op("silu_and_mul", 1) == "first"
    default(reference("silu_and_mul", silu("second")))
    assert early(1) == call_op("silu_and_mul", 1) == "second"
    assert pickle.loads(pickle.dumps(early)) is early is get_default_manager().bind("silu_and_mul")
    reset_default_manager()
    with pytest.raises(NoImplementationError):
        early(1)


def test_a_used_manager_cannot_become_the_default_one() -> None:
    manager = manager_of(reference("silu_and_mul", silu(0)))
    manager.call("silu_and_mul", 1)
    with pytest.raises(ValueError) as caught:
        adopt_default_manager(manager)
    assert str(caught.value) == "a manager that has been used cannot become the default one"


def test_default_manager_is_one() -> None:
    first = get_default_manager()
    assert get_default_manager() is first
    reset_default_manager()
    assert get_default_manager() is not first


def test_managers_are_collected() -> None:
    """Neither the fork hook nor the policy keeps a manager alive."""
    manager = manager_of(
        vendor("acme", "silu_and_mul", silu(NotImplementedError())), reference("silu_and_mul", silu(0))
    )
    manager.call("silu_and_mul", 1)
    gone = [weakref.ref(manager), weakref.ref(manager.registry)]
    del manager
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_bound_operator_keeps_its_manager() -> None:
    bound = manager_of(reference("silu_and_mul", silu("served"))).bind("silu_and_mul")
    gc.collect()
    assert isinstance(bound, BoundOp)
    assert bound(1) == "served"
    gc.collect()
    set_global_policy(SelectionPolicy(prefer="vendor"))
    assert bound(1) == "served"


def test_initialisation_is_done_again_after_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def flaky(manager: OpManager) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("disk asleep")
        manager.registry.register_impl(reference("silu_and_mul", silu("served")))

    monkeypatch.setattr("vllm_fl.dispatch.manager.register_everything", flaky)
    manager = OpManager()
    with pytest.raises(OSError, match="disk asleep"):
        manager.call("silu_and_mul", 1)
    assert manager.call("silu_and_mul", 1) == "served"
    manager.ensure_initialized()
    assert len(calls) == 2


def test_plug_in_may_dispatch_while_it_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []

    def register(manager: OpManager) -> None:
        manager.registry.register_impl(reference("silu_and_mul", silu("served")))
        answers.append(manager.call("silu_and_mul", 1))

    monkeypatch.setattr("vllm_fl.dispatch.manager.register_everything", register)
    assert OpManager().call("silu_and_mul", 1) == "served"
    assert answers == ["served"]
