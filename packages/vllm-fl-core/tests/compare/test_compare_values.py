"""How far two tensors are apart."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_fl.catalog import CATALOG
from vllm_fl.compare import Difference, measure
from vllm_fl.compare.values import differences

TOLERANCE = (1e-3, 1e-6)


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_one_entry_outside() -> None:
    found = measure(tensor(1.0, 2.0, 3.5), tensor(1.0, 2.0, 3.0), TOLERANCE, "result 0")
    assert found == Difference("result 0", False, 0.5, 0.5 / 2**-22, 1, 3, (2,), 3.5, 3.0)
    assert str(found) == "result 0 is outside of the tolerance in 1 of 3 entries: 3.5 at [2], expected 3"


@pytest.mark.parametrize(
    ("dtype", "one", "next_one"),
    [
        (torch.bfloat16, 1.0, 1.0 + 2**-7),
        (torch.float16, 1.0, 1.0 + 2**-10),
        (torch.float32, 1.0, 1.0 + 2**-23),
        (torch.float32, 1024.0, 1024.0 + 2**-13),
    ],
    ids=str,
)
def test_neighbours_are_one_unit_of_the_last_place_apart(dtype: torch.dtype, one: float, next_one: float) -> None:
    found = measure(tensor(next_one, dtype=dtype), tensor(one, dtype=dtype), TOLERANCE, "result 0")
    assert found.max_ulp == 1.0
    assert found.max_abs == next_one - one


def test_what_the_tolerance_takes_for_zero_counts_as_large_as_that() -> None:
    found = measure(tensor(2**-40), tensor(0.0), (0.0, 2**-10), "result 0")
    assert found.max_ulp == 2**-40 / 2**-33


@pytest.mark.parametrize(
    ("got", "expected", "within"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (-math.inf, math.inf, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, 1.0, False),
        (-0.0, 0.0, True),
    ],
)
def test_nan_and_infinity(got: float, expected: float, within: bool) -> None:
    found = measure(tensor(got, 1.0), tensor(expected, 1.0), TOLERANCE, "result 0")
    assert found.within is within
    assert math.isinf(found.max_abs) is not within


def test_integers_have_to_be_equal() -> None:
    found = measure(tensor(1, 7, dtype=torch.int32), tensor(1, 5, dtype=torch.int32), (0.0, 0.0), "result 0")
    assert (found.within, found.max_abs, found.max_ulp, found.index) == (False, 2.0, 2.0, (1,))


def test_shapes_and_nothing() -> None:
    found = measure(torch.ones(2, 3), torch.ones(3, 2), TOLERANCE, "result 1")
    assert str(found) == "result 1 has shape [2, 3], expected [3, 2]"
    assert measure(torch.ones(0), torch.ones(0), TOLERANCE, "result 0") == Difference("result 0", True)
    assert str(measure(torch.tensor(2.0), torch.tensor(1.0), TOLERANCE, "result 0")).endswith("entries: 2, expected 1")


def test_outcomes() -> None:
    spec = CATALOG["silu_and_mul"]
    one, two = torch.ones(2), torch.ones(2) * 2
    assert [str(d) for d in differences(spec, ((one, "a"), {"x": one}), ((one, "b"), {"x": two}))] == [
        "result 0 is within tolerance (at most 0 off)",
        "result 1 is 'a', expected 'b'",
        "argument 'x' is outside of the tolerance in 2 of 2 entries: 1 at [0], expected 2",
    ]
    number, _ = differences(spec, ((one,), {}), ((one, two), {}))
    assert str(number) == "the call has 1 results, expected 2"
