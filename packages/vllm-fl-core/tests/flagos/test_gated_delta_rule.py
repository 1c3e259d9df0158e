"""Gates, decode and prefill of the gated delta rule, against the recurrence of the reference."""

from __future__ import annotations

from typing import Any

import gdn_cases
import pytest
import torch
from kernel_inputs import DEVICE, DTYPE_IDS, DTYPES, check, maker

from vllm_fl.flagos.kernels import gated_delta_chunk, gated_delta_rule
from vllm_fl.flagos.kernels.gated_delta_chunk import chunk_gated_delta_rule, chunked_prefill
from vllm_fl.flagos.kernels.gated_delta_rule import fused_gdn_gating, fused_recurrent_gated_delta_rule

STEP, CHUNK = "fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule"
WITH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
#: float32 goes token by token, which takes the interpreter long.
SHORT = ["one token", "as many key heads", "only padding", "no tokens", "no sequences"]


@pytest.mark.parametrize("name", gdn_cases.names("fused_gdn_gating"))
@WITH_DTYPES
def test_gates(device: str, dtype: torch.dtype, name: str) -> None:
    check(fused_gdn_gating, "fused_gdn_gating", *gdn_cases.arguments("fused_gdn_gating", name, dtype))


def test_gates_far_from_zero(device: str) -> None:
    """softplus is exp(x) far below 0, which 1 + exp(x) would lose, and x far above."""
    x = torch.tensor([[-80.0, -30.0, -17.0, -10.0, 0.0, 20.0, 90.0, 1e4]], device=DEVICE)
    zeros = torch.zeros(8, device=DEVICE)
    got, _ = fused_gdn_gating(zeros, x, x, zeros)
    want = -torch.logaddexp(x.double(), torch.zeros_like(x).double())
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", gdn_cases.names(STEP))
@WITH_DTYPES
def test_step(device: str, dtype: torch.dtype, name: str) -> None:
    args = gdn_cases.arguments(STEP, name, dtype)
    check(fused_recurrent_gated_delta_rule, STEP, *args, **gdn_cases.tolerances(STEP, dtype))


@pytest.mark.parametrize("name", gdn_cases.names(CHUNK))
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=DTYPE_IDS[1:])
def test_chunks(device: str, dtype: torch.dtype, name: str) -> None:
    args = gdn_cases.arguments(CHUNK, name, dtype)
    check(chunk_gated_delta_rule, CHUNK, *args, **gdn_cases.tolerances(CHUNK, dtype))


@pytest.mark.parametrize(("size", "width"), [(17, 17), (24, 24), (16, 20)], ids=["17", "24", "16 of 20"])
def test_heads_that_begin_anywhere_go_token_by_token(
    device: str, monkeypatch: pytest.MonkeyPatch, size: int, width: int
) -> None:
    monkeypatch.setattr(gated_delta_chunk, "chunked_prefill", None)
    args = list(gdn_cases.arguments(CHUNK, "regular", torch.float16))
    make, (tokens, heads, _) = maker(torch.float16), args[0].shape
    args[:2] = (make.normal(tokens, heads, width)[..., :size] for _ in range(2))
    args[5] = make.normal(*args[5].shape[:3], size, dtype=torch.float32)
    check(chunk_gated_delta_rule, CHUNK, *args, **gdn_cases.tolerances(CHUNK, torch.float16))


@pytest.mark.parametrize("name", SHORT if DEVICE == "cpu" else gdn_cases.names(CHUNK))
def test_token_by_token(device: str, name: str) -> None:
    check(chunk_gated_delta_rule, CHUNK, *gdn_cases.arguments(CHUNK, name, torch.float32))


def in_chunks(*args: Any) -> torch.Tensor:
    scale, l2norm = (*args[9:], *(None, True)[len(args) - 9 :])
    return chunked_prefill(*args[:9], args[0].shape[2] ** -0.5 if scale is None else scale, l2norm)


