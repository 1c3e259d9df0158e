"""Mixture of experts: routing and expert computation, of models whose experts are not quantised.

vLLM's runner stays in charge: it applies the gate, runs the shared experts and adds them, and reduces over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
    UnquantizedMoeBackend,
)

from vllm_fl.dispatch import bind

from . import replace

_fused_experts = bind("fused_experts")
_grouped_topk = bind("grouped_topk")
_topk_sigmoid = bind("topk_sigmoid")
_topk_softmax = bind("topk_softmax")

#: vLLM's names that `fused_experts` knows under the same name.
_ACTIVATIONS = frozenset(
    {"silu", "gelu", "gelu_tanh", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"}
)
#: Of OpenAI's gpt-oss: slope of the sigmoid, addend of the linear half, bound of both halves.
_SWIGLUOAI = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
_SCORING = {"sigmoid": 1, "softmax": 2}


class FLUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):
    """Experts through the operator ``fused_experts``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # On platforms with kernels of vLLM's, this leaves the weights as they are loaded.
        self.unquantized_backend = UnquantizedMoeBackend.OOT
        self.experts_cls = None
        self._activation = ""

    @property
    def is_monolithic(self) -> bool:
        """Routing is the router's, not the experts'."""
        return False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Settle the activation, and bring the rows of ``w13`` into the operator's order.

        Raises:
            NotImplementedError: `fused_experts` has no such activation; the message names it.
        """
        super().process_weights_after_loading(layer)
        self._activation = expert_activation(layer)
        if _name(layer) == "swigluoai":
            for parameter in (layer.w13_weight, getattr(layer, "w13_bias", None)):
                if parameter is not None:
                    parameter.data.copy_(gate_rows_first(parameter.data))

    def forward_oot(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Output of the routed experts [T, H]; the runner has already run the shared ones."""
        return _fused_experts.fn(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            self._activation,
            layer.apply_router_weight_on_input,
            layer.expert_map,
            getattr(layer, "w13_bias", None),
            getattr(layer, "w2_bias", None),
        )

    forward_native = forward_oot
    forward_cuda = forward_oot


def _name(layer: Any) -> str:
    return str(getattr(layer.activation, "value", layer.activation))


def expert_activation(layer: Any) -> str:
    """The name that `fused_experts` has for the activation of a layer of experts.

    Args:
        layer: has ``activation``, and may have ``swiglu_alpha``, ``swiglu_beta`` and ``swiglu_limit``.

    Raises:
        NotImplementedError: it has none, or not with these constants.
    """
    name = _name(layer)
    constants = {key: getattr(layer, key, None) for key in _SWIGLUOAI}
    if name == "swigluoai":  # vLLM fixes the constants
        return name
    if name == "swigluoai_uninterleave" and constants == _SWIGLUOAI:
        return "swigluoai"
    if name in _ACTIVATIONS and constants["swiglu_limit"] is None:
        return name
    given = ", ".join(f"{key}={value}" for key, value in constants.items() if value is not None)
    raise NotImplementedError(
        f"fused_experts has no activation {name!r}{' with ' + given if given else ''}; it has "
        f"{', '.join(sorted({*_ACTIVATIONS, 'swigluoai'}))} without constants. "
        "To use vLLM's own experts, set VLLM_FL_OOT_BLACKLIST=unquantized_fused_moe_method"
    )


def gate_rows_first(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2 * I, ...] with gate and linear rows in turn -> all gate rows, then all linear rows."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def _topk(router: Any, logits: torch.Tensor, indices_type: torch.dtype | None, bias: torch.Tensor | None) -> Any:
    shape = (logits.shape[0], router.top_k)
    weights = logits.new_empty(shape, dtype=torch.float32)
    ids = logits.new_empty(shape, dtype=indices_type or torch.int32)
    order = logits.new_empty(shape, dtype=torch.int32)
    factor = getattr(router, "routed_scaling_factor", 1.0)
    if router.scoring_func == "sigmoid":
        _topk_sigmoid.fn(weights, ids, order, logits, router.renormalize, bias, factor)
    else:
        _topk_softmax.fn(weights, ids, order, logits, router.renormalize, bias)
        if factor != 1.0:
            weights *= factor
    return weights, ids


class FLFusedTopKRouter(FusedTopKRouter):
    """Routing through the operators ``topk_softmax`` and ``topk_sigmoid``."""

    def _compute_routing(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, indices_type: torch.dtype | None, **kwargs: Any
    ) -> Any:
        if self.scoring_func not in _SCORING:
            return super()._compute_routing(hidden_states, router_logits, indices_type, **kwargs)
        return _topk(self, router_logits, indices_type, None)


class FLFusedTopKBiasRouter(FusedTopKBiasRouter):
    """The same with a bias on the choice. Lookup tables and experts appended to the choice stay vLLM's."""

    def _compute_routing(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, indices_type: torch.dtype | None, **kwargs: Any
    ) -> Any:
        table = getattr(self, "_hash_indices_table", None)
        if self.scoring_func not in _SCORING or table is not None or getattr(self, "num_fused_shared_experts", False):
            return super()._compute_routing(hidden_states, router_logits, indices_type, **kwargs)
        return _topk(self, router_logits, indices_type, self.e_score_correction_bias)


class FLGroupedTopKRouter(GroupedTopKRouter):
    """Routing through the operator ``grouped_topk``."""

    def _compute_routing(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, indices_type: torch.dtype | None, **kwargs: Any
    ) -> Any:
        groups, experts = self.num_expert_group, router_logits.shape[-1]
        if self.scoring_func not in _SCORING or experts <= groups or experts % groups:
            return super()._compute_routing(hidden_states, router_logits, indices_type, **kwargs)
        return _grouped_topk.fn(
            router_logits,
            groups,
            self.topk_group,
            self.top_k,
            self.renormalize,
            self.routed_scaling_factor,
            self.e_score_correction_bias,
            _SCORING[self.scoring_func],
        )


_ROUTERS: dict[type, type] = {
    FusedTopKRouter: FLFusedTopKRouter,
    FusedTopKBiasRouter: FLFusedTopKBiasRouter,
    GroupedTopKRouter: FLGroupedTopKRouter,
}


def dispatched_router(router: Any) -> Any:
    """A router of vLLM's that asks dispatch instead; one of an unknown class comes back as it is.

    vLLM has no registry of routers, and builds them before it builds the runner that uses them.
    """
    ours = _ROUTERS.get(type(router))
    if ours is None:
        return router
    copy: Any = object.__new__(ours)
    copy.__dict__.update(router.__dict__)
    return copy


class FLMoERunner(MoERunner):
    """The runner, with a router that asks dispatch."""

    def __init__(self, *args: Any, router: Any, **kwargs: Any) -> None:
        super().__init__(*args, router=dispatched_router(router), **kwargs)


def register_unquantized_fused_moe_method() -> None:
    replace(UnquantizedFusedMoEMethod, FLUnquantizedFusedMoEMethod, "unquantized_fused_moe")


def register_fused_moe() -> None:
    replace(MoERunner, FLMoERunner)
