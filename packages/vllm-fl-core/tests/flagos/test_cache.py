"""Writing to the paged cache and finding its slots, against the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_inputs import DTYPE_IDS, DTYPES, TOKENS, check, maker

from vllm_fl.catalog import InputMaker
from vllm_fl.flagos.kernels import cache
from vllm_fl.flagos.kernels.cache import compute_slot_mapping, reshape_and_cache

BLOCKS, HEADS, BLOCK_SIZE, SIZE = 6, 3, 4, 16


def _heads_first(make: InputMaker) -> tuple[torch.Tensor, torch.Tensor]:
    return make.normal(BLOCKS, HEADS, BLOCK_SIZE, SIZE), make.normal(BLOCKS, HEADS, BLOCK_SIZE, SIZE)


def _tokens_first(make: InputMaker) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = make.normal(2, BLOCKS, BLOCK_SIZE, HEADS, SIZE).transpose(2, 3)
    return key, value


def _interleaved(make: InputMaker) -> tuple[torch.Tensor, torch.Tensor]:
    both = make.normal(BLOCKS, BLOCK_SIZE, HEADS, 2 * SIZE).permute(0, 2, 1, 3)
    return both[..., :SIZE], both[..., SIZE:]


def _entries_apart(make: InputMaker) -> tuple[torch.Tensor, torch.Tensor]:
    both = make.normal(BLOCKS, HEADS, SIZE, BLOCK_SIZE, 2).transpose(2, 3)
    return both[..., 0], both[..., 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(
    "layout", [_heads_first, _tokens_first, _interleaved, _entries_apart], ids=lambda layout: layout.__name__[1:]
)
def test_layouts(
    device: str, dtype: torch.dtype, layout: Callable[[InputMaker], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    make = maker(dtype)
    key_cache, value_cache = layout(make)
    slots = make.permutation(BLOCKS * BLOCK_SIZE, dtype=torch.int64)[:7]
    slots[2] = -1
    check(
        reshape_and_cache, "reshape_and_cache", make.normal(7, HEADS, SIZE), make.normal(7, HEADS, SIZE), key_cache,
        value_cache, slots,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [0, *[t for t in TOKENS if t <= BLOCKS * BLOCK_SIZE]])
def test_padding_tokens_and_slices(device: str, tokens: int) -> None:
    """Keys and values are parts of one projection with more rows than slots."""
    make = maker()
    projected = make.normal(tokens + 2, 3 * HEADS * SIZE)
    key = projected[:, HEADS * SIZE : 2 * HEADS * SIZE].view(-1, HEADS, SIZE)
    value = projected[:, 2 * HEADS * SIZE :].view(-1, HEADS, SIZE)
    slots = make.permutation(BLOCKS * BLOCK_SIZE, dtype=torch.int64)[:tokens]
    check(reshape_and_cache, "reshape_and_cache", key, value, *_interleaved(make), slots)


def test_slots_of_32_bits(device: str) -> None:
    make = maker()
    rows = make.normal(3, HEADS, SIZE)
    slots = make.tensor([5, -1, 0], dtype=torch.int32)
    narrow, wide = make.normal(4, 2, HEADS, BLOCK_SIZE, SIZE).unflatten(0, (2, 2))
    wide.copy_(narrow)
    reshape_and_cache(rows, rows, *narrow, slots)
    reshape_and_cache(rows, rows, *wide, slots.long())
    assert torch.equal(narrow, wide)


def test_sizes_differ_and_heads_are_many(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_TILE", 64)
    make = maker()
    key, value = make.normal(3, 5, 24), make.normal(3, 5, 20)
    key_cache, value_cache = make.normal(2, 5, 4, 24), make.normal(2, 5, 4, 20)
    slots = torch.tensor([7, 0, 3], device=device)
    check(reshape_and_cache, "reshape_and_cache", key, value, key_cache, value_cache, slots)


def test_only_padding(device: str) -> None:
    make = maker()
    slots = torch.full((2,), -1, device=device)
    rows = make.normal(2, HEADS, SIZE)
    check(reshape_and_cache, "reshape_and_cache", rows, rows, *_heads_first(make), slots)


def test_converts_to_the_dtype_of_the_cache(device: str) -> None:
    make = maker()
    key_cache = make.normal(2, HEADS, BLOCK_SIZE, SIZE, dtype=torch.float16)
    value_cache = make.normal(2, HEADS, BLOCK_SIZE, SIZE, dtype=torch.float16)
    rows = make.normal(2, HEADS, SIZE)
    slots = torch.tensor([1, 6], device=device)
    check(reshape_and_cache, "reshape_and_cache", rows, rows, key_cache, value_cache, slots)


@pytest.mark.parametrize("lengths", [[1], [3, 1, 0, 2], [1] * 9, [0], [40]], ids=str)
@pytest.mark.parametrize("padding", [0, 5])
def test_slot_mapping(device: str, lengths: list[int], padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_BLOCK", 16)
    make = maker()
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    total = sum(lengths)
    positions = make.integers(0, 60, total + padding, dtype=torch.int64)
    table = make.integers(1, 1000, len(lengths) + 1, 15)
    slots = torch.full((total + padding,), 12345, dtype=torch.int64, device=device)
    check(compute_slot_mapping, "compute_slot_mapping", starts, positions, table, slots, 4)


def test_slot_mapping_beyond_32_bits(device: str) -> None:
    starts, positions = torch.tensor([0, 1], dtype=torch.int32, device=device), torch.tensor([17], device=device)
    table = torch.tensor([[0, 2**30]], dtype=torch.int32, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    compute_slot_mapping(starts, positions, table, slots, 16)
    assert slots.tolist() == [2**34 + 1]


def test_slot_mapping_of_no_request(device: str) -> None:
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    slots = torch.zeros(3, dtype=torch.int64, device=device)
    table = torch.zeros(1, 4, dtype=torch.int32, device=device)
    compute_slot_mapping(starts, torch.zeros(3, dtype=torch.int64, device=device), table, slots, 16)
    assert slots.tolist() == [-1, -1, -1]


def test_slot_mapping_refuses_strides(device: str) -> None:
    starts = torch.zeros(2, dtype=torch.int32, device=device)
    slots = torch.zeros(4, dtype=torch.int64, device=device)
    table = torch.zeros(1, 4, dtype=torch.int32, device=device)
    with pytest.raises(NotImplementedError) as caught:
        compute_slot_mapping(starts, slots[::2], table, slots, 16)
    assert str(caught.value) == "positions: stride 2, expected 1"
