"""Products with adapters against float64, for batches of requests with different adapters and with none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="the wrapper is a class of vLLM's")
from vllm.lora.layers import LoRAMapping

from vllm_fl_reference.lora import GroupedLoRA

ADAPTERS, RANK, WIDTH, OUTPUTS = 3, 4, 10, 12
#: Adapter of each token; 0 is none. Adapter 7 is in the last place.
TOKENS = (5, 5, 0, 7, 0, 0, 5, 7)
#: Adapter of each row that is sampled from.
SAMPLES = (5, 0, 7)
PLACES = [5, None, 7]
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture
def wrapper() -> GroupedLoRA:
    made = GroupedLoRA(32, 8, "cpu")
    made.update_metadata(LoRAMapping(TOKENS, SAMPLES, is_prefill=True), PLACES, ADAPTERS, 100)
    return made


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def expected(x: Tensor, stacked: Tensor, adapters: tuple[int, ...], scale: float = 1.0) -> Tensor:
    """[rows, outputs], float64; zeros where there is no adapter."""
    rows = []
    for row, adapter in zip(x.double(), adapters, strict=True):
        matrix = stacked[PLACES.index(adapter), 0].double() if adapter else torch.zeros(stacked.shape[2:]).double()
        rows.append(scale * matrix @ row)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear(wrapper: GroupedLoRA, dtype: torch.dtype) -> None:
    """Two packed matrices, the result added to the columns of each; rows beyond the tokens stay."""
    widths = (OUTPUTS, 5)
    x = draw(len(TOKENS) + 2, WIDTH, dtype=dtype)
    a = [draw(ADAPTERS, 1, RANK, WIDTH, dtype=dtype) + i for i in range(2)]
    b = [draw(ADAPTERS, 1, width, RANK, dtype=dtype) for width in widths]
    before = draw(len(x), sum(widths), dtype=dtype)
    y = before.clone()
    wrapper.add_lora_linear(y, x, tuple(a), tuple(b), 0.5, widths)
    inner = [expected(x[: len(TOKENS)], matrix, TOKENS, 0.5) for matrix in a]
    added = torch.cat([expected(rows, matrix, TOKENS) for rows, matrix in zip(inner, b, strict=True)], dim=1)
    tolerance = CLOSE if dtype == torch.float32 else {"atol": 0.5, "rtol": 2e-2}
    torch.testing.assert_close(y[: len(TOKENS)].double(), before[: len(TOKENS)].double() + added, **tolerance)
    without = [i for i, adapter in enumerate(TOKENS) if not adapter] + [len(TOKENS), len(TOKENS) + 1]
    assert torch.equal(y[without], before[without])


def test_embedding(wrapper: GroupedLoRA) -> None:
    picked, b, before = draw(len(TOKENS), RANK), draw(ADAPTERS, 1, OUTPUTS, RANK), draw(len(TOKENS), OUTPUTS)
    y = before.clone()
    wrapper.add_lora_embedding(y, picked, b, add_input=True)
    torch.testing.assert_close(y.double(), before.double() + expected(picked, b, TOKENS), **CLOSE)


@pytest.mark.parametrize("columns", [OUTPUTS, OUTPUTS + 3, OUTPUTS - 3])
def test_logits(wrapper: GroupedLoRA, columns: int) -> None:
    """Rows that are sampled from; the logits may be padded otherwise than the adapter."""
    x, before = draw(len(SAMPLES), WIDTH), draw(len(SAMPLES), columns)
    a, b = draw(ADAPTERS, 1, RANK, WIDTH), draw(ADAPTERS, 1, OUTPUTS, RANK)
    y = before.clone()
    wrapper.add_lora_logits(y, x, a, b, 2.0)
    added = expected(expected(x, a, SAMPLES, 2.0), b, SAMPLES)[:, :columns]
    torch.testing.assert_close(y[:, : added.shape[1]].double(), before[:, : added.shape[1]].double() + added, **CLOSE)
    assert torch.equal(y[:, OUTPUTS:], before[:, OUTPUTS:])


def test_without_adapters_nothing_changes(wrapper: GroupedLoRA) -> None:
    wrapper.update_metadata(LoRAMapping((0, 0), (0,), is_prefill=True), PLACES, ADAPTERS, 100)
    x, a, b = draw(2, WIDTH), draw(ADAPTERS, 1, RANK, WIDTH), draw(ADAPTERS, 1, OUTPUTS, RANK)
    y = torch.ones(2, OUTPUTS)
    wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (OUTPUTS,))
    wrapper.add_lora_logits(y[:1], x[:1], a, b, 1.0)
    assert (y == 1).all()
