"""Acceptance of speculative drafts: by hand where it is certain, as a distribution where it is drawn."""

from __future__ import annotations

import pytest
import torch

from vllm_fl.integration import rejection

LONGEST = 3
#: Drafts of four requests: three, none, two, one.
ENDS = torch.tensor([3, 3, 5, 6])
DRAFTED = torch.tensor([5, 6, 7, 8, 9, 4])
BONUS = torch.tensor([[90], [91], [92], [93]])


def empty() -> torch.Tensor:
    return torch.full((4, LONGEST + 1), -1)


@pytest.mark.parametrize(
    ("likeliest", "is_greedy", "expected"),
    [
        ([5, 6, 7, 8, 9, 4], None, [[5, 6, 7, 90], [91, -1, -1, -1], [8, 9, 92, -1], [4, 93, -1, -1]]),
        ([5, 0, 7, 1, 9, 2], None, [[5, 0, -1, -1], [91, -1, -1, -1], [1, -1, -1, -1], [2, -1, -1, -1]]),
        ([5, 0, 7, 8, 2, 4], [True, False, False, True], [[5, 0, -1, -1], [-1] * 4, [-1] * 4, [4, 93, -1, -1]]),
    ],
    ids=["all-stay", "some-go", "some-requests"],
)
def test_greedy_drafts_stay_up_to_the_first_that_differs(
    likeliest: list[int], is_greedy: list[bool] | None, expected: list[list[int]]
) -> None:
    output = empty()
    chosen = None if is_greedy is None else torch.tensor(is_greedy)
    rejection.accept_greedily(output, ENDS, DRAFTED, torch.tensor(likeliest), BONUS, chosen, LONGEST)
    assert output.tolist() == expected


def test_drafts_stay_while_the_ratio_is_above_the_number_drawn() -> None:
    target = torch.full((6, 10), 0.05)
    target[torch.arange(6), DRAFTED] = torch.tensor([0.5, 0.5, 0.2, 0.5, 0.0, 0.5])
    draft = torch.full((6, 10), 0.5)
    draft[5, 4] = 0.0  # it cannot have been drafted, so it goes
    uniform = torch.tensor([0.99, 1 - 1e-6, 0.5, 0.3, 0.0, 0.0], dtype=torch.float64)
    recovered = torch.arange(60, 66)
    greedy = torch.tensor([False, False, True, False])
    output = empty()
    rejection.accept_at_random(
        output, ENDS, DRAFTED, draft, target, BONUS, recovered, uniform, greedy, LONGEST, 10, False
    )
    assert output.tolist() == [[5, 6, 62, -1], [91, -1, -1, -1], [-1] * 4, [65, -1, -1, -1]]


def test_padding_in_the_place_of_a_draft_goes() -> None:
    target = torch.tensor([[1.0, 0.0]])
    drafted, ends, greedy = torch.tensor([-1]), torch.tensor([1]), torch.tensor([False])
    recovered, output = torch.empty(1, dtype=torch.int64), torch.full((1, 2), -1)
    rejection.draw_recovered(recovered, ends, drafted, None, target, torch.ones(1, 2), 2, True)
    rejection.accept_at_random(
        output, ends, drafted, None, target, BONUS[:1], recovered, torch.zeros(1), greedy, 1, 2, True
    )
    assert output.tolist() == [[0, -1]]


@pytest.mark.parametrize("certain", [True, False])
def test_what_comes_out_is_distributed_as_the_target(certain: bool) -> None:
    """Whatever the draft was; 40,000 requests with one draft each."""
    random = torch.Generator().manual_seed(0)
    requests, target = 40_000, torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    draft = torch.tensor([0.1, 0.1, 0.5, 0.1, 0.2])
    drafted = torch.full((requests,), 1) if certain else torch.multinomial(draft, requests, True, generator=random)
    ends = torch.arange(1, requests + 1)
    targets, drafts = target.repeat(requests, 1), None if certain else draft.repeat(requests, 1)
    inverse = torch.empty(requests, 5).exponential_(generator=random).reciprocal()
    uniform = torch.rand(requests, generator=random)
    recovered, output = torch.empty(requests, dtype=torch.int64), torch.full((requests, 2), -1)
    rejection.draw_recovered(recovered, ends, drafted, drafts, targets, inverse, 5, certain)
    rejection.accept_at_random(
        output, ends, drafted, drafts, targets, torch.zeros(requests, dtype=torch.int64), recovered, uniform,
        torch.zeros(requests, dtype=torch.bool), 1, 5, certain,
    )  # fmt: skip
    shares = output[:, 0].bincount(minlength=5) / requests
    torch.testing.assert_close(shares, target, atol=0.01, rtol=0)  # four standard deviations


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_values_are_repeated_for_each_draft(dtype: torch.dtype) -> None:
    values = torch.tensor([3, 7, 1, 5], dtype=dtype)
    expanded = rejection.expand(values, ENDS)
    assert expanded.dtype == dtype
    assert expanded.tolist() == [3, 3, 3, 1, 1, 5]
