"""Repetition penalties, top k and top p against the reference."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE_IDS, DTYPES, check, cut, maker

from vllm_fl.catalog import CATALOG, Case, InputMaker
from vllm_fl.flagos.kernels import sampling
from vllm_fl.flagos.kernels.sampling import apply_repetition_penalties, apply_top_k_top_p

WITH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
TOP_K_TOP_P = CATALOG["apply_top_k_top_p"]
#: Without plans, which would outlive a change of the module's constants.
unplanned_top_k_top_p = inspect.unwrap(apply_top_k_top_p)
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


def _tailed(rows: int, size: int) -> torch.Tensor:
    """Far from normal above: what lies above a multiple of the standard deviation says little about the top k."""
    return maker(seed=3).normal(rows, size).exp() * 2.0


#: Distributions by name, as functions of the number of rows and of entries.
DISTRIBUTIONS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda rows, size: maker().normal(rows, size, scale=3.0),
    "tail above": _tailed,
    "tail below": lambda rows, size: -_tailed(rows, size),
    "flat": lambda rows, size: maker().uniform(1000.0, 1000.01, rows, size),
    "huge": lambda rows, size: maker().normal(rows, size) * 1e38,
    "ties": lambda rows, size: maker().normal(rows, size, scale=2.0).round(),
    "equal": lambda rows, size: torch.full((rows, size), -7.5, device=DEVICE),
    "few left by a mask": lambda rows, size: (
        maker().normal(rows, size).masked_fill(maker(seed=1).integers(0, 20, rows, size) > 0, float("-inf"))
    ),
}


@pytest.mark.parametrize("capacity", [1, 8, 64, 1024])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_entries_fit_into_the_list_or_do_not(
    device: str, monkeypatch: pytest.MonkeyPatch, name: str, capacity: int
) -> None:
    """Both limits by sorting a list of entries, by passes over the row, and first so and then so."""
    monkeypatch.setattr(sampling, "_CAPACITY", capacity)
    logits = DISTRIBUTIONS[name](4, 700)
    top_k = torch.tensor([1, 5, 60, 699], device=device)
    for k in (None, top_k):
        for p in (None, torch.tensor([0.0, 0.3123, 0.6123, 0.9123], device=device)):
            check(unplanned_top_k_top_p, "apply_top_k_top_p", logits.clone(), k, p)


@pytest.mark.parametrize("capacity", [16, 1024])
@pytest.mark.parametrize("tied", [3, 400])
def test_ties_at_the_threshold(device: str, monkeypatch: pytest.MonkeyPatch, capacity: int, tied: int) -> None:
    """All entries equal to the k-th stay, also if the list has no room for them, and the nucleus may take them away."""
    monkeypatch.setattr(sampling, "_CAPACITY", capacity)
    logits = torch.linspace(-9.0, -5.0, 500, device=device).repeat(3, 1)
    logits[:, 50 : 50 + tied] = 1.0
    logits[:, 10], logits[:, 20] = 9.0, 2.0
    top_k, top_p = torch.tensor([3, 4, 3], device=device), torch.tensor([1.0, 0.9999, 0.5], device=device)
    check(unplanned_top_k_top_p, "apply_top_k_top_p", logits.clone(), top_k, None)
    got = logits.clone()
    check(unplanned_top_k_top_p, "apply_top_k_top_p", got, top_k, top_p)
    assert torch.isfinite(got).sum(1).tolist() == [2 + tied, 2 + tied, 1]


def test_two_passes_find_the_top_k(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long row of the distribution that the first guess is made for."""
    if DEVICE != "cpu":
        pytest.skip("calls inside of a kernel can be seen in the interpreter only")
    monkeypatch.setattr(sampling, "_weigh", None)  # no further pass over the row
    logits = maker().normal(3, 30_000, scale=3.0)
    top_k, top_p = torch.tensor([1, 40, 199], device=device), torch.tensor([0.9, 0.7123, 0.95], device=device)
    check(apply_top_k_top_p, "apply_top_k_top_p", logits, top_k, top_p)


def test_rows_without_limits_stay(device: str) -> None:
    """Beside rows that have one; also if a mask leaves fewer entries than k."""
    logits = maker().normal(4, 300)
    logits[3, 7:] = float("-inf")
    want = logits.clone()
    top_k, top_p = torch.tensor([0, 300, 5, 10], device=device), torch.tensor([1.0, 1.5, 1.0, 1.0], device=device)
    apply_top_k_top_p(logits, top_k, top_p)
    assert torch.equal(logits[[0, 1, 3]], want[[0, 1, 3]])
    assert torch.isfinite(logits[2]).sum() == 5


@pytest.mark.parametrize("capacity", [2, 1024])
def test_what_is_no_number_stays(device: str, monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """As the highest entry; and nothing is written beside the row."""
    monkeypatch.setattr(sampling, "_CAPACITY", capacity)
    logits = maker().normal(3, 200)
    logits[0, 5], logits[1] = float("nan"), float("nan")
    wide = cut(logits, 256)
    unplanned_top_k_top_p(wide, torch.tensor([4, 4, 4], device=device), None)
    assert (wide > float("-inf")).sum(1).tolist() == [3, 0, 4]
    assert wide.isnan().sum(1).tolist() == [1, 200, 0]
    assert not wide._base[:, 200:].any()


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
