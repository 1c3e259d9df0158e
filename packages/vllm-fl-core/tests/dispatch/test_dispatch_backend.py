"""Backends: one class whose methods are the operators."""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_helpers import FakeTensor, manager_of

from vllm_fl.catalog import OpSpec
from vllm_fl.dispatch import (
    Backend,
    BackendImplKind,
    OpManager,
    OpRegistry,
    op_options,
    register_backend,
)
from vllm_fl.dispatch.backends.base import Backend as BackendOfThePeer
from vllm_fl.errors import RegistrationError


class Acme(Backend):
    available = True

    @property
    def name(self) -> str:
        return "acme-backend"

    @property
    def vendor(self) -> str | None:
        return "acme"

    def is_available(self) -> bool:
        return self.available

    def silu_and_mul(self, x: Any) -> str:
        return "silu"

    @op_options(supported_dtypes={"float16"}, priority=120, impl_id="vendor.acme_fast", min_arch=None)
    def rms_norm(self, x: Any, residual: Any, weight: Any, epsilon: float) -> str:
        return "norm"

    def helper_of_its_own(self) -> None:
        raise AssertionError

    def _private(self) -> None:
        raise AssertionError


def test_methods_become_implementations() -> None:
    registry = OpRegistry()
    impls = register_backend(registry, Acme())
    assert {(i.op_name, i.impl_id, i.kind, i.vendor, i.priority) for i in impls} == {
        ("rms_norm", "vendor.acme_fast", BackendImplKind.VENDOR, "acme", 120),
        ("silu_and_mul", "vendor.acme", BackendImplKind.VENDOR, "acme", 100),
    }
    assert registry.list_operators() == ["rms_norm", "silu_and_mul"]
    norm = registry.get_implementation("rms_norm", "vendor.acme_fast")
    assert norm is not None
    assert norm.supported_dtypes == {"float16"}
    manager = OpManager(registry, register_builtins=False)
    assert manager.call("silu_and_mul", 1) == "silu"
    assert manager.call("rms_norm", FakeTensor(1, dtype="float16"), None, None, 0.0) == "norm"


def test_availability_is_the_backends() -> None:
    class Absent(Acme):
        available = False

    manager = manager_of(*register_backend(OpRegistry(), Absent()))
    assert [c.reason for c in manager.selection("silu_and_mul").candidates] == [
        "rejected: not available: its availability check says no"
    ]


@pytest.mark.parametrize(
    ("kind", "impl_id", "priority"),
    [
        (BackendImplKind.DEFAULT, "default.acme-backend", 150),
        (BackendImplKind.REFERENCE, "reference.acme-backend", 50),
        (BackendImplKind.VENDOR, "vendor.acme", 100),
    ],
)
def test_kinds(kind: BackendImplKind, impl_id: str, priority: int) -> None:
    impls = {i.op_name: i for i in register_backend(OpRegistry(), Acme(), kind=kind)}
    assert (impls["silu_and_mul"].impl_id, impls["silu_and_mul"].priority) == (impl_id, priority)
    impls = {i.op_name: i for i in register_backend(OpRegistry(), Acme(), kind=kind, priority=7)}
    assert impls["silu_and_mul"].priority == 7


class Nameless(Backend):
    @property
    def name(self) -> str:
        return "nameless"

    def is_available(self) -> bool:
        return True

    def silu_and_mul(self, x: Any) -> Any:
        return x


def test_vendor_is_optional_where_the_kind_is_given() -> None:
    with pytest.raises(RegistrationError) as caught:
        register_backend(OpRegistry(), Nameless())
    assert str(caught.value) == (
        "Nameless(name='nameless', vendor=None) names no vendor; give register_backend(..., kind=...)"
    )
    (impl,) = register_backend(OpRegistry(), Nameless(), kind=BackendImplKind.REFERENCE)
    assert (impl.impl_id, impl.vendor) == ("reference.nameless", None)


def test_backend_without_operators() -> None:
    class Empty(Nameless):
        silu_and_mul = None  # type: ignore[assignment]

    with pytest.raises(RegistrationError, match="has no method that is an operator"):
        register_backend(OpRegistry(), Empty(), kind=BackendImplKind.REFERENCE)


def test_wrong_signature_registers_nothing() -> None:
    class Wrong(Acme):
        def moe_sum(self, input: Any) -> None: ...

    registry = OpRegistry()
    with pytest.raises(RegistrationError) as caught:
        register_backend(registry, Wrong())
    assert str(caught.value) == (
        "moe_sum(input, output): implementation 'vendor.acme' does not fit: parameter 'output' is missing"
    )
    assert registry.list_operators() == []


def test_misspelt_method_is_reported(warnings: list[str]) -> None:
    class Misspelt(Acme):
        def gelu_and_mull(self, x: Any) -> Any:
            return x

    register_backend(OpRegistry(), Misspelt())
    assert warnings == [
        "Misspelt(name='acme-backend', vendor='acme'): the method 'gelu_and_mull' is not an operator and is not"
        " registered; did you mean 'gelu_and_mul'?"
    ]


def test_operators_of_its_own() -> None:
    class Own(Acme):
        def acme_norm(self, x: Any) -> Any:
            return x

    def acme_norm(x: Any) -> Any:
        return x

    registry = OpRegistry()
    registry.register_spec(OpSpec(fake=acme_norm, called_from="acme"))
    register_backend(registry, Own())
    assert "acme_norm" in registry.list_operators()


def test_unknown_option() -> None:
    with pytest.raises(TypeError) as caught:
        op_options(dtype="float16")
    assert str(caught.value) == (
        "op_options takes supported_dtypes, min_arch, supports, opaque, priority, impl_id, parameters, buckets,"
        " not dtype"
    )


def test_abstract_members() -> None:
    assert BackendOfThePeer is Backend
    with pytest.raises(TypeError, match="is_available"):
        type("Half", (Backend,), {"name": "half"})()
