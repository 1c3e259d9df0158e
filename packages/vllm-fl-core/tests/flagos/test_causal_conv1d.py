"""The short convolution over packed sequences and its single step, against the reference."""

from __future__ import annotations

import gdn_cases
import pytest
import torch
from kernel_inputs import DEVICE, DTYPE_IDS, DTYPES, check, maker

from vllm_fl.flagos.kernels import causal_conv1d
from vllm_fl.flagos.kernels.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

WITH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)


#: Every case in float32, and in the other dtypes those of vLLM's usual layout.
SEQUENCES = [
    pytest.param(name, dtype, id=f"{name}, {label}")
    for name in gdn_cases.names("causal_conv1d_fn")
    for dtype, label in zip(DTYPES, DTYPE_IDS, strict=True)
    if dtype == torch.float32 or name.endswith("channels last")
]


@pytest.mark.parametrize(("name", "dtype"), SEQUENCES)
def test_sequences(device: str, name: str, dtype: torch.dtype) -> None:
    check(causal_conv1d_fn, "causal_conv1d_fn", *gdn_cases.arguments("causal_conv1d_fn", name, dtype))


@pytest.mark.parametrize("name", gdn_cases.names("causal_conv1d_update"))
@WITH_DTYPES
def test_step(device: str, dtype: torch.dtype, name: str) -> None:
    check(causal_conv1d_update, "causal_conv1d_update", *gdn_cases.arguments("causal_conv1d_update", name, dtype))


@pytest.mark.parametrize("block", [2, 4, 128])
def test_sequences_are_searched_in_blocks(device: str, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(causal_conv1d, "SEQUENCES", block)
    make = maker()
    starts = make.tensor([0, 3, 3, 20, 21, 38, 38, 55, 57], dtype=torch.int32)
    flags = make.tensor([True, False] * 4)
    states, slots = make.normal(12, 3, 16).transpose(1, 2), make.permutation(8) + 1
    check(
        causal_conv1d_fn,
        "causal_conv1d_fn",
        make.normal(57, 16),
        make.normal(16, 4),
        None,
        states,
        starts,
        slots,
        flags,
    )


def test_slots_in_a_column_of_the_block_table(device: str) -> None:
    make = maker()
    slots = make.permutation(12).view(4, 3)[:, 1] + 1
    args = (make.normal(16, 4), None, make.normal(20, 3, 16).transpose(1, 2))
    check(causal_conv1d_update, "causal_conv1d_update", make.normal(4, 16), *args, slots)
    starts, flags = make.tensor([0, 2, 9, 10, 14], dtype=torch.int32), make.tensor([True] * 8)[::2]
    check(causal_conv1d_fn, "causal_conv1d_fn", make.normal(14, 16), *args, starts, slots, flags)


def test_tokens_behind_the_last_sequence_give_zeros(device: str) -> None:
    make = maker()
    starts, slots = make.tensor([0, 5, 11], dtype=torch.int32), make.tensor([2, 1], dtype=torch.int32)
    x = make.normal(60, 16)
    x[11:] = float("nan")
    out = causal_conv1d_fn(x, make.normal(16, 4), None, make.normal(4, 16, 3), starts, slots, None)
    assert not out[:11].isnan().any()
    assert torch.equal(out[11:], torch.zeros(49, 16, device=DEVICE))


@pytest.mark.parametrize(
    ("width", "activation", "message"),
    [
        (1, "silu", "weight: a window of 1; it must be 2 to 16"),
        (17, "silu", "weight: a window of 17; it must be 2 to 16"),
        (4, "gelu", "activation: 'gelu' is not one of silu, swish, None"),
    ],
)
def test_refuses(device: str, width: int, activation: str, message: str) -> None:
    make = maker()
    states, slots = make.normal(3, 8, 16), make.tensor([1, 2], dtype=torch.int32)
    before = states.clone()
    with pytest.raises(NotImplementedError) as caught:
        causal_conv1d_update(make.normal(2, 8), make.normal(8, width), None, states, slots, activation)
    assert str(caught.value) == message
    assert torch.equal(states, before)


def test_refuses_strided_starts(device: str) -> None:
    make = maker()
    starts = make.tensor([0, 0, 2, 2], dtype=torch.int32)[::2]
    with pytest.raises(NotImplementedError) as caught:
        causal_conv1d_fn(make.normal(2, 8), make.normal(8, 4), None, make.normal(3, 8, 3), starts, starts[:1], None)
    assert str(caught.value) == "query_start_loc: stride 2, expected 1"
