"""torch.compile traces the operators whole, once for every number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import vllm_fl_reference.ops as ops
from vllm_fl.catalog import InputMaker

Inputs = Callable[[InputMaker, int], tuple[Any, ...]]
CACHE = 40


def _router(maker: InputMaker, tokens: int) -> tuple[Any, ...]:
    indices = torch.zeros(tokens, 3, dtype=torch.int32)
    return maker.full(0.0, tokens, 3), indices, indices.clone(), maker.normal(tokens, 16), True


def _slots(maker: InputMaker, tokens: int) -> Tensor:
    """Different slots, some of them padding."""
    slots = maker.permutation(CACHE - 1, dtype=torch.int64)[:tokens] + 1
    slots[1], slots[2] = 0, -1
    return slots


def _cache(maker: InputMaker, tokens: int) -> tuple[Any, ...]:
    cache, slots = maker.normal(6, 8, 2, 16).transpose(1, 2), _slots(maker, tokens)
    return maker.normal(tokens, 2, 8), maker.normal(tokens, 2, 8), cache[..., :8], cache[..., 8:], slots


def _delta(maker: InputMaker, tokens: int) -> tuple[Any, ...]:
    q, k, v = maker.normal(tokens, 2, 8), maker.normal(tokens, 2, 8), maker.normal(tokens, 4, 8)
    rates = -maker.uniform(0, 1, tokens, 4), maker.uniform(0, 1, tokens, 4)
    return q, k, v, *rates, maker.normal(CACHE, 4, 8, 8), _slots(maker, tokens)


def _convolution(maker: InputMaker, tokens: int) -> tuple[Any, ...]:
    starts = torch.tensor([0, 1, 3, tokens])
    sequences = starts, torch.tensor([4, 0, 2]), torch.tensor([True, True, False])
    return maker.normal(tokens, 6), maker.normal(6, 4), None, maker.normal(CACHE, 6, 3), *sequences


def _experts(maker: InputMaker, tokens: int) -> tuple[Any, ...]:
    ids = maker.integers(0, 4, tokens, 2)
    return maker.normal(tokens, 16), maker.normal(4, 16, 16), maker.normal(4, 16, 8), maker.normal(tokens, 2), ids


def _penalties(maker: InputMaker, tokens: int) -> tuple[Any, ...]:
    seen = maker.integers(0, 2, tokens, 30) > 0
    return maker.normal(tokens, 30), seen, ~seen, maker.uniform(0.5, 2, tokens)


INPUTS: dict[str, Inputs] = {
    "silu_and_mul": lambda m, t: (m.normal(t, 32),),
    "gelu_and_mul": lambda m, t: (m.normal(t, 32), "tanh"),
    "rms_norm": lambda m, t: (m.normal(t, 32), m.normal(t, 32), m.normal(32), 1e-6),
    "gemma_rms_norm": lambda m, t: (m.normal(t, 32), m.normal(t, 32), m.normal(32), 1e-6),
    "rms_norm_gated": lambda m, t: (m.normal(t, 32), m.normal(t, 32), m.normal(32), 1e-6, 8),
    "rotary_embedding": lambda m, t: (
        m.normal(t, 4, 16),
        m.normal(t, 2, 16),
        m.normal(50, 6),
        m.normal(50, 6),
        m.integers(0, 50, t, dtype=torch.int64),
        True,
    ),
    "reshape_and_cache": _cache,
    "concat_and_cache_mla": lambda m, t: (m.normal(t, 8), m.normal(t, 4), m.normal(6, 8, 12), _slots(m, t)),
    "topk_softmax": _router,
    "topk_sigmoid": _router,
    "grouped_topk": lambda m, t: (m.normal(t, 16), 4, 2, 3, True, 1.5, m.normal(16), 1),
    "moe_sum": lambda m, t: (m.normal(t, 3, 16), m.full(0.0, t, 16)),
    "fused_experts": _experts,
    "causal_conv1d_fn": _convolution,
    "causal_conv1d_update": lambda m, t: (
        m.normal(t, 6),
        m.normal(6, 4),
        m.normal(6),
        m.normal(CACHE, 6, 3),
        _slots(m, t),
    ),
    "fused_gdn_gating": lambda m, t: (m.normal(4), m.normal(t, 4), m.normal(t, 4), m.normal(4)),
    "fused_recurrent_gated_delta_rule": _delta,
    "apply_repetition_penalties": _penalties,
    "apply_top_k_top_p": lambda m, t: (m.normal(t, 30), m.integers(1, 30, t), m.uniform(0.2, 1, t)),
    "compute_slot_mapping": lambda m, t: (
        torch.tensor([0, 2, 4]),
        torch.arange(t),
        m.integers(1, 90, 2, 8),
        torch.zeros(t, dtype=torch.int64),
        8,
    ),
    "moe_align_block_size": lambda m, t: (m.integers(0, 6, t, 2), 4, 6, m.permutation(6)),
    "scaled_mm": lambda m, t: (
        m.normal(t, 32, dtype=torch.float8_e4m3fn),
        m.normal(32, 64, dtype=torch.float8_e4m3fn),
        m.uniform(0.1, 1, t, 2, dtype=torch.float32),
        m.uniform(0.1, 1, 2, 4, dtype=torch.float32),
        "bfloat16",
    ),
    "per_token_group_quant_fp8": lambda m, t: (m.normal(t, 32), 16, 1e-10, False, True),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def tensors(values: Any) -> list[Tensor]:
    """All tensors in nested lists and tuples, as float64."""
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors(value)]
    return [values.to(torch.float64)] if isinstance(values, Tensor) else []


@pytest.mark.parametrize("name", INPUTS)
def test_one_graph_for_every_number_of_tokens(name: str) -> None:
    function = getattr(ops, name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for tokens in (9, 5, 17):
        maker = InputMaker(torch.bfloat16, seed=tokens)
        args = INPUTS[name](maker, tokens)
        ours, expected = ([x.clone() if isinstance(x, Tensor) else x for x in args] for _ in range(2))
        for x in ours:
            if isinstance(x, Tensor) and x.shape[0] == tokens:
                torch._dynamo.mark_dynamic(x, 0)
        results, wanted = compiled(*ours), function(*expected)
        for ours_now, wanted_now in zip(tensors([*ours, results]), tensors([*expected, wanted]), strict=True):
            torch.testing.assert_close(ours_now, wanted_now, rtol=1e-2, atol=1e-2)
    assert counters["stats"]["unique_graphs"] == 1
