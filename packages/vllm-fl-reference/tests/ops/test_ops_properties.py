"""Operators on drawn shapes, against their literal float64 forms."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops_checking import check

import vllm_fl_reference.ops as ops
from vllm_fl.catalog import CATALOG, Case, InputMaker
from vllm_fl.catalog.inputs.attention import make_latent_batch

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
SEEDS = st.integers(0, 2**31)
drawn = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(name: str, *args: object) -> None:
    check(CATALOG[name], getattr(ops, name), Case(f"drawn {args}", args))


@drawn
@given(
    dtype=DTYPES,
    seed=SEEDS,
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    size=st.integers(1, 70),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    residual=st.booleans(),
    weight=st.booleans(),
)
def test_rms_norm(
    dtype: torch.dtype, seed: int, shape: list[int], size: int, scale: float, residual: bool, weight: bool
) -> None:
    maker = InputMaker(dtype, seed=seed)
    x, other = maker.normal(*shape, size, scale=scale), maker.normal(*shape, size, scale=scale)
    run("rms_norm", x, other if residual else None, maker.normal(size) if weight else None, 1e-6)


@drawn
@given(
    dtype=DTYPES,
    seed=SEEDS,
    tokens=st.integers(0, 6),
    heads=st.integers(1, 4),
    key_heads=st.integers(0, 3),
    half=st.integers(1, 9),
    rest=st.integers(0, 5),
    neox=st.booleans(),
)
def test_rotary_embedding(
    dtype: torch.dtype, seed: int, tokens: int, heads: int, key_heads: int, half: int, rest: int, neox: bool
) -> None:
    maker, size = InputMaker(dtype, seed=seed), 2 * half + rest
    key = maker.normal(tokens, key_heads, size) if key_heads else None
    table = maker.uniform(-1, 1, 20, 2 * half)
    positions = maker.integers(0, 20, tokens)
    run("rotary_embedding", maker.normal(tokens, heads, size), key, table[:, :half], table[:, half:], positions, neox)


@drawn
@given(
    seed=SEEDS,
    slots=st.lists(st.integers(-1, 35), max_size=12, unique_by=lambda s: s if s >= 0 else object()),
    extra=st.integers(0, 3),
    packed=st.booleans(),
)
def test_reshape_and_cache(seed: int, slots: list[int], extra: int, packed: bool) -> None:
    maker, tokens = InputMaker(torch.float32, seed=seed), len(slots) + extra
    cache = maker.normal(6, 6, 2, 10).transpose(1, 2) if packed else maker.normal(6, 2, 6, 10)
    key, value = maker.normal(tokens, 2, 4), maker.normal(tokens, 2, 6)
    run("reshape_and_cache", key, value, cache[..., :4], cache[..., 4:], torch.tensor(slots, dtype=torch.int64))


@drawn
@given(
    seed=SEEDS,
    lengths=st.lists(st.integers(0, 20), max_size=6),
    block_size=st.integers(1, 9),
    extra=st.integers(0, 5),
)
def test_compute_slot_mapping(seed: int, lengths: list[int], block_size: int, extra: int) -> None:
    maker = InputMaker(torch.float32, seed=seed)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    firsts = [int(maker.integers(0, 30, 1)) for _ in lengths]
    positions = [first + i for first, length in zip(firsts, lengths, strict=True) for i in range(length)]
    positions += [10**6] * extra
    table = maker.integers(1, 1000, len(lengths) + 1, 60)
    mapping = torch.full((len(positions),), -5)
    run("compute_slot_mapping", starts, torch.tensor(positions, dtype=torch.int64), table, mapping, block_size)


@drawn
@given(
    dtype=DTYPES,
    seed=SEEDS,
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=5),
    heads=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 20), st.integers(0, 8)),
    block_size=st.integers(1, 9),
    padding=st.integers(0, 2),
)
def test_mla_attention(
    dtype: torch.dtype,
    seed: int,
    requests: list[tuple[int, int]],
    heads: int,
    sizes: tuple[int, int],
    block_size: int,
    padding: int,
) -> None:
    batch = make_latent_batch(InputMaker(dtype, seed=seed), requests, heads, sizes, block_size, padding)
    run("mla_attention", *batch, sizes[0], sum(sizes) ** -0.5, 9, 0)


@drawn
@given(
    seed=SEEDS,
    tokens=st.integers(0, 12),
    experts=st.integers(1, 12),
    topk=st.integers(1, 4),
    block_size=st.integers(1, 9),
    mapped=st.booleans(),
    padded=st.booleans(),
    ignored=st.booleans(),
)
def test_moe_align_block_size(
    seed: int, tokens: int, experts: int, topk: int, block_size: int, mapped: bool, padded: bool, ignored: bool
) -> None:
    maker = InputMaker(torch.float32, seed=seed)
    ids = maker.integers(0, experts, tokens, topk)
    table = None
    if mapped:
        table = torch.full((experts,), -1, dtype=torch.int32)
        table[maker.permutation(experts, dtype=torch.int64)[: experts // 2]] = maker.permutation(experts // 2)
    run("moe_align_block_size", ids, block_size, experts, table, padded, ignored)


@drawn
@given(
    dtype=DTYPES,
    seed=SEEDS,
    tokens=st.integers(0, 10),
    hidden=st.integers(1, 24),
    inner=st.integers(1, 17),
    experts=st.integers(1, 6),
    data=st.data(),
)
def test_fused_experts(
    dtype: torch.dtype, seed: int, tokens: int, hidden: int, inner: int, experts: int, data: st.DataObject
) -> None:
    maker = InputMaker(dtype, seed=seed)
    topk = data.draw(st.integers(1, experts))
    activation = data.draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "swigluoai", "silu_no_mul", "relu2_no_mul"]))
    rows = inner if activation.endswith("no_mul") else 2 * inner
    weights = maker.normal(experts, rows, hidden, scale=hidden**-0.5), maker.normal(experts, hidden, inner, scale=0.2)
    ids = torch.stack([maker.permutation(experts)[:topk] for _ in range(tokens)] or [torch.zeros(topk).int()])[:tokens]
    table = maker.integers(-1, experts, experts) if data.draw(st.booleans()) else None
    biases = (maker.normal(experts, rows), maker.normal(experts, hidden)) if data.draw(st.booleans()) else (None, None)
    shares = maker.uniform(0, 1, tokens, topk, dtype=torch.promote_types(dtype, torch.float32)) / topk
    on_input = topk == 1 and data.draw(st.booleans())
    run("fused_experts", maker.normal(tokens, hidden), *weights, shares, ids, activation, on_input, table, *biases)


def sequences(
    maker: InputMaker, lengths: list[int], data: st.DataObject
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """query_start_loc, cache_indices with some padding, has_initial_state."""
    slots = maker.permutation(len(lengths)) + 1
    for index in range(len(lengths)):
        if data.draw(st.integers(0, 4)) == 0:
            slots[index] = data.draw(st.integers(-1, 0))
    flags = torch.tensor([data.draw(st.booleans()) for _ in lengths], dtype=torch.bool)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return starts, slots, flags if data.draw(st.booleans()) else None


@drawn
@given(
    dtype=DTYPES,
    seed=SEEDS,
    lengths=st.lists(st.integers(0, 9), max_size=5),
    channels=st.integers(1, 9),
    width=st.integers(2, 5),
    data=st.data(),
)
def test_causal_conv1d_fn(
    dtype: torch.dtype, seed: int, lengths: list[int], channels: int, width: int, data: st.DataObject
) -> None:
    maker, tail = InputMaker(dtype, seed=seed), data.draw(st.integers(0, 3))
    x, weight = maker.normal(sum(lengths) + tail, channels), maker.normal(channels, width)
    bias = maker.normal(channels) if data.draw(st.booleans()) else None
    states = maker.normal(len(lengths) + 1, width - 1 + data.draw(st.integers(0, 2)), channels).transpose(1, 2)
    activation = data.draw(st.sampled_from(["silu", None]))
    run("causal_conv1d_fn", x, weight, bias, states, *sequences(maker, lengths, data), activation)


@drawn
@given(
    dtype=DTYPES,
    seed=SEEDS,
    lengths=st.lists(st.one_of(st.integers(0, 5), st.integers(28, 70)), max_size=4),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    steep=st.sampled_from([0.0, 1.0, 50.0]),
    data=st.data(),
)
def test_chunk_gated_delta_rule(
    dtype: torch.dtype,
    seed: int,
    lengths: list[int],
    heads: int,
    group: int,
    sizes: tuple[int, int],
    steep: float,
    data: st.DataObject,
) -> None:
    maker, (key_dim, value_dim) = InputMaker(dtype, seed=seed), sizes
    tokens, wide = sum(lengths) + data.draw(st.integers(0, 3)), torch.promote_types(dtype, torch.float32)
    run(
        "chunk_gated_delta_rule",
        maker.normal(tokens, heads, key_dim),
        maker.normal(tokens, heads, key_dim),
        maker.normal(tokens, heads * group, value_dim),
        -maker.uniform(0, steep, tokens, heads * group, dtype=wide),
        maker.uniform(0, 1, tokens, heads * group),
        maker.normal(len(lengths) + 1, heads * group, value_dim, key_dim, dtype=wide),
        *sequences(maker, lengths, data),
    )


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_chunk_size_does_not_matter(chunk: int) -> None:
    in_chunks = partial(ops.chunk_gated_delta_rule, chunk=chunk)
    spec = CATALOG["chunk_gated_delta_rule"]
    for case in spec.inputs(InputMaker(torch.float64)):
        if case.args[0].shape[0] <= 150:
            check(spec, in_chunks, case)
