"""The MoE layers: what they hand to the operators, against the formulas written out token by token in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from vllm_fl.integration.layers import moe

EXPERTS, HIDDEN, INNER, TOPK, TOKENS = 6, 16, 24, 2, 9
pytestmark = pytest.mark.usefixtures("vllm_config")


def make_method(activation: MoEActivation = MoEActivation.SILU, has_bias: bool = False, experts: int = EXPERTS) -> Any:
    config = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=TOPK,
        hidden_dim=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=experts,
        num_logical_experts=experts,
        activation=activation,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.float32,
        has_bias=has_bias,
    )
    return UnquantizedFusedMoEMethod(config)


def make_layer(method: Any, experts: int = EXPERTS, **attributes: Any) -> Any:
    """A container of experts with random weights, as vLLM's loader leaves it."""
    layer = torch.nn.Module()
    layer.activation = method.moe.activation
    layer.apply_router_weight_on_input = False
    layer.expert_map = None
    for name, value in attributes.items():
        setattr(layer, name, value)
    method.create_weights(layer, experts, HIDDEN, INNER, torch.float32)
    random = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=random)
    return layer


def inputs(experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=random)
    weights = torch.rand(TOKENS, TOPK, generator=random)
    ids = torch.stack([torch.randperm(experts, generator=random)[:TOPK] for _ in range(TOKENS)]).int()
    return x, weights, ids


def expected(layer: Any, act: Callable[[torch.Tensor], torch.Tensor], experts: tuple[int, ...]) -> torch.Tensor:
    """Sum over each token's choices among `experts`, whose weights are the layer's in that order."""
    x, weights, ids = inputs()
    w13, w2 = layer.w13_weight.double(), layer.w2_weight.double()
    b13 = getattr(layer, "w13_bias", w13.new_zeros(w13.shape[:2])).double()
    b2 = getattr(layer, "w2_bias", w2.new_zeros(w2.shape[:2])).double()
    result = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for choice in range(TOPK):
            if int(ids[token, choice]) in experts:
                e = experts.index(int(ids[token, choice]))
                inner = act(w13[e] @ x[token].double() + b13[e])
                result[token] += float(weights[token, choice]) * (w2[e] @ inner + b2[e])
    return result


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x[:INNER]) * x[INNER:]


def gpt_oss(x: torch.Tensor) -> torch.Tensor:
    """GptOssExperts of transformers: gates in the even places."""
    gate, up = x[::2].clamp(max=7.0), x[1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def run(method: Any, layer: Any) -> torch.Tensor:
    method.process_weights_after_loading(layer)
    x, weights, ids = inputs()
    return method.apply(layer, x, weights, ids, None, None).double()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


def test_vllm_builds_our_method_which_leaves_routing_to_the_router(spy: Any) -> None:
    method, seen = make_method(), spy("fused_experts")
    assert type(method) is moe.FLUnquantizedFusedMoEMethod
    assert method.is_monolithic is False
    layer = make_layer(method)
    assert_same(run(method, layer), expected(layer, silu_and_mul, tuple(range(EXPERTS))))
    assert seen.calls == 1


def test_biases_and_the_interleaved_gates_of_gpt_oss() -> None:
    method = make_method(MoEActivation.SWIGLUOAI, has_bias=True)
    layer = make_layer(method)
    want = expected(layer, gpt_oss, tuple(range(EXPERTS)))  # before the rows change places
    assert_same(run(method, layer), want)


def test_experts_of_other_ranks_contribute_nothing() -> None:
    local = (1, 3, 4)
    method = make_method(experts=len(local))
    expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
    expert_map[list(local)] = torch.arange(len(local), dtype=torch.int32)
    layer = make_layer(method, experts=len(local), expert_map=expert_map)
    assert_same(run(method, layer), expected(layer, silu_and_mul, local))


def test_router_weights_on_the_input_reach_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method()
    layer = make_layer(method, apply_router_weight_on_input=True)
    method.process_weights_after_loading(layer)
    given: list[Any] = []
    monkeypatch.setattr(moe._fused_experts, "fn", lambda *args: given.extend(args))
    x, weights, ids = inputs()
    method.apply(layer, x, weights, ids, None, None)
    assert given[5:8] == ["silu", True, None]


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_tanh"),
        ("relu2_no_mul", "relu2_no_mul"),
        ("swigluoai", "swigluoai"),
    ],
)
def test_names_of_activations(activation: str, name: str) -> None:
    assert moe.expert_activation(SimpleNamespace(activation=MoEActivation(activation))) == name
    assert moe.expert_activation(SimpleNamespace(activation=activation)) == name


