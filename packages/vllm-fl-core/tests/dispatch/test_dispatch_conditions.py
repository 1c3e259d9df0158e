"""Implementations that take only some arguments: dtypes, support checks, parameters left out."""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_helpers import FakeTensor, manager_of, reference, silu, vendor
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.catalog import OpSpec
from vllm_fl.dispatch import BackendImplKind, OpImpl, OpManager
from vllm_fl.dispatch import plan as plan_module
from vllm_fl.dispatch.conditions import conditions
from vllm_fl.errors import NoImplementationError


def gelu(name: str) -> Any:
    def gelu_and_mul(x: Any, approximate: str = "none") -> Any:
        return name

    return gelu_and_mul


def test_dtypes() -> None:
    manager = manager_of(
        vendor("acme", "gelu_and_mul", gelu("acme"), supported_dtypes={"bfloat16", "float16"}),
        reference("gelu_and_mul", gelu("reference")),
    )
    bound = manager.bind("gelu_and_mul")
    dtypes = ["bfloat16", "float32", "float16", "float32", "bfloat16"]
    assert [bound(FakeTensor(2, dtype=dtype)) for dtype in dtypes] == ["acme", "reference", "acme", "reference", "acme"]


def test_dtypes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    manager = manager_of(
        vendor("acme", "silu_and_mul", silu("acme"), supported_dtypes={torch.bfloat16, "float16"}),
        reference("silu_and_mul", silu("reference")),
    )
    served = {
        dtype: manager.call("silu_and_mul", torch.zeros(2, 2, dtype=dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    assert list(served.values()) == ["acme", "acme", "reference"]


def test_the_first_tensor_counts() -> None:
    """An operator whose first argument is no tensor: the first tensor after it is asked."""

    def op(scale, x):  # type: ignore[no-untyped-def]
        """Scale."""

    op.__annotations__ = {"scale": "float", "x": "Tensor", "return": "Tensor"}
    op.__name__ = "scaled"
    manager = OpManager(register_builtins=False)
    manager.registry.register_spec(OpSpec(fake=op, called_from="here"))
    manager.registry.register_many(
        [
            vendor("acme", "scaled", lambda scale, x: "acme", supported_dtypes={"float16"}),
            reference("scaled", lambda scale, x: "reference"),
        ]
    )
    assert manager.call("scaled", 2.0, FakeTensor(1, dtype="float16")) == "acme"
    assert manager.call("scaled", 2.0, FakeTensor(1, dtype="float32")) == "reference"


def test_dtypes_without_specification() -> None:
    manager = manager_of(
        vendor("acme", "mystery", lambda *values: "acme", supported_dtypes={"float16"}),
        reference("mystery", lambda *values: "reference"),
    )
    assert manager.call("mystery", 1, FakeTensor(1, dtype="float16")) == "acme"
    assert manager.call("mystery", 1, FakeTensor(1, dtype="float32")) == "reference"
    assert manager.call("mystery", 1) == "acme"


def test_support_check_is_asked_once_per_conditions() -> None:
    asked: list[tuple[int, ...]] = []

    def supports(x: Any) -> bool | str:
        asked.append(x.shape)
        return x.shape[-1] % 8 == 0 or "needs a multiple of 8"

    manager = manager_of(
        vendor("acme", "silu_and_mul", silu("acme"), supports=supports), reference("silu_and_mul", silu("reference"))
    )
    bound = manager.bind("silu_and_mul")
    widths = [8, 7, 8, 7, 16, 8]
    served = [bound(FakeTensor(4, width)) for width in widths]
    assert served == ["acme" if width % 8 == 0 else "reference" for width in widths]
    assert asked == [(4, 8), (4, 7), (4, 16)]
    bound(FakeTensor(4, 8, dtype="float16"))
    bound(FakeTensor(4, 8, device="meta"))
    assert len(asked) == 5


def test_reasons_of_support_checks_reach_the_error() -> None:
    def broken(x: Any) -> bool:
        raise KeyError("table")

    manager = manager_of(
        vendor("a", "silu_and_mul", silu(0), priority=300, supports=lambda x: "needs a multiple of 8"),
        vendor("b", "silu_and_mul", silu(0), priority=200, supports=lambda x: False),
        vendor("c", "silu_and_mul", silu(0), supports=broken),
        reference("silu_and_mul", silu(0), supported_dtypes={"float16"}),
    )
    with pytest.raises(NoImplementationError) as caught:
        manager.call("silu_and_mul", FakeTensor(7))
    assert str(caught.value).splitlines()[:5] == [
        "no implementation of silu_and_mul takes these arguments (x=[7] float32)",
        "  vendor.a: needs a multiple of 8",
        "  vendor.b: its support check says no",
        "  vendor.c: its support check raised KeyError: 'table'",
        "  reference.torch: does not support float32 (only float16)",
    ]


def topk(
    topk_weights: Any, topk_indices: Any, token_expert_indices: Any, gating_output: Any, renormalize: bool = False
) -> None:
    topk_weights.values.append(renormalize)


def whole_topk(
    topk_weights: Any,
    topk_indices: Any,
    token_expert_indices: Any,
    gating_output: Any,
    renormalize: bool = False,
    e_score_correction_bias: Any = None,
) -> None:
    topk_weights.values.append("reference")


def test_parameter_left_out() -> None:
    """Offered every call that leaves it at its default, however that is written; no other."""
    manager = manager_of(vendor("acme", "topk_softmax", topk), reference("topk_softmax", whole_topk))
    bound = manager.bind("topk_softmax")
    out = FakeTensor(1)
    rest = (FakeTensor(1), FakeTensor(1), FakeTensor(1))
    bound(out, *rest)
    bound(out, *rest, True)
    bound(out, *rest, False, None)
    bound(out, *rest, e_score_correction_bias=None, renormalize=True)
    bound(out, *rest, e_score_correction_bias=FakeTensor(8))
    bound(out, *rest, False, FakeTensor(8))
    bound(out, *rest)
    assert out.values == [0, False, True, False, True, "reference", "reference", False]


def test_all_optional_parameters_left_out() -> None:
    manager = manager_of(
        vendor("acme", "attention_backend", lambda: "acme"),
        reference("attention_backend", lambda use_mla=False, use_sparse=False: "reference"),
    )
    bound = manager.bind("attention_backend")
    assert [bound(), bound(False), bound(use_mla=True), bound(use_sparse=True), bound(use_mla=False)] == [
        "acme",
        "acme",
        "reference",
        "reference",
        "acme",
    ]


def test_parameter_left_out_by_the_only_implementation() -> None:
    manager = manager_of(vendor("acme", "gelu_and_mul", lambda x: x))
    assert manager.call("gelu_and_mul", 1) == 1
    assert manager.call("gelu_and_mul", 1, "none") == 1
    with pytest.raises(NoImplementationError) as caught:
        manager.call("gelu_and_mul", 1, "tanh")
    assert "vendor.acme: does not take 'approximate', which this call sets to 'tanh'" in str(caught.value)


def test_parameters_of_its_own_and_starred_ones() -> None:
    manager = manager_of(vendor("acme", "silu_and_mul", lambda x, out=None: (x, out)))
    assert manager.call("silu_and_mul", 1) == (1, None)
    starred = manager_of(vendor("acme", "gelu_and_mul", lambda *args, **kwargs: (args, kwargs)))
    assert starred.call("gelu_and_mul", 1, approximate="tanh") == ((1, "tanh"), {})


def test_keyword_only_parameters() -> None:
    def fake(x, *, eps=1e-6, mode):  # type: ignore[no-untyped-def]
        """An operator whose parameters are given by name."""

    fake.__annotations__ = {"x": "Tensor", "eps": "float", "mode": "str", "return": "Tensor"}
    fake.__name__ = "named"
    manager = OpManager(register_builtins=False)
    manager.registry.register_spec(OpSpec(fake=fake, called_from="here"))

    def acme(x: Any, *, eps: float = 1e-6, mode: str) -> Any:
        if mode == "slow":
            raise NotImplementedError
        return "acme", eps, mode

    manager.registry.register_many(
        [vendor("acme", "named", acme), reference("named", lambda x, *, eps=1e-6, mode: ("reference", eps, mode))]
    )
    for _ in range(2):
        assert manager.call("named", 1, mode="fast") == ("acme", 1e-6, "fast")
        assert manager.call("named", 1, eps=2.0, mode="slow") == ("reference", 2.0, "slow")
    with pytest.raises(TypeError, match=r"^named\(x, \*, eps=1e-06, mode\): call\(\) missing 1 required keyword-only"):
        manager.call("named", 1)


def test_unhashable_arguments_are_decided_each_time() -> None:
    asked = []

    def acme(x: Any) -> Any:
        asked.append(1)
        raise NotImplementedError

    manager = manager_of(vendor("acme", "mystery", acme), reference("mystery", lambda x: "reference"))
    assert [manager.call("mystery", {"a": 1}) for _ in range(3)] == ["reference"] * 3
    assert len(asked) == 3


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "MEMORY_LIMIT", 10)
    manager = manager_of(
        vendor("acme", "silu_and_mul", silu("acme"), supports=lambda x: True), reference("silu_and_mul", silu(0))
    )
    for width in range(100):
        assert manager.call("silu_and_mul", FakeTensor(width)) == "acme"
    (plan,) = manager._plans.values()
    assert len(plan.memory) <= 10


def test_failure_of_a_remembered_implementation_demotes_it() -> None:
    healthy = [True]

    def acme(x: Any) -> Any:
        if not healthy[0]:
            raise ValueError("broke")
        return "acme"

    manager = manager_of(
        vendor("acme", "silu_and_mul", acme, supports=lambda x: True), reference("silu_and_mul", silu("reference"))
    )
    assert manager.call("silu_and_mul", FakeTensor(1)) == "acme"
    healthy[0] = False
    assert manager.call("silu_and_mul", FakeTensor(1)) == "reference"
    healthy[0] = True
    assert manager.call("silu_and_mul", FakeTensor(1)) == "reference"
    assert manager.get_failed_impls() == {"silu_and_mul": {"vendor.acme"}}


scalars = st.one_of(st.none(), st.booleans(), st.integers(-2, 2), st.floats(allow_nan=False), st.text(max_size=2))
tensors = st.builds(
    lambda shape, dtype, device: FakeTensor(*shape, dtype=dtype, device=device),
    st.lists(st.integers(0, 2), max_size=2),
    st.sampled_from(["float16", "float32"]),
    st.sampled_from(["cpu", "cuda"]),
)
values = st.one_of(scalars, tensors, st.lists(scalars, max_size=2))


def facts(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return "tensor", value.shape, value.dtype, value.device
    if isinstance(value, list):
        return [facts(item) for item in value]
    return type(value).__name__, value


@given(st.lists(values, max_size=3), st.lists(values, max_size=3))
def test_equal_conditions_are_equal_facts(first: list[Any], second: list[Any]) -> None:
    same = conditions(tuple(first), {}) == conditions(tuple(second), {})
    assert same == (facts(first) == facts(second))


def test_true_and_one_differ() -> None:
    assert conditions((1,), {}) != conditions((True,), {})
    assert conditions((1,), {"a": 1}) != conditions((1,), {"a": 1.0})


def test_strides_are_conditions() -> None:
    torch = pytest.importorskip("torch")
    square = torch.zeros(4, 4)
    assert conditions((square,), {}) != conditions((square.t(),), {})
    assert conditions((square,), {}) == conditions((torch.ones(4, 4),), {})


@given(
    st.lists(
        st.tuples(st.frozensets(st.sampled_from("abc")), st.integers(0, 3)),
        min_size=1,
        max_size=5,
        unique_by=lambda p: p[1],
    ),
    st.lists(st.sampled_from("abc"), max_size=12),
)
def test_each_call_goes_to_the_first_that_takes_it(impls: list[tuple[frozenset[str], int]], calls: list[str]) -> None:
    """Whatever the history of refusals: the implementation of highest priority that takes the argument serves it."""

    def make(accepted: frozenset[str], priority: int) -> OpImpl:
        def mystery(x: str) -> int:
            if x not in accepted:
                raise NotImplementedError
            return priority

        return OpImpl("mystery", f"i{priority}", BackendImplKind.REFERENCE, mystery, priority=priority)

    manager = manager_of(*(make(accepted, priority) for accepted, priority in impls))
    for call in calls:
        takers = [priority for accepted, priority in impls if call in accepted]
        if takers:
            assert manager.call("mystery", call) == max(takers)
        else:
            with pytest.raises(NoImplementationError):
                manager.call("mystery", call)
    assert manager.failures() == []


def test_every_fact_of_a_tensor_is_a_condition_of_the_bound_operator() -> None:
    """The generated key tells apart what the general one does."""
    torch = pytest.importorskip("torch")
    asked: list[Any] = []

    def supports(x: Any, residual: Any, weight: Any, epsilon: float) -> bool:
        asked.append(x)
        return True

    def rms_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
        return x

    bound = manager_of(vendor("acme", "rms_norm", rms_norm, supports=supports)).bind("rms_norm")
    square = torch.zeros(4, 4)
    calls: list[tuple[Any, Any, Any, float]] = [
        (square, None, None, 1.0),
        (square.t(), None, None, 1.0),
        (square.half(), None, None, 1.0),
        (square.to("meta"), None, None, 1.0),
        (torch.zeros(4, 5), None, None, 1.0),
        (square, square, None, 1.0),
        (square, None, square, 1.0),
        (square, None, None, 2.0),
        (square, None, None, 1),
    ]
    for _ in range(2):
        for call in calls:
            bound(*call)
        bound(torch.ones(4, 4), None, None, epsilon=1.0)
    assert len(asked) == len(calls)
