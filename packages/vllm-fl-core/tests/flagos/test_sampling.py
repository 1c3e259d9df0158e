"""Repetition penalties, top k and top p against the reference."""

from __future__ import annotations

import functools

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE_IDS, DTYPES, check, cut, maker

from vllm_fl.catalog import CATALOG, Case, InputMaker
from vllm_fl.flagos.kernels.sampling import apply_repetition_penalties, apply_top_k_top_p

WITH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
TOP_K_TOP_P = CATALOG["apply_top_k_top_p"]
#: The catalogue's cases; the interpreter has no time for the large ones.
CASES = [
    case.name
    for case in TOP_K_TOP_P.inputs(InputMaker(torch.float32))
    if DEVICE != "cpu" or case.args[0].numel() <= 10_000
]


@WITH_DTYPES
@pytest.mark.parametrize("shape", [(3, 100), (2, 1030), (1, 1), (0, 8)], ids=str)
def test_penalties(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    make = maker(dtype)
    prompt, output = make.integers(0, 2, 2, *shape).bool()
    penalties = make.uniform(0.5, 2.0, shape[0])
    check(apply_repetition_penalties, "apply_repetition_penalties", make.normal(*shape), prompt, output, penalties)


def test_penalties_in_rows_of_wider_tensors(device: str) -> None:
    make = maker()
    logits, (prompt, output) = cut(make.normal(4, 50), 64), make.integers(0, 2, 2, 4, 50).bool()
    penalties = torch.tensor([1.0, 1.5, 1.0, 0.7], device=device)
    check(apply_repetition_penalties, "apply_repetition_penalties", logits, cut(prompt, 70), output, penalties)


def test_penalties_leave_the_rest_alone(device: str) -> None:
    logits = torch.tensor([[1.0, -1.0, float("-inf"), float("nan")]] * 2, device=device)
    seen = torch.tensor([[True, True, True, True], [False] * 4], device=device)
    apply_repetition_penalties(logits, seen, torch.zeros_like(seen), torch.full((2,), 2.0, device=device))
    assert str(logits.tolist()) == "[[0.5, -2.0, -inf, nan], [1.0, -1.0, -inf, nan]]"


@functools.cache
def _cases(dtype: torch.dtype) -> dict[str, Case]:
    return {case.name: case for case in TOP_K_TOP_P.inputs(maker(dtype))}


@WITH_DTYPES
@pytest.mark.parametrize("name", CASES)
def test_top_k_top_p(device: str, dtype: torch.dtype, name: str) -> None:
    logits, top_k, top_p = _cases(dtype)[name].args
    check(apply_top_k_top_p, "apply_top_k_top_p", logits.clone(), top_k, top_p)


@pytest.mark.parametrize("k", [1, 2, 3, 7, 100, 299])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e20])
def test_top_k_counts(device: str, k: int, scale: float) -> None:
    """As many as asked for stay, and they are the highest, for values of any size on both sides of 0."""
    logits = maker(seed=k).normal(2, 300) * scale
    want = logits.topk(k).values
    apply_top_k_top_p(logits, torch.full((2,), k, device=device), None)
    assert torch.equal(logits.topk(k).values, want)
    assert torch.isfinite(logits).sum(1).tolist() == [k, k]


def test_both_zeros_are_equal(device: str) -> None:
    logits = torch.tensor([[0.0, -0.0, -1.0, 1.0]], device=device)
    apply_top_k_top_p(logits, torch.tensor([2], device=device), None)
    assert str(logits.tolist()) == "[[0.0, -0.0, -inf, 1.0]]"


def test_sharp_and_flat_distributions(device: str) -> None:
    logits = torch.zeros(2, 64, device=device)
    logits[0, 5] = 100.0
    logits[1] = torch.arange(64, device=device) * 1e-3
    check(apply_top_k_top_p, "apply_top_k_top_p", logits, None, torch.tensor([0.9, 0.4999], device=device))


def test_nothing_left_by_a_mask(device: str) -> None:
    logits = torch.full((2, 32), float("-inf"), device=device)
    logits[1, 3] = 1.0
    want = logits.clone()
    apply_top_k_top_p(logits, torch.tensor([3, 3], device=device), torch.tensor([0.5, 0.5], device=device))
    assert torch.equal(logits, want)


def test_refuses_a_strided_last_dimension(device: str) -> None:
    logits = torch.zeros(4, 16, device=device)
    with pytest.raises(NotImplementedError) as caught:
        apply_top_k_top_p(logits[:, ::2], torch.ones(4, device=device), None)
    assert str(caught.value) == "logits: the last dimension has stride 2, expected 1"
