"""torch.compile(fullgraph=True) through dispatch: traced implementations and opaque ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dispatch_helpers import manager_of, reference, vendor

from vllm_fl.catalog import CATALOG, OpSpec
from vllm_fl.dispatch import (
    OpManager,
    SelectionPolicy,
    bind,
    call_op,
    policy_context,
    reset_default_manager,
    set_global_policy,
    with_preference,
)
from vllm_fl.dispatch.default import adopt_default_manager
from vllm_fl.dispatch.torch_ops import schema_of
from vllm_fl.errors import RegistrationError

torch = pytest.importorskip("torch")
from torch._dynamo.testing import CompileCounter  # noqa: E402

WAYS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "call_op": lambda op: lambda *args, **kwargs: call_op(op, *args, **kwargs),
    "bound.fn": lambda op: (lambda bound: lambda *args, **kwargs: bound.fn(*args, **kwargs))(bind(op)),
    "bound": lambda op: (lambda bound: lambda *args, **kwargs: bound(*args, **kwargs))(bind(op)),
}
backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def silu_and_mul(x: Any) -> Any:
    d = x.shape[-1] // 2
    return torch.nn.functional.silu(x[..., :d]) * x[..., d:]


def untraceable(x: Any) -> Any:
    """What Dynamo cannot trace: it reads the data."""
    assert x.data_ptr() != 0
    return silu_and_mul(x)


def refuses(x: Any) -> Any:
    raise NotImplementedError("not here")


X = torch.linspace(-2, 2, 24, dtype=torch.float32).reshape(3, 8)

CANDIDATES: dict[str, Callable[[], list[Any]]] = {
    "traced": lambda: [reference("silu_and_mul", silu_and_mul)],
    "opaque": lambda: [vendor("a", "silu_and_mul", untraceable, opaque=True), reference("silu_and_mul", silu_and_mul)],
    "wrong dtype": lambda: [
        vendor("a", "silu_and_mul", untraceable, opaque=True, supported_dtypes={"float16"}),
        reference("silu_and_mul", silu_and_mul),
    ],
    "refuses": lambda: [vendor("a", "silu_and_mul", refuses), reference("silu_and_mul", silu_and_mul)],
    "unsupported, then opaque": lambda: [
        vendor("a", "silu_and_mul", refuses, priority=200, supports=lambda x: x.shape[0] > 100),
        vendor("b", "silu_and_mul", untraceable, opaque=True),
    ],
    "opaque that refuses when it runs": lambda: [
        vendor("a", "silu_and_mul", refuses, opaque=True),
        reference("silu_and_mul", silu_and_mul),
    ],
    "opaque with a check": lambda: [
        vendor("a", "silu_and_mul", refuses, opaque=True, supports=lambda x: "never"),
        reference("silu_and_mul", silu_and_mul),
    ],
}


CASES = [(name, "call_op", False) for name in CANDIDATES]
CASES += [(name, way, warm) for name in ("traced", "opaque") for way in WAYS for warm in (False, True)]


@pytest.mark.parametrize(("name", "way", "warm"), sorted(set(CASES)))
def test_no_graph_break_and_one_compilation(name: str, way: str, warm: bool) -> None:
    """`warm`: the operator has been called before, so that the bound function is final."""
    adopt_default_manager(manager_of(*CANDIDATES[name]()))
    if warm:
        call_op("silu_and_mul", X)
    counter = CompileCounter()
    compiled = torch.compile(WAYS[way]("silu_and_mul"), backend=counter, fullgraph=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(X), silu_and_mul(X))
    assert counter.frame_count == 1


def opaque_norm(x: Any, residual: Any, weight: Any, epsilon: float) -> Any:
    assert x.data_ptr() != 0
    total = x if residual is None else x + residual
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon) * weight
    return out if residual is None else (out, total)


@pytest.mark.parametrize(("with_residual", "backend"), [(False, "aot_eager"), (True, "aot_eager"), (True, "inductor")])
def test_number_of_results_that_depends_on_the_arguments(with_residual: bool, backend: str) -> None:
    adopt_default_manager(manager_of(vendor("a", "rms_norm", opaque_norm, opaque=True)))
    call = bind("rms_norm").fn
    residual = X + 1 if with_residual else None

    def layer(x: Any, weight: Any) -> Any:
        return call(x * 2, residual, weight, epsilon=1e-6)

    weight = torch.ones(8)
    expected = opaque_norm(X * 2, residual, weight, 1e-6)
    torch.testing.assert_close(torch.compile(layer, backend=backend, fullgraph=True)(X, weight), expected)


def opaque_gating(A_log: Any, a: Any, b: Any, dt_bias: Any) -> Any:
    assert a.data_ptr() != 0
    return -A_log.exp() * torch.nn.functional.softplus(a + dt_bias), torch.sigmoid(b)


def test_tuple_of_results() -> None:
    adopt_default_manager(manager_of(vendor("a", "fused_gdn_gating", opaque_gating, opaque=True)))

    def layer(a: Any) -> Any:
        g, beta = call_op("fused_gdn_gating", torch.ones(8), a, a, torch.ones(8))
        return g + beta

    g, beta = opaque_gating(torch.ones(8), X, X, torch.ones(8))
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(X), g + beta)


def opaque_sum(input: Any, output: Any) -> None:
    assert output.data_ptr() != 0
    output.copy_(input.sum(1))


@backends
def test_mutating_operator(backend: str) -> None:
    adopt_default_manager(manager_of(vendor("a", "moe_sum", opaque_sum, opaque=True)))
    call = bind("moe_sum")

    def layer(x: Any, given: Any) -> Any:
        fresh = torch.zeros(3, 4)
        assert call(x, fresh) is None
        call(x + 1, given)
        return fresh * 2

    given = torch.zeros(3, 4)
    x = X.reshape(3, 2, 4)
    out = torch.compile(layer, backend=backend, fullgraph=True)(x, given)
    torch.testing.assert_close(out, x.sum(1) * 2)
    torch.testing.assert_close(given, (x + 1).sum(1))


def opaque_update(
    x: Any, weight: Any, bias: Any, conv_states: Any, cache_indices: Any, activation: str | None = "silu"
) -> Any:
    assert x.data_ptr() != 0
    conv_states.add_(1)
    return x * weight.sum()


def test_operator_that_writes_and_returns() -> None:
    adopt_default_manager(manager_of(vendor("a", "causal_conv1d_update", opaque_update, opaque=True)))

    def layer(x: Any, states: Any) -> Any:
        return call_op("causal_conv1d_update", x, torch.ones(2), None, states, torch.zeros(3)) + states.sum()

    states = torch.zeros(3, 8)
    out = torch.compile(layer, backend="aot_eager", fullgraph=True)(X, states)
    torch.testing.assert_close(out, X * 2 + 24)
    torch.testing.assert_close(states, torch.ones(3, 8))


def test_result_that_is_an_input_is_copied() -> None:
    adopt_default_manager(manager_of(vendor("a", "silu_and_mul", lambda x: x[..., :4], opaque=True)))

    def layer(x: Any) -> Any:
        return call_op("silu_and_mul", x).add_(1)

    before = X.clone()
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(X), before[..., :4] + 1)
    torch.testing.assert_close(X, before)


def test_sizes_stay_symbolic() -> None:
    adopt_default_manager(manager_of(vendor("a", "silu_and_mul", untraceable, opaque=True)))
    counter = CompileCounter()
    compiled = torch.compile(lambda x: call_op("silu_and_mul", x), backend=counter, fullgraph=True, dynamic=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), silu_and_mul(x))
    assert counter.frame_count == 1


def test_symbolic_integer_arguments() -> None:
    def align(
        topk_ids: Any,
        block_size: int,
        num_experts: int,
        expert_map: Any = None,
        pad_sorted_ids: bool = False,
        ignore_invalid_experts: bool = False,
    ) -> Any:
        assert topk_ids.data_ptr() != 0
        fakes = CATALOG["moe_align_block_size"].fake(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids)
        return tuple(fake.fill_(int(block_size)) for fake in fakes)

    adopt_default_manager(manager_of(vendor("a", "moe_align_block_size", align, opaque=True)))

    def layer(ids: Any, x: Any) -> Any:
        return call_op("moe_align_block_size", ids, x.shape[0], 4)[2]

    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    ids = torch.zeros(4, 2, dtype=torch.int32)
    assert [compiled(ids, torch.zeros(rows)).item() for rows in (3, 5, 7)] == [3, 5, 7]
    assert counter.frame_count == 1


def test_traced_call_is_counted_when_traced_opaque_one_at_each_run() -> None:
    for opaque, counted in ((False, 1), (True, 3)):
        torch._dynamo.reset()
        impl = vendor("a", "silu_and_mul", untraceable if opaque else silu_and_mul, opaque=opaque)
        manager = manager_of(impl)
        adopt_default_manager(manager)
        manager.count_calls()
        compiled = torch.compile(lambda x: call_op("silu_and_mul", x), backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(X)
        assert manager.call_counts() == {("silu_and_mul", "vendor.a"): counted}


def test_policy_change_recompiles() -> None:
    adopt_default_manager(
        manager_of(vendor("a", "silu_and_mul", lambda x: x[..., :4] * 0), reference("silu_and_mul", silu_and_mul))
    )
    bound = bind("silu_and_mul")
    compiled = torch.compile(lambda x: bound.fn(x), backend="eager", fullgraph=True)
    assert compiled(X).abs().sum() == 0
    set_global_policy(SelectionPolicy(prefer="reference"))
    torch.testing.assert_close(compiled(X), silu_and_mul(X))
    with with_preference("vendor"):
        assert compiled(X).abs().sum() == 0
    torch.testing.assert_close(compiled(X), silu_and_mul(X))
    with policy_context(SelectionPolicy(prefer="reference")):
        torch.testing.assert_close(compiled(X), silu_and_mul(X))


def test_compiled_graph_outlives_the_default_manager() -> None:
    adopt_default_manager(manager_of(vendor("a", "silu_and_mul", untraceable, opaque=True)))
    compiled = torch.compile(lambda x: call_op("silu_and_mul", x), backend="eager", fullgraph=True)
    compiled(X)
    reset_default_manager()
    adopt_default_manager(manager_of(vendor("b", "silu_and_mul", lambda x: untraceable(x) + 1, opaque=True)))
    torch.testing.assert_close(compiled(X), silu_and_mul(X) + 1)


def test_operators_of_other_managers_do_not_mix() -> None:
    managers = [
        manager_of(vendor("a", "silu_and_mul", lambda x, n=n: untraceable(x) * n, opaque=True)) for n in (2.0, 3.0)
    ]
    ops = [manager.bind("silu_and_mul") for manager in managers]
    compiled = torch.compile(lambda x: ops[0].fn(x) + ops[1].fn(x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), silu_and_mul(X) * 5)


def test_prepare_compile_defines_what_a_cached_graph_needs() -> None:
    manager = manager_of(vendor("a", "gemma_rms_norm", CATALOG["gemma_rms_norm"].fake, opaque=True))
    adopt_default_manager(manager)
    manager.prepare_compile()
    schema = torch.ops.vllm_fl.gemma_rms_norm.default._schema
    assert str(schema) == (
        "vllm_fl::gemma_rms_norm(Tensor x, Tensor? residual, Tensor weight, float epsilon) -> Tensor[]"
    )


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("silu_and_mul", "(Tensor x) -> Tensor"),
        ("rotary_embedding", None),
        ("moe_sum", "(Tensor input, Tensor(a1!) output) -> ()"),
        ("fused_gdn_gating", "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)"),
        (
            "per_token_group_quant_fp8",
            "(Tensor x, SymInt group_size, float eps=1e-10, bool column_major_scales=False, bool use_ue8m0=False)"
            " -> (Tensor, Tensor)",
        ),
    ],
)
def test_schemas(name: str, schema: str | None) -> None:
    if schema is None:
        assert schema_of(CATALOG[name]).endswith(" -> Tensor[]")
    else:
        assert schema_of(CATALOG[name]) == schema


def test_every_operator_of_tensors_can_be_behind_torch_library() -> None:
    for spec in CATALOG.values():
        if spec.name != "attention_backend":
            torch._C.parse_schema(f"vllm_fl::{spec.name}{schema_of(spec)}")


def odd(x: dict[str, Tensor]) -> Tensor:  # type: ignore[name-defined]  # noqa: F821
    """Takes what torch.library cannot."""


def varying(x: Tensor, many: bool) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[name-defined]  # noqa: F821
    """Writes, and returns one or two."""


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            OpSpec(fake=odd, called_from="here"),
            "odd(x): a parameter of type 'dict[str, Tensor]' cannot be behind torch.library",
        ),
        (
            OpSpec(fake=varying, called_from="here", mutates=("x",)),
            "varying(x, many): it writes arguments and the number of its results varies; fix the number",
        ),
    ],
    ids=["parameter", "results"],
)
def test_what_cannot_be_behind_torch_library(spec: OpSpec, message: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        schema_of(spec)
    assert str(caught.value) == message


def test_manager_that_is_gone() -> None:
    import gc

    manager = manager_of(vendor("a", "silu_and_mul", untraceable, opaque=True))
    manager.prepare_compile()
    name = manager.bind("silu_and_mul").opaque.name
    del manager
    gc.collect()
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.vllm_fl, name)(X)
    assert str(caught.value) == "the manager that a graph with silu_and_mul was compiled with is gone; compile again"


def test_managers_do_not_meet(default: Callable[..., OpManager]) -> None:
    """Two threads' eager calls are not disturbed by a compilation in between."""
    default(vendor("a", "silu_and_mul", untraceable, opaque=True))
    eager = call_op("silu_and_mul", X)
    torch.compile(lambda x: call_op("silu_and_mul", x), backend="eager", fullgraph=True)(X)
    torch.testing.assert_close(call_op("silu_and_mul", X), eager)
