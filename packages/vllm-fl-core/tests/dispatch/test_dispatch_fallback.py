"""What happens when an implementation refuses or fails."""

from __future__ import annotations

import gc
import sys
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from dispatch_helpers import FakeTensor, manager_of, reference, silu, vendor

from vllm_fl.dispatch import OpManager, SelectionPolicy, policy_context, set_global_policy
from vllm_fl.dispatch.types import AVAILABLE
from vllm_fl.errors import LoadError, NoImplementationError
from vllm_fl.plugins import load_at_first_call

STRICT = SelectionPolicy(strict=True)


def failing_then(error: Exception, answer: Any = "reference", op: str = "silu_and_mul") -> OpManager:
    return manager_of(vendor("acme", op, silu(error)), reference(op, silu(answer)))


def test_another_exception_tries_the_next_and_demotes(warnings: list[str]) -> None:
    manager = failing_then(ValueError("bad luck"))
    bound = manager.bind("silu_and_mul")
    assert bound(FakeTensor(2, 4, dtype="bfloat16")) == "reference"
    assert bound(FakeTensor(3, 4)) == "reference"
    assert manager.get_selected_impl_id("silu_and_mul") == "reference.torch"
    assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.acme"}}
    assert manager.get_failed_impls("silu_and_mul") == {"silu_and_mul": {"vendor.acme"}}
    assert manager.get_failed_impls("rms_norm") == {"rms_norm": set()}
    assert "- vendor.acme      rejected: failed before: ValueError: bad luck" in (
        manager.selection("silu_and_mul").explain()
    )
    (warning,) = warnings
    assert warning.startswith(
        "silu_and_mul: implementation 'vendor.acme' raised ValueError: bad luck (x [2, 4] bfloat16);"
        " 'reference.torch' serves the operator from now on\nTraceback (most recent call last):\n"
    )
    assert warning.endswith("ValueError: bad luck\n")


def test_what_cannot_be_imported_has_written_nothing(warnings: list[str]) -> None:
    """The operator writes its output, so that no other exception would let another implementation try."""
    broken = load_at_first_call("moe_sum", "no_such_module:moe_sum", lambda: AVAILABLE)
    written: list[Any] = []
    manager = manager_of(
        vendor("acme", "moe_sum", broken),
        reference("moe_sum", lambda input, output: written.append(output)),
    )
    manager.call("moe_sum", 1, 2)
    manager.call("moe_sum", 1, 3)
    assert written == [2, 3]
    assert [warning.partition("\n")[0] for warning in warnings] == [
        "moe_sum: implementation 'vendor.acme' raised LoadError: no_such_module:moe_sum cannot be imported:"
        " ModuleNotFoundError: No module named 'no_such_module' (no tensors); 'reference.torch' serves the operator"
        " from now on"
    ]
    set_global_policy(STRICT)
    with pytest.raises(LoadError):
        manager.call("moe_sum", 1, 4)


