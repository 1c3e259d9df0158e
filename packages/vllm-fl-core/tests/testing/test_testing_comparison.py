"""What the kit sees of one call: memory around the arguments, entries that differ, cases with other strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vllm_fl.catalog import CATALOG, Case
from vllm_fl.testing.cases import other_strides, tensors, unknown_options
from vllm_fl.testing.comparison import difference
from vllm_fl.testing.memory import Arguments

SILU, CACHE = CATALOG["silu_and_mul"], CATALOG["reshape_and_cache"]


def test_copies_keep_strides_and_share_as_the_originals_do() -> None:
    wide = torch.randn(4, 2, 3, 8)
    case = Case(
        "views", (torch.randn(2, 2, 4), torch.randn(2, 2, 4), wide[..., :4], wide[..., 4:], torch.tensor([0, 5]))
    )
    arguments = Arguments(CACHE, case)
    for (name, copy), original in zip(arguments.tensors(), case.args, strict=True):
        assert torch.equal(copy, original), name
        assert copy.stride() == original.stride()
        assert copy.data_ptr() != original.data_ptr()
    key, value = arguments.by_name["key_cache"], arguments.by_name["value_cache"]
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert arguments.written() == []


def test_what_was_written() -> None:
    arguments = Arguments(SILU, Case("rows of a wider tensor", (torch.zeros(3, 10)[:, 2:6],)))
    x: Tensor = arguments.by_name["x"]
    x[1, 2] = 7.0
    beside = x.as_strided((1,), (1,), x.storage_offset() + 4)
    beside.fill_(1.0)
    past_the_end = x.as_strided((1,), (1,), x.storage_offset() + 30)
    past_the_end.fill_(1.0)
    assert arguments.written() == [
        "argument 'x' was written (1 of 12 entries)",
        "memory around 'x' was written (2 entries)",
    ]


def test_what_may_be_written() -> None:
    shape = (2, 1, 2, 4)
    case = Case(
        "c", (torch.ones(1, 1, 4), torch.ones(1, 1, 4), torch.zeros(shape), torch.zeros(shape), torch.tensor([0]))
    )
    arguments = Arguments(CACHE, case)
    arguments.by_name["key_cache"].fill_(float("nan"))
    assert arguments.written() == []
    assert arguments.written(allowed=False) == ["argument 'key_cache' was written (16 of 16 entries)"]


def test_a_result_in_the_memory_of_an_argument() -> None:
    arguments = Arguments(SILU, Case("c", (torch.ones(2, 8),)))
    assert arguments.alias(arguments.by_name["x"][:, :4]) == "x"
    assert arguments.alias(torch.ones(2, 4)) is None


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0005], None),
        ([1.0, 2.0], [1.0, 2.1], "differs in 1 of 2 entries; at [1] it is 2, expected 2.1 (tolerance 0.001"),
        ([1.0, float("nan")], [1.0, float("nan")], None),
        ([1.0, float("nan")], [1.0, 2.0], "differs in 1 of 2 entries; at [1] it is nan, expected 2"),
        ([float("inf"), 1.0], [float("inf"), 1.0], None),
        ([float("inf"), 1.0], [float("-inf"), 1.0], "differs in 1 of 2 entries; at [0] it is inf, expected -inf"),
        ([1, 2], [1, 3], "differs in 1 of 2 entries; at [1] it is 2, expected 3"),
        ([1.0], [1.0, 2.0], "has shape [1], expected [2]"),
    ],
)
def test_difference(got: list[float], want: list[float], expected: str | None) -> None:
    text = difference(torch.tensor(got), torch.tensor(want), (1e-3, 1e-3))
    assert text == expected if expected is None else text is not None and text.startswith(expected)


def test_other_strides_hold_the_same_numbers_but_for_repeated_rows() -> None:
    case = next(iter(SILU.inputs(_maker())))
    variants = {variant.name: variant.args[0] for variant in other_strides(SILU, case)}
    assert list(variants) == [
        "regular, every other entry of a wider x",
        "regular, rows of a wider x",
        "regular, one row for all of x",
    ]
    for name, x in variants.items():
        assert not x.is_contiguous()
        assert torch.equal(x, case.args[0]) or name.endswith("one row for all of x")


def test_options_that_do_not_exist() -> None:
    spec = CATALOG["gelu_and_mul"]
    case = next(iter(spec.inputs(_maker())))
    ((name, changed),) = unknown_options(spec, case)
    assert name == "approximate"
    assert changed.args[1] == "no-such-option"
    assert list(tensors(spec, changed)) == ["x"]


def _maker() -> object:
    from vllm_fl.catalog import InputMaker

    return InputMaker(torch.float32)
