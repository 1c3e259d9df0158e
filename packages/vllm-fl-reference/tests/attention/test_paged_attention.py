"""Batched paged attention against the float64 oracle that goes from request to request."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from attention_oracle import LAYOUTS, Case, attention, fill, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fl_reference import attention_plan, paged_attention
from vllm_fl_reference.paged_attention import AttentionOptions, CacheRows

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
REQUESTS = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 20)), max_size=7)
HEADS = st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (4, 4)])


#: Limits that a short batch meets.
SMALL_LIMITS = {"MAX_SCORES": 96, "MAX_KEPT_MASK": 64, "MAX_KEY_BYTES": 1 << 15}


def run(case: Case, options: AttentionOptions) -> torch.Tensor:
    output = torch.full_like(case.query, float("nan"))
    paged_attention.paged_attention(case.query, CacheRows(case.cache), output, case.step, options)
    return output


def check(case: Case, options: AttentionOptions) -> None:
    fill(case)
    expected = attention(case, options)
    bound = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(run(case, options).double(), expected, atol=bound, rtol=bound)


@settings(max_examples=100, deadline=None)
@given(
    requests=REQUESTS,
    heads=HEADS,
    head_size=st.sampled_from([8, 20, 64]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    layout=st.sampled_from(LAYOUTS),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 5, 32, 1000]),
    soft_cap=st.sampled_from([None, 2.5]),
    with_sinks=st.booleans(),
    with_alibi=st.booleans(),
    small=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_batch(
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    head_size: int,
    block_size: int,
    layout: str,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    with_sinks: bool,
    with_alibi: bool,
    small: bool,
    seed: int,
) -> None:
    case = make_case(
        requests, heads=heads, head_size=head_size, block_size=block_size, layout=layout, causal=causal, seed=seed
    )
    options = AttentionOptions(
        scale=head_size**-0.5,
        window=window,
        soft_cap=soft_cap,
        sinks=torch.linspace(-1, 2, heads[0]) if with_sinks else None,
        alibi_slopes=torch.linspace(0.1, 0.5, heads[0]) if with_alibi else None,
    )
    with ExitStack() as stack:
        if small:
            stack.enter_context(mock.patch.multiple(attention_plan, **SMALL_LIMITS))
            stack.enter_context(mock.patch.object(paged_attention, "MAX_EXPLICIT_SCORES", 128))
        check(case, options)


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    heads=HEADS,
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    cache_dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    window=st.sampled_from([None, 7]),
    soft_cap=st.sampled_from([None, 5.0]),
)
def test_half_precision(
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    window: int | None,
    soft_cap: float | None,
) -> None:
    case = make_case(requests, heads=heads, head_size=32, dtype=dtype, cache_dtype=cache_dtype)
    check(case, AttentionOptions(scale=32**-0.5, window=window, soft_cap=soft_cap))


def test_each_request_may_be_causal_or_not() -> None:
    case = make_case([(3, 5), (0, 9), (17, 1), (4, 4)], causal=[True, False, False, True])
    check(case, AttentionOptions(scale=0.35))
    check(case, AttentionOptions(scale=0.35, window=4))


@pytest.mark.parametrize("options", [AttentionOptions(scale=0.3), AttentionOptions(scale=0.3, soft_cap=3.0)])
def test_long_sequences(options: AttentionOptions) -> None:
    """300 new tokens beside decodes over 700: the flash kernel works in blocks of 512 keys."""
    case = make_case([(700, 1), (699, 1), (5, 1), (0, 300), (600, 40)], heads=(2, 1), head_size=16)
    check(case, options)


def test_a_packed_batch_needs_no_cache() -> None:
    case = make_case([(0, 5), (0, 1), (0, 33), (0, 5)], causal=False)
    for options in (AttentionOptions(scale=0.35), AttentionOptions(scale=0.35, window=3)):
        output = torch.full_like(case.query, float("nan"))
        paged_attention.packed_attention(case.query, case.key, case.value, output, case.step, options)
        torch.testing.assert_close(output.double(), attention(case, options), atol=2e-5, rtol=2e-5)


def test_strided_queries_and_outputs() -> None:
    """vLLM hands over slices of the fused projection."""
    case = make_case([(30, 1), (31, 1), (0, 7), (4, 9)])
    fill(case)
    wide = torch.randn(case.query.shape[0] + 2, 9, 8)
    wide[:-2, 1:5] = case.query
    output = torch.full((case.query.shape[0] + 2, 4, 8), float("nan"))
    paged_attention.paged_attention(
        wide[:, 1:5], CacheRows(case.cache), output, case.step, AttentionOptions(scale=0.35)
    )
    expected = attention(case, AttentionOptions(scale=0.35))
    torch.testing.assert_close(output[:-2].double(), expected, atol=2e-5, rtol=2e-5)
    assert output[-2:].isnan().all()


def test_a_cache_needs_a_block_table() -> None:
    case = make_case([(0, 3)])
    case.step.block_table = None
    with pytest.raises(ValueError, match=r"^attention over a cache needs a block table$"):
        run(case, AttentionOptions(scale=1.0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_whole_rows_are_read_as_a_matrix(layout: str) -> None:
    rows = CacheRows(make_case([(40, 1)], layout=layout).cache)
    matrix = layout in ("tokens first", "padded blocks", "several layers")
    assert (rows._matrix is not None) is matrix
