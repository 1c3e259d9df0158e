"""Rotary embedding against the reference."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE_IDS, DTYPES, TOKENS, check, cut, maker

from vllm_fl.flagos.kernels.rotary import rotary_embedding

POSITIONS = 40


def table(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [POSITIONS, size / 2] each: halves of one table, as in vLLM."""
    frequencies = 1e4 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), frequencies)
    cos, sin = torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE, dtype).chunk(2, -1)
    return cos, sin


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "rotated"),
    [(4, 2, 32, 32), (4, 4, 64, 16), (3, 1, 20, 12), (1, 5, 24, 2), (40, 8, 128, 128), (2, 2, 8, 6)],
)
def test_against_reference(
    device: str, dtype: torch.dtype, neox: bool, heads: int, key_heads: int, size: int, rotated: int
) -> None:
    make = maker(dtype)
    query, key = make.normal(3, heads, size), make.normal(3, key_heads, size)
    positions = make.integers(0, POSITIONS, 3, dtype=torch.int64)
    check(rotary_embedding, "rotary_embedding", query, key, *table(rotated, dtype), positions, neox)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
def test_without_key(device: str, neox: bool) -> None:
    make = maker()
    positions = make.integers(0, POSITIONS, 4)
    check(rotary_embedding, "rotary_embedding", make.normal(4, 3, 16), None, *table(16, torch.float32), positions, neox)


@pytest.mark.parametrize("tokens", [0, *TOKENS])
def test_slices_of_a_projection(device: str, tokens: int) -> None:
    make = maker()
    projected = make.normal(tokens, 6 * 32 + 8)
    query = projected[:, :128].view(tokens, 4, 32)
    key = projected[:, 128:192].view(tokens, 2, 32)
    positions = make.integers(0, POSITIONS, tokens, dtype=torch.int64)
    check(rotary_embedding, "rotary_embedding", query, key, *table(32, torch.float32), positions, True)


def test_heads_apart_and_strided_positions(device: str) -> None:
    make = maker()
    query, key = cut(make.normal(3, 2, 16), 24, start=8), make.normal(2, 3, 16).transpose(0, 1)
    positions = make.integers(0, POSITIONS, 6)[::2]
    check(rotary_embedding, "rotary_embedding", query, key, *table(16, torch.float32), positions, True)


def test_table_in_float32_for_float16(device: str) -> None:
    make = maker(torch.float16)
    query, key = make.normal(3, 2, 32), make.normal(3, 2, 32)
    positions = make.integers(0, POSITIONS, 3)
    check(rotary_embedding, "rotary_embedding", query, key, *table(32, torch.float32), positions, True)


def test_refuses_a_strided_last_dimension(device: str) -> None:
    query = torch.zeros(2, 2, 32, device=device)[..., ::2]
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(NotImplementedError) as caught:
        rotary_embedding(query, None, *table(16, torch.float32), positions, True)
    assert str(caught.value) == "query: the last dimension has stride 2, expected 1"


def test_refuses_keys_of_another_size(device: str) -> None:
    query, key = torch.zeros(2, 2, 32, device=device), torch.zeros(2, 2, 16, device=device)
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(NotImplementedError) as caught:
        rotary_embedding(query, key, *table(16, torch.float32), positions, True)
    assert str(caught.value) == "key: heads of 16 entries, those of the query have 32"