def test_record_is_whole_and_keeps_no_argument_alive() -> None:
    def silu_and_mul(x: Any) -> Any:
        raise ValueError("bad luck")

    manager = manager_of(vendor("acme", "silu_and_mul", silu_and_mul), reference("silu_and_mul", silu(0)))
    tensor = FakeTensor(2, 4, dtype="bfloat16")
    manager.call("silu_and_mul", tensor)
    manager.call("silu_and_mul", FakeTensor(9))
    (record,) = manager.failures()
    assert (record.op, record.impl_id, record.exception) == ("silu_and_mul", "vendor.acme", "ValueError: bad luck")
    assert record.shapes == {"x": (2, 4)}
    assert record.dtypes == {"x": "bfloat16"}
    assert record.traceback.startswith("Traceback (most recent call last):")
    assert record.traceback.endswith("ValueError: bad luck\n")
    assert "in silu_and_mul" in record.traceback
    assert record.time > 0
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "forget",
    [
        lambda manager: manager.clear_failed_impls(),
        lambda manager: manager.clear_failed_impls("silu_and_mul"),
        lambda manager: set_global_policy(SelectionPolicy()),
        lambda manager: manager.bump_policy_epoch(),
    ],
    ids=["clear", "clear one", "policy", "epoch"],
)
def test_no_failure_is_for_ever(forget: Callable[[OpManager], Any]) -> None:
    answers: list[Any] = [ValueError("once"), "acme", "acme"]

    def flaky(x: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    manager = manager_of(vendor("acme", "silu_and_mul", flaky), reference("silu_and_mul", silu("reference")))
    assert manager.call("silu_and_mul", 1) == "reference"
    forget(manager)
    assert manager.call("silu_and_mul", 1) == "acme"
    assert manager.get_failed_impls() == {}


def test_clear_of_another_operator_changes_nothing() -> None:
    manager = failing_then(ValueError("bad"))
    manager.call("silu_and_mul", 1)
    manager.clear_failed_impls("rms_norm")
    assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.acme"}}
    assert len(manager.failures()) == 1


def test_strict_passes_the_exception_on_unchanged(warnings: list[str]) -> None:
    set_global_policy(STRICT)
    error = ValueError("bad luck")
    manager = failing_then(error)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            manager.call("silu_and_mul", 1)
        assert caught.value is error
        assert caught.value.__cause__ is None
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert frames[-1] == "silu_and_mul"
    assert not any(name in frames for name in ("recover", "follow"))
    assert manager.get_failed_impls() == {}
    assert [warning.partition("\n")[0] for warning in warnings] == [
        "silu_and_mul: implementation 'vendor.acme' raised ValueError: bad luck (no tensors);"
        " the exception is passed on, since the policy is strict"
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_not_implemented_tries_the_next_and_demotes_nobody(strict: bool, warnings: list[str]) -> None:
    set_global_policy(SelectionPolicy(strict=strict))
    manager = failing_then(NotImplementedError("no float64"))
    assert manager.call("silu_and_mul", FakeTensor(2)) == "reference"
    assert manager.get_selected_impl_id("silu_and_mul") == "vendor.acme"
    assert manager.failures() == []
    assert warnings == []


def test_not_implemented_is_remembered_for_these_conditions_only() -> None:
    calls: list[bool] = []

    def acme(use_mla: bool = False, use_sparse: bool = False) -> str:
        calls.append(use_mla)
        if use_mla:
            raise NotImplementedError("no MLA")
        return "acme"

    manager = manager_of(
        vendor("acme", "attention_backend", acme),
        reference("attention_backend", lambda use_mla=False, use_sparse=False: "reference"),
    )
    bound = manager.bind("attention_backend")
    assert [bound(use_mla=True), bound(), bound(True), bound(False), bound(True, False)] == [
        "reference",
        "acme",
        "reference",
        "acme",
        "reference",
    ]
    assert calls == [True, False, False], "the refusal of MLA was asked once"


def test_all_refuse() -> None:
    manager = failing_then(NotImplementedError("no float64"), NotImplementedError())
    with pytest.raises(NoImplementationError) as caught:
        manager.call("silu_and_mul", FakeTensor(2, 4, dtype="float64"))
    assert str(caught.value) == (
        "no implementation of silu_and_mul takes these arguments (x=[2, 4] float64)\n"
        "  vendor.acme: does not support these arguments: no float64\n"
        "  reference.torch: does not support these arguments: no reason given\n"
        "silu_and_mul(x): vendor.acme\n"
        "  + vendor.acme      chosen: first by the order flagos|vendor|reference, priority 100 (set by code)\n"
        "  + reference.torch  next: token 'reference' comes after 'vendor' (set by code)"
    )


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def test_all_fail_raises_the_first_with_notes_about_the_others() -> None:
    first, second = ValueError("first"), KeyError("second")
    manager = manager_of(
        vendor("a", "silu_and_mul", silu(first), priority=200),
        vendor("b", "silu_and_mul", silu(NotImplementedError("no")), priority=150),
        reference("silu_and_mul", silu(second)),
    )
    with pytest.raises(ValueError) as caught:
        manager.call("silu_and_mul", 1)
    assert caught.value is first
    assert notes(first) == [
        "silu_and_mul: implementation 'reference.torch' was tried next and raised KeyError: 'second'",
        "silu_and_mul: implementation 'vendor.b' does not support these arguments: no",
    ]
    assert manager.get_failed_impls() == {}, "with these arguments nobody did better"


def test_notes_where_exceptions_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    error = ValueError("first")
    with pytest.raises(ValueError):
        failing_then(error, KeyError("second")).call("silu_and_mul", 1)
    assert len(notes(error)) == 1


def test_refusal_then_failure_raises_the_failure() -> None:
    failure = ValueError("broken")
    manager = failing_then(NotImplementedError("no"), failure)
    with pytest.raises(ValueError) as caught:
        manager.call("silu_and_mul", 1)
    assert caught.value is failure


def write_and_fail(input: Any, output: Any) -> None:
    output.values[0] += 100
    raise ValueError("half done")


def add_one(input: Any, output: Any) -> None:
    output.values[0] += 1


def test_nothing_is_tried_after_a_mutating_operator(warnings: list[str]) -> None:
    manager = manager_of(vendor("acme", "moe_sum", write_and_fail), reference("moe_sum", add_one))
    output = FakeTensor(1)
    with pytest.raises(ValueError, match="half done"):
        manager.call("moe_sum", FakeTensor(1), output)
    assert output.values == [100], "the reference implementation did not run on what the first one left"
    assert "since it may have written to output" in warnings[0]


def test_mutating_operator_may_refuse() -> None:
    def refuse(input: Any, output: Any) -> None:
        raise NotImplementedError

    manager = manager_of(vendor("acme", "moe_sum", refuse), reference("moe_sum", add_one))
    output = FakeTensor(1)
    manager.call("moe_sum", FakeTensor(1), output)
    assert output.values == [1]


def test_operator_without_specification_falls_back_only_if_nothing_can_have_been_written() -> None:
    manager = failing_then(ValueError("bad"), op="mystery")
    assert manager.call("mystery", 3) == "reference"
    manager.clear_failed_impls()
    with pytest.raises(ValueError, match="bad"):
        manager.call("mystery", FakeTensor(1))
    with pytest.raises(ValueError, match="bad"):
        manager.call("mystery", x=[1])


class OutOfMemory(RuntimeError):
    pass


class Accelerator(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "memory ran out"),
        (OutOfMemory("whatever"), "memory ran out"),
        (RuntimeError("NPU out of memory. Tried to allocate 2 GiB"), "memory ran out"),
        (Accelerator("whatever"), "the device is at fault"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "the device is at fault"),
        (RuntimeError("ACL error 507015"), "the device is at fault"),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), "the device is at fault"),
    ],
    ids=["MemoryError", "torch class", "text", "accelerator class", "cuda", "acl", "cublas"],
)
def test_memory_and_device_faults_are_passed_on(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    fake = types.SimpleNamespace(
        OutOfMemoryError=OutOfMemory,
        AcceleratorError=Accelerator,
        compiler=types.SimpleNamespace(is_compiling=lambda: False, is_dynamo_compiling=lambda: False),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    manager = failing_then(error)
    with pytest.raises(type(error)) as caught:
        manager.call("silu_and_mul", 1)
    assert caught.value is error
    assert f"since {reason}\n" in warnings[0]
    assert manager.get_failed_impls() == {}


@pytest.mark.parametrize("device", ["cuda", "acme"])
@pytest.mark.parametrize(("initialised", "answer"), [(True, None), (False, "reference")])
def test_nothing_is_tried_inside_graph_capture(
    initialised: bool, answer: str | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.SimpleNamespace(is_initialized=lambda: initialised, is_current_stream_capturing=lambda: True)
    fake = types.SimpleNamespace(
        compiler=types.SimpleNamespace(is_compiling=lambda: False, is_dynamo_compiling=lambda: False),
        accelerator=types.SimpleNamespace(current_accelerator=lambda: types.SimpleNamespace(type=device)),
        **{device: module},
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    manager = failing_then(ValueError("bad"))
    if answer is None:
        with pytest.raises(ValueError, match="bad"):
            manager.call("silu_and_mul", 1)
    else:
        assert manager.call("silu_and_mul", 1) == answer


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1,), {}, "missing 3 required positional arguments: 'residual', 'weight', and 'epsilon'"),
        ((1, 2, 3, 4, 5), {}, "takes 4 positional arguments but 5 were given"),
        ((1, 2, 3), {"eps": 4}, "got an unexpected keyword argument 'eps'"),
        ((1, 2, 3, 4), {"x": 4}, "got multiple values for argument 'x'"),
    ],
    ids=["missing", "too many", "unknown", "twice"],
)
def test_callers_mistake_names_the_signature(args: Any, kwargs: Any, message: str, warnings: list[str]) -> None:
    called = []

    def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        called.append(1)

    manager = manager_of(vendor("acme", "rms_norm", rms_norm))
    for call in (manager.bind("rms_norm"), manager.bind("rms_norm").fn):
        with pytest.raises(TypeError) as caught:
            call(*args, **kwargs)
        assert str(caught.value) == f"rms_norm(x, residual, weight, epsilon): call() {message}"
    assert called == []
    assert manager.failures() == []
    assert warnings == []