@pytest.mark.parametrize("name", ["mixed lengths", "keys as they are"])
def test_chunks_in_float32(device: str, name: str) -> None:
    """What is left of the difference is rounding: an error of the algorithm would show."""
    if DEVICE != "cpu":
        pytest.skip("matrix instructions round float32")
    args = gdn_cases.arguments(CHUNK, name, torch.float32)
    check(in_chunks, CHUNK, *args, rtol=1e-4, atol=1e-4)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 16 rows of the state, and sequences that are searched two at a time."""
    for name in ("_WIDE", "_NARROW"):
        monkeypatch.setattr(gated_delta_chunk, name, 16)
    monkeypatch.setattr(gated_delta_chunk, "SEQUENCES", 2)
    monkeypatch.setattr(gated_delta_rule, "_ROWS", 8)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_parts_of_the_state(device: str, dtype: torch.dtype) -> None:
    make = maker(dtype)
    lengths = [0, 3, 70 if dtype.itemsize == 2 else 5, 1, 0, 2]
    tokens = sum(lengths)
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    q, k, v = make.normal(tokens, 1, 24), make.normal(tokens, 1, 24), make.normal(tokens, 2, 40)
    g, beta = -make.uniform(0, 1, tokens, 2, dtype=torch.float32), make.uniform(0, 1, tokens, 2)
    state = make.normal(9, 2, 40, 24, dtype=torch.float32)
    slots, flags = make.permutation(6) + 1, make.tensor([True, False] * 3)
    limits = gdn_cases.tolerances(CHUNK, dtype)
    check(chunk_gated_delta_rule, CHUNK, q, k, v, g, beta, state, starts, slots, flags, **limits)


@WITH_DTYPES
def test_equal_keys(device: str, dtype: torch.dtype) -> None:
    """Every token overwrites what the one before it wrote; powers of A would have binomial coefficients as entries."""
    make = maker(dtype)
    tokens = 130 if dtype.itemsize == 2 else 20
    q, k = make.normal(tokens, 1, 16), make.normal(1, 1, 16).expand(tokens, 1, 16).contiguous()
    v, g = make.normal(tokens, 1, 16), make.full(-1e-3, tokens, 1, dtype=torch.float32)
    beta = make.full(1.0, tokens, 1)
    starts, slots = make.tensor([0, tokens], dtype=torch.int32), make.tensor([1], dtype=torch.int32)
    args = (q, k, v, g, beta, make.normal(3, 1, 16, 16, dtype=torch.float32), starts, slots, None)
    check(chunk_gated_delta_rule, CHUNK, *args, **gdn_cases.tolerances(CHUNK, dtype))


@WITH_DTYPES
def test_tokens_behind_the_last_sequence_give_zeros(device: str, dtype: torch.dtype) -> None:
    make = maker(dtype)
    q, k, v = (torch.full((90, 1, 16), float("nan"), dtype=dtype, device=DEVICE) for _ in range(3))
    for x in (q, k, v):
        x[:5] = make.normal(5, 1, 16)
    g, beta, state = (
        -make.uniform(0, 1, 90, 1, dtype=torch.float32),
        make.uniform(0, 1, 90, 1),
        make.normal(3, 1, 16, 16),
    )
    starts, slots = make.tensor([0, 5], dtype=torch.int32), make.tensor([2], dtype=torch.int32)
    out = chunk_gated_delta_rule(q, k, v, g, beta, state, starts, slots, None)
    assert not out[:5].isnan().any()
    assert torch.equal(out[5:], torch.zeros_like(out[5:]))
    assert not state.isnan().any()


@pytest.mark.parametrize(
    ("size", "dtype", "memory", "message"),
    [
        (272, torch.float16, 232448, "keys of 272 entries; on this device chunks take at most 256"),
        (144, torch.float16, 65536, "keys of 144 entries; on this device chunks take at most 128"),
        (1025, torch.float32, 232448, "keys of 1025 entries; at most 1024 are kept in registers"),
    ],
)
def test_refuses_long_keys(
    device: str, monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype, memory: int, message: str
) -> None:
    monkeypatch.setattr(gated_delta_chunk, "shared_memory", lambda device: memory)
    make = maker(dtype)
    q, v = make.normal(1, 1, size), make.normal(1, 1, 16)
    one, slots = make.normal(1, 1), make.tensor([1], dtype=torch.int32)
    state = make.normal(2, 1, 16, size)
    before = state.clone()
    starts = make.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(NotImplementedError) as caught:
        chunk_gated_delta_rule(q, q, v, one, one, state, starts, slots, None)
    assert str(caught.value) == message
    assert torch.equal(state, before)
