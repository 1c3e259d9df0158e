"""Registration: checked, all or nothing, invisible to others until it is done."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from dispatch_helpers import reference, silu, vendor

from vllm_fl.catalog import CATALOG, OpSpec
from vllm_fl.dispatch import OpImpl, OpRegistry
from vllm_fl.errors import RegistrationError


def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
    return x


def test_reading() -> None:
    registry = OpRegistry()
    first, second = vendor("a", "rms_norm", rms_norm), vendor("b", "rms_norm", rms_norm)
    registry.register_impl(first)
    registry.register_many([second, reference("silu_and_mul", silu(0))])
    assert registry.get_implementations("rms_norm") == [first, second]
    assert registry.get_implementation("rms_norm", "vendor.b") is second
    assert registry.get_implementation("rms_norm", "vendor.c") is None
    assert registry.list_operators() == ["rms_norm", "silu_and_mul"]
    assert registry.known_operators() == sorted(CATALOG)
    registry.clear()
    assert registry.list_operators() == []


def test_snapshot_cannot_be_changed_and_does_not_change() -> None:
    registry = OpRegistry()
    registry.register_impl(vendor("a", "rms_norm", rms_norm))
    snapshot = registry.snapshot()
    with pytest.raises(TypeError):
        snapshot.impls_by_op["rms_norm"] = ()  # type: ignore[index]
    with pytest.raises(AttributeError):
        snapshot.impls_by_op["rms_norm"].append(None)  # type: ignore[attr-defined]
    registry.register_impl(vendor("b", "rms_norm", rms_norm))
    assert [impl.impl_id for impl in snapshot.impls_by_op["rms_norm"]] == ["vendor.a"]
    assert registry.generation > snapshot.generation


def test_duplicate_names_who_was_first() -> None:
    registry = OpRegistry()
    with registry.transaction("distribution vllm-fl-acme"):
        registry.register_impl(vendor("acme", "rms_norm", rms_norm))
    with pytest.raises(RegistrationError) as caught:
        registry.register_impl(vendor("acme", "rms_norm", rms_norm))
    assert str(caught.value) == (
        "rms_norm: implementation 'vendor.acme' is registered already by distribution vllm-fl-acme;"
        " give the second one another impl_id"
    )
    assert isinstance(caught.value, ValueError)
    assert registry.owner("rms_norm", "vendor.acme") == "distribution vllm-fl-acme"


def test_register_many_is_all_or_nothing() -> None:
    registry = OpRegistry()
    generation = registry.generation
    with pytest.raises(RegistrationError):
        registry.register_many([vendor("a", "rms_norm", rms_norm), vendor("a", "rms_norm", rms_norm)])
    assert registry.list_operators() == []
    assert registry.generation == generation


def test_failed_inner_transaction_leaves_the_outer_one() -> None:
    registry = OpRegistry()
    with registry.transaction("outer"):
        registry.register_impl(vendor("a", "rms_norm", rms_norm))
        with pytest.raises(RegistrationError), registry.transaction("inner"):
            registry.register_many([vendor("b", "rms_norm", rms_norm), vendor("a", "rms_norm", rms_norm)])
    assert [impl.impl_id for impl in registry.get_implementations("rms_norm")] == ["vendor.a"]
    assert registry.has_source("outer")
    assert not registry.has_source("inner")


def test_other_threads_see_a_transaction_when_it_is_done() -> None:
    registry = OpRegistry()
    seen: list[list[str]] = []

    def look() -> None:
        seen.append(registry.list_operators())

    with registry.transaction():
        registry.register_impl(vendor("a", "rms_norm", rms_norm))
        assert registry.list_operators() == ["rms_norm"]
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    look()
    assert seen == [[], ["rms_norm"]]


def wrong_name(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    return x


def missing(x: Any, residual: Any, weight: Any) -> Any:
    return x


def wrong_default(x: Any, approximate: str = "tanh") -> Any:
    return x


def extra(x: Any, scale: float) -> Any:
    return x


@pytest.mark.parametrize(
    ("op", "fn", "message"),
    [
        (
            "rms_norm",
            wrong_name,
            "rms_norm(x, residual, weight, epsilon): implementation 'vendor.acme' does not fit:"
            " parameter 4 is named 'eps', the operator's is 'epsilon'",
        ),
        (
            "rms_norm",
            missing,
            "rms_norm(x, residual, weight, epsilon): implementation 'vendor.acme' does not fit:"
            " parameter 'epsilon' is missing",
        ),
        (
            "gelu_and_mul",
            wrong_default,
            "gelu_and_mul(x, approximate='none'): implementation 'vendor.acme' does not fit:"
            " parameter 'approximate' defaults to 'tanh', the operator's defaults to 'none'",
        ),
        (
            "silu_and_mul",
            extra,
            "silu_and_mul(x): implementation 'vendor.acme' does not fit:"
            " parameter 'scale' is not one of the operator's and has no default",
        ),
    ],
    ids=["name", "missing", "default", "extra"],
)
def test_wrong_signature(op: str, fn: Any, message: str) -> None:
    registry = OpRegistry()
    with pytest.raises(RegistrationError) as caught:
        registry.register_impl(vendor("acme", op, fn))
    assert str(caught.value) == message
    assert registry.list_operators() == []


def test_not_an_implementation() -> None:
    with pytest.raises(RegistrationError) as caught:
        OpRegistry().register_impl("rms_norm")  # type: ignore[arg-type]
    assert str(caught.value) == "expected an OpImpl, got 'rms_norm'"


def test_operator_without_a_specification_draws_one_warning(warnings: list[str]) -> None:
    registry = OpRegistry()
    registry.register_impl(vendor("a", "rms_nrom", lambda x: x))
    registry.register_impl(vendor("b", "rms_nrom", lambda x: x))
    assert warnings == [
        "operator 'rms_nrom' (implementation 'vendor.a') is not in the catalogue and has no OpSpec: neither its"
        " signature nor what it writes is known; register one with registry.register_spec(OpSpec(...)); did you mean"
        " 'rms_norm'?"
    ]


def acme_norm(x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[name-defined]  # noqa: F821
    return x.new_empty(x.shape)


SPEC = OpSpec(fake=acme_norm, called_from="acme")


def test_own_operator(warnings: list[str]) -> None:
    registry = OpRegistry()
    with registry.transaction():
        registry.register_impl(vendor("acme", "acme_norm", lambda x, scale=1.0: x))
        registry.register_spec(SPEC)
    assert registry.spec("acme_norm") is SPEC
    assert warnings == []
    with pytest.raises(RegistrationError) as caught:
        registry.register_impl(vendor("b", "acme_norm", lambda y: y))
    assert "parameter 1 is named 'y'" in str(caught.value)


def test_specification_that_an_implementation_does_not_fit() -> None:
    registry = OpRegistry()
    registry.register_impl(vendor("acme", "acme_norm", lambda y: y))
    with pytest.raises(RegistrationError) as caught:
        registry.register_spec(SPEC)
    assert str(caught.value).startswith("acme_norm(x, scale=1.0): implementation 'vendor.acme' does not fit")
    assert registry.spec("acme_norm") is None


def test_specification_of_a_catalogue_operator() -> None:
    with pytest.raises(RegistrationError) as caught:
        OpRegistry().register_spec(OpSpec(fake=rms_norm, called_from="acme"))
    assert str(caught.value) == (
        "operator 'rms_norm' is the catalogue's: rms_norm(x, residual, weight, epsilon); rename yours"
    )


def test_second_specification() -> None:
    registry = OpRegistry()
    registry.register_spec(SPEC)
    registry.register_spec(SPEC)
    with pytest.raises(RegistrationError) as caught:
        registry.register_spec(OpSpec(fake=acme_norm, called_from="elsewhere"))
    assert str(caught.value) == (
        "operator 'acme_norm' has a specification already: acme_norm(x, scale=1.0); rename yours"
    )


def test_opaque_needs_a_specification() -> None:
    registry = OpRegistry()
    with pytest.raises(RegistrationError) as caught:
        registry.register_impl(vendor("acme", "acme_norm", lambda x: x, opaque=True))
    assert str(caught.value) == (
        "acme_norm: implementation 'vendor.acme' is opaque, and the operator has no OpSpec to make a torch.library"
        " operator from; register one with registry.register_spec(OpSpec(...))"
    )
    assert registry.list_operators() == []


def test_opaque_needs_tensors() -> None:
    def attention_backend(use_mla: bool = False, use_sparse: bool = False) -> str:
        return ""

    with pytest.raises(RegistrationError) as caught:
        OpRegistry().register_impl(vendor("acme", "attention_backend", attention_backend, opaque=True))
    assert str(caught.value) == (
        "attention_backend(use_mla=False, use_sparse=False): a result of type str cannot be behind torch.library"
    )


def test_every_catalogue_operator_takes_its_own_meta_function() -> None:
    registry = OpRegistry()
    registry.register_many(OpImpl(name, "m", reference(name, print).kind, s.fake) for name, s in CATALOG.items())
    assert registry.list_operators() == sorted(CATALOG)