def test_callers_mistake_without_a_specification() -> None:
    manager = manager_of(vendor("acme", "mystery", lambda x, scale: x))
    with pytest.raises(TypeError) as caught:
        manager.call("mystery", 1)
    assert str(caught.value) == "mystery(x, scale): missing a required argument: 'scale'"
    assert manager.failures() == []


def test_type_error_of_the_implementation_is_a_failure() -> None:
    manager = failing_then(TypeError("unsupported operand"))
    assert manager.call("silu_and_mul", 1) == "reference"
    assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.acme"}}


def test_interrupts_are_not_failures() -> None:
    def interrupted(x: Any) -> Any:
        raise KeyboardInterrupt

    manager = manager_of(vendor("acme", "silu_and_mul", interrupted), reference("silu_and_mul", silu("reference")))
    with pytest.raises(KeyboardInterrupt):
        manager.call("silu_and_mul", 1)
    assert manager.failures() == []


def test_failure_inside_a_context_stays_there() -> None:
    manager = failing_then(ValueError("bad"))
    with policy_context(SelectionPolicy(prefer="vendor")):
        assert manager.call("silu_and_mul", 1) == "reference"
        assert manager.get_selected_impl_id("silu_and_mul") == "reference.torch"
        assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.acme"}}
    assert manager.get_selected_impl_id("silu_and_mul") == "vendor.acme"


def test_three_in_a_row_demotes_the_first_two() -> None:
    manager = manager_of(
        vendor("a", "silu_and_mul", silu(ValueError("a")), priority=300),
        vendor("b", "silu_and_mul", silu(OSError("b")), priority=200),
        vendor("c", "silu_and_mul", silu("c")),
        reference("silu_and_mul", silu("reference")),
    )
    assert manager.call("silu_and_mul", 1) == "c"
    assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.a", "vendor.b"}}
    assert [record.impl_id for record in manager.failures()] == ["vendor.a", "vendor.b"]
