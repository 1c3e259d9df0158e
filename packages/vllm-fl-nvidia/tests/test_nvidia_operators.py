"""What vLLM's compiled kernels compute otherwise than the catalogue says is refused before they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_fl_nvidia.ops import OPERATORS, attention, moe


def _routing(operator: Callable[..., None], experts: int) -> None:
    outputs = (torch.empty(2, 3), torch.empty(2, 3, dtype=torch.int32), torch.empty(2, 3, dtype=torch.int32))
    operator(*outputs, torch.zeros(2, experts), False, torch.zeros(experts))


def _groups_of_one() -> None:
    moe.grouped_topk(torch.zeros(2, 8), 8, 4, 3, True, 1.0, torch.zeros(8), 1)


def _small_heads() -> None:
    # keys beside values, so that heads lie apart; a cache of its own for each has them one after another
    both = torch.zeros(4, 8, 2, 16).transpose(1, 2)
    rows = torch.zeros(3, 2, 8)
    attention.reshape_and_cache(rows, rows, both[..., :8], both[..., 8:], torch.arange(3))


def _heads_apart() -> None:
    caches = torch.zeros(2, 4, 2, 8, 64).unbind()
    attention.reshape_and_cache(torch.zeros(3, 2, 64), torch.zeros(3, 2, 128)[..., :64], *caches, torch.arange(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: _routing(moe.topk_softmax, 6),
            "vLLM's kernel chooses by biased scores among 2^n experts up to 512, not among 6",
        ),
        (
            lambda: _routing(moe.topk_sigmoid, 1024),
            "vLLM's kernel chooses by biased scores among 2^n experts up to 512, not among 1024",
        ),
        (_groups_of_one, "vLLM's grouped_topk scores a group by two experts; these groups have one"),
        (_small_heads, "vLLM's reshape_and_cache_flash never ends with less than a warp of entries a token"),
        (_heads_apart, "vLLM's reshape_and_cache_flash wants the heads of a token contiguous"),
    ],
    ids=["softmax", "sigmoid", "groups of one", "small heads", "heads apart"],
)
def test_refusals(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        call()
    assert str(caught.value) == message


def test_experts_in_float32_are_left_to_others() -> None:
    """The kernel would multiply in TF32."""
    assert OPERATORS["fused_experts"].dtypes == {"float16", "bfloat16"}