def test_the_packed_swigluoai_needs_the_constants_of_gpt_oss() -> None:
    layer = SimpleNamespace(
        activation=MoEActivation.SWIGLUOAI_UNINTERLEAVE, swiglu_alpha=1.702, swiglu_beta=1.0, swiglu_limit=7.0
    )
    assert moe.expert_activation(layer) == "swigluoai"
    layer.swiglu_limit = 10.0
    with pytest.raises(NotImplementedError) as caught:
        moe.expert_activation(layer)
    assert str(caught.value) == (
        "fused_experts has no activation 'swigluoai_uninterleave' with swiglu_alpha=1.702, swiglu_beta=1.0, "
        "swiglu_limit=10.0; it has gelu, gelu_no_mul, gelu_tanh, gelu_tanh_no_mul, relu2_no_mul, silu, silu_no_mul, "
        "swigluoai without constants. To use vLLM's own experts, set "
        "VLLM_FL_OOT_BLACKLIST=unquantized_fused_moe_method"
    )


@pytest.mark.parametrize(
    "attributes", [{"activation": "swiglustep"}, {"activation": "silu", "swiglu_limit": 5.0}], ids=str
)
def test_an_activation_that_would_be_wrong_is_refused_at_load(attributes: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"^fused_experts has no activation "):
        moe.expert_activation(SimpleNamespace(**attributes))


def route(router: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ours = moe.dispatched_router(router)
    return ours.select_experts(hidden_states=torch.empty(len(logits), HIDDEN), router_logits=logits)


def by_hand(
    logits: torch.Tensor,
    topk: int,
    *,
    sigmoid: bool,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.double().sigmoid() if sigmoid else logits.double().softmax(-1)
    chosen = (scores if bias is None else scores + bias.double()).topk(topk).indices
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * factor, chosen


def assert_routed(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    weights, ids = got
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    torch.testing.assert_close(ids.long(), want[1])
    torch.testing.assert_close(weights.double(), want[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "plain"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_plain_routing(scoring: str, renormalize: bool, spy: Any) -> None:
    logits, seen = torch.randn(7, 8), spy(f"topk_{scoring}")
    router = FusedTopKRouter(3, 8, scoring_func=scoring, renormalize=renormalize)
    want = by_hand(logits, 3, sigmoid=scoring == "sigmoid", renormalize=renormalize)
    assert_routed(route(router, logits), want)
    assert seen.calls == 1


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_routing_with_a_bias(scoring: str, spy: Any) -> None:
    logits, bias, seen = torch.randn(7, 8), torch.randn(8), spy(f"topk_{scoring}")
    router = FusedTopKBiasRouter(
        3, 8, e_score_correction_bias=bias, renormalize=True, routed_scaling_factor=2.5, scoring_func=scoring
    )
    want = by_hand(logits, 3, sigmoid=scoring == "sigmoid", renormalize=True, bias=bias, factor=2.5)
    assert_routed(route(router, logits), want)
    assert seen.calls == 1


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_grouped_routing_keeps_to_the_best_groups(scoring: str, with_bias: bool, spy: Any) -> None:
    logits, seen = torch.randn(7, 8), spy("grouped_topk")
    bias = torch.randn(8) if with_bias else None
    router = GroupedTopKRouter(
        2, 8, 4, 2, scoring_func=scoring, routed_scaling_factor=1.5, e_score_correction_bias=bias
    )
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    groups = (scores if bias is None else scores + bias).view(7, 4, 2)
    groups = groups.max(-1).values if bias is None else groups.sum(-1)
    allowed = torch.zeros(7, 4, dtype=torch.bool).scatter_(1, groups.topk(2).indices, True).repeat_interleave(2, 1)
    biased = (scores if bias is None else scores + bias).masked_fill(~allowed, float("-inf"))
    chosen = biased.topk(2).indices
    weights = scores.gather(1, chosen)
    weights = 1.5 * weights / weights.sum(-1, keepdim=True)
    assert_routed(route(router, logits), (weights.double(), chosen))
    assert seen.calls == 1


def test_groups_that_do_not_divide_the_experts_are_routed_without_groups() -> None:
    logits = torch.randn(7, 9)
    router = GroupedTopKRouter(2, 9, 4, 2, renormalize=True)
    assert_routed(route(router, logits), by_hand(logits, 2, sigmoid=False, renormalize=True))


def test_a_router_of_another_class_is_left_alone() -> None:
    router = CustomRoutingRouter(2, 8, custom_routing_function=lambda **_: None)
    assert moe.dispatched_router(router) is router


def test_our_router_keeps_what_vllm_has_set() -> None:
    router = FusedTopKRouter(2, 8)
    seen: list[torch.Tensor] = []
    router.set_capture_fn(seen.append)
    _, ids = route(router, torch.randn(3, 8))
    assert torch.equal(seen[0], ids)
