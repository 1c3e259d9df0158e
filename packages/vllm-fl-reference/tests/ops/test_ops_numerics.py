"""Numbers at the edges: overflow, cancellation, saturation, ties, and garbage where nobody may look."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_checking import check, copy, same_bits

import vllm_fl_reference.ops as ops
from vllm_fl.catalog import CATALOG, Case, InputMaker
from vllm_fl.catalog.inputs.attention import make_latent_batch
from vllm_fl_reference.ops import rotary
from vllm_fl_reference.ops.conv import _depthwise_by_taps

NAN = float("nan")


@pytest.mark.parametrize("name", ["rms_norm", "gemma_rms_norm"])
@pytest.mark.parametrize("residual", [False, True])
def test_large_float16_activations_do_not_vanish(name: str, residual: bool) -> None:
    x = torch.full((3, 4096), 300.0, dtype=torch.float16)
    weight = torch.full((4096,), 1.0 if name == "rms_norm" else 0.0, dtype=torch.float16)
    out = getattr(ops, name)(x, x if residual else None, weight, 1e-6)
    first = out[0] if residual else out
    assert torch.equal(first, torch.ones_like(x))


def test_a_wider_residual_or_weight_is_used_as_it_is() -> None:
    maker = InputMaker(torch.float32)
    x, residual, weight = maker.normal(5, 64), maker.normal(5, 64), maker.normal(64)
    out, total = ops.rms_norm(x.bfloat16(), residual, weight, 1e-6)
    assert out.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, x.bfloat16().float() + residual, rtol=0, atol=0)


def test_norm_of_the_unrounded_sum() -> None:
    """1 + 2 ** -9 is no bfloat16 number: the sum that is returned is rounded, the sum that is normalised is not."""
    x = torch.tensor([[1.0, 1.0]]).bfloat16()
    residual = torch.tensor([[2.0**-9, 0.0]]).bfloat16()
    weight = torch.tensor([256.0, 256.0])
    out, total = ops.rms_norm(x, residual, weight, 0.0)
    assert total.tolist() == [[1.0, 1.0]]
    exact = torch.tensor([[1.0 + 2.0**-9, 1.0]], dtype=torch.float64)
    expected = exact / exact.square().mean().sqrt() * 256
    assert torch.equal(out, expected.bfloat16())


def test_sums_of_bfloat16_are_not_bfloat16() -> None:
    """Each addend alone is lost beside the first in bfloat16."""
    parts = torch.full((1, 200, 3), 2.0**-9, dtype=torch.bfloat16)
    parts[:, 0] = 1.0
    output = torch.empty(1, 3, dtype=torch.bfloat16)
    ops.moe_sum(parts, output)
    assert torch.equal(output, torch.full((1, 3), 1.0 + 199 * 2.0**-9).bfloat16())


@pytest.mark.parametrize("route", [ops.topk_softmax, ops.topk_sigmoid])
def test_logits_of_minus_infinity(route: Any) -> None:
    logits = torch.full((2, 4), -torch.inf)
    logits[0, 2] = 1.0
    weights, ids = torch.empty(2, 2), torch.empty(2, 2, dtype=torch.int32)
    route(weights[:1], ids[:1], torch.empty(1, 2, dtype=torch.int32), logits[:1], True)
    assert ids[0, 0] == 2
    assert weights[0].tolist() == [1.0, 0.0]
    if route is ops.topk_sigmoid:  # no score at all: no weight, instead of 0 / 0
        route(weights[1:], ids[1:], torch.empty(1, 2, dtype=torch.int32), logits[1:], True)
        assert weights[1].tolist() == [0.0, 0.0]


def test_unsigned_expert_ids() -> None:
    ids = torch.zeros(3, 2, dtype=torch.uint32)
    ops.topk_softmax(torch.empty(3, 2), ids, torch.empty(3, 2, dtype=torch.int32), torch.eye(3, 5))
    assert ids[:, 0].tolist() == [0, 1, 2]


def test_small_decays_behind_a_large_one_keep_their_digits() -> None:
    maker = InputMaker(torch.float32)
    tokens = 64
    g = -maker.uniform(0.0, 1e-3, tokens, 1)
    g[3::16] = -5000.0
    case = Case(
        "steep",
        (
            *(maker.normal(tokens, 1, 8) for _ in range(3)),
            g,
            maker.uniform(0.0, 1.0, tokens, 1),
            maker.normal(2, 1, 8, 8),
            torch.tensor([0, tokens], dtype=torch.int32),
            torch.tensor([1]),
            torch.tensor([True]),
        ),
    )
    spec = CATALOG["chunk_gated_delta_rule"]
    check(spec, ops.chunk_gated_delta_rule, case)


def test_equal_keys_written_at_full_strength() -> None:
    """The triangular system has ones everywhere; powers of it would overflow what float32 can tell apart."""
    maker = InputMaker(torch.float32)
    key = maker.normal(1, 1, 16).expand(200, 1, 16).contiguous()
    case = Case(
        "equal keys",
        (
            maker.normal(200, 1, 16),
            key,
            maker.normal(200, 1, 16),
            torch.zeros(200, 1),
            torch.ones(200, 1),
            maker.normal(2, 1, 16, 16),
            torch.tensor([0, 200], dtype=torch.int32),
            torch.tensor([1]),
            torch.tensor([True]),
        ),
    )
    check(CATALOG["chunk_gated_delta_rule"], ops.chunk_gated_delta_rule, case)


def garbage_case(name: str, tokens: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of the case "padding slots", with NaN in the padded sequences' tokens."""
    spec = CATALOG[name]
    maker = InputMaker(torch.float32)
    case = next(case for case in spec.inputs(maker) if case.name.startswith("padding slots"))
    args = {key: copy(value) for key, value in spec.signature.bind(*case.args).arguments.items()}
    slots = args["cache_indices"]
    starts = args.get("query_start_loc", torch.arange(len(slots) + 1))
    for n, slot in enumerate(slots.tolist()):
        if slot <= 0:
            for key in tokens:
                args[key][starts[n] : starts[n + 1]] = NAN
    return args


@pytest.mark.parametrize(
    ("name", "tokens", "state"),
    [
        ("causal_conv1d_fn", ("x",), "conv_states"),
        ("causal_conv1d_update", ("x",), "conv_states"),
        ("chunk_gated_delta_rule", ("q", "k", "v", "g", "beta"), "state"),
        ("fused_recurrent_gated_delta_rule", ("q", "k", "v", "g", "beta"), "state"),
    ],
)
def test_nan_in_padding_stays_there(name: str, tokens: tuple[str, ...], state: str) -> None:
    args = garbage_case(name, tokens)
    args[state][0] = NAN
    before = copy(args[state])
    out = getattr(ops, name)(**args)
    assert torch.isfinite(out).all()
    used = {slot for slot in args["cache_indices"].tolist() if slot > 0}
    for slot in range(args[state].shape[0]):
        if slot in used:
            assert torch.isfinite(args[state][slot]).all()
        else:
            assert same_bits(args[state][slot], before[slot])


def test_nan_in_a_slot_without_initial_state_is_not_read() -> None:
    maker = InputMaker(torch.float32)
    starts, slots = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([1])
    for flags in (None, torch.tensor([False])):
        states = torch.full((2, 6, 3), NAN)
        out = ops.causal_conv1d_fn(maker.normal(5, 6), maker.normal(6, 4), None, states, starts, slots, flags)
        assert torch.isfinite(out).all()
        state = torch.full((2, 1, 6, 6), NAN)
        q, k, v = (maker.normal(5, 1, 6) for _ in range(3))
        g, beta = -maker.uniform(0, 1, 5, 1), maker.uniform(0, 1, 5, 1)
        out = ops.chunk_gated_delta_rule(q, k, v, g, beta, state, starts, slots, flags)
        assert torch.isfinite(out).all()
        assert torch.isfinite(state[1]).all()


def test_latent_attention_reads_the_tokens_that_are_there() -> None:
    """NaN in slots past the end of a request and in other blocks; the same lengths with another block table."""
    maker = InputMaker(torch.float32)
    query, cache, table, lengths, starts = make_latent_batch(maker, [(9, 1), (0, 7), (19, 3)], 2, (8, 4), 8)
    tail = (lengths, starts, 8, 0.3, 7, 1)
    want = ops.mla_attention(query, cache, table, *tail)
    moved = torch.full((40, *cache.shape[1:]), NAN)
    other = maker.permutation(40)[: table.numel()].view(table.shape)
    for request, length in enumerate(lengths.tolist()):
        for position in range(length):
            place = request, position // 8
            moved[other[place], position % 8] = cache[table[place], position % 8]
    assert torch.equal(ops.mla_attention(query, moved, other, *tail), want)


def test_an_empty_sequence_leaves_its_state() -> None:
    maker = InputMaker(torch.float32)
    starts, slots, flags = torch.tensor([0, 0, 3]), torch.tensor([2, 1]), torch.tensor([False, False])
    states, state = maker.normal(3, 6, 3), maker.normal(3, 1, 6, 6)
    before = states[2].clone(), state[2].clone()
    ops.causal_conv1d_fn(maker.normal(3, 6), maker.normal(6, 4), None, states, starts, slots, flags)
    q, k, v = (maker.normal(3, 1, 6) for _ in range(3))
    g, beta = -maker.uniform(0, 1, 3, 1), maker.uniform(0, 1, 3, 1)
    ops.chunk_gated_delta_rule(q, k, v, g, beta, state, starts, slots, flags)
    assert torch.equal(states[2], before[0])
    assert torch.equal(state[2], before[1])


def test_routes_to_no_expert_contribute_nothing() -> None:
    maker = InputMaker(torch.float32)
    x, w1, w2 = maker.normal(4, 16), maker.normal(3, 16, 16), maker.normal(3, 16, 8)
    shares, ids = torch.ones(4, 2), torch.tensor([[0, -1], [-1, -1], [2, 1], [-1, 1]])
    table = torch.tensor([1, 0, -1], dtype=torch.int32)
    single = [ops.fused_experts(x, w1, w2, shares[:, :1], torch.full((4, 1), e)) for e in range(3)]
    out = ops.fused_experts(x, w1, w2, shares, ids)
    torch.testing.assert_close(out[0], single[0][0])
    assert torch.equal(out[1], torch.zeros(16))
    torch.testing.assert_close(out[2], single[2][2] + single[1][2])
    out = ops.fused_experts(x, w1, w2, shares, ids, expert_map=table)
    torch.testing.assert_close(out[2], single[0][2])
    torch.testing.assert_close(out[3], single[0][3])
    sorted_ids, experts, count = ops.moe_align_block_size(ids.int(), 2, 3)
    assert sorted_ids[:6].tolist() == [0, 8, 5, 7, 4, 8]
    assert experts[:3].tolist() == [0, 1, 2]
    assert count.tolist() == [6]


def test_grouped_product_and_loop_over_experts_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = CATALOG["fused_experts"]
    cases = list(spec.inputs(InputMaker(torch.float32)))
    expected = [ops.fused_experts(*case.args) for case in cases]
    monkeypatch.setattr("vllm_fl_reference.ops.experts._has_grouped_product", lambda x, weight: False)
    for case, wanted in zip(cases, expected, strict=True):
        torch.testing.assert_close(ops.fused_experts(*case.args), wanted, rtol=1e-5, atol=1e-5)


def test_powers_of_two_are_exact() -> None:
    x = torch.tensor([[448.0], [448.0 * (1 + 2.0**-23)], [224.0], [1e-30]])
    _, scales = ops.per_token_group_quant_fp8(x, 1, use_ue8m0=True)
    assert scales[:3].flatten().tolist() == [1.0, 2.0, 0.5]
    assert float(scales[3].log2()) == float(scales[3].log2().round())


def test_saturated_int8_products_are_exact() -> None:
    """127 * 127 * 1024 is below 2 ** 24, so that float32 sums it exactly."""
    a = torch.full((2, 1024), 127, dtype=torch.int8)
    out = ops.scaled_mm(a, a.t(), torch.ones(1), torch.ones(1), "float32")
    assert torch.equal(out, torch.full((2, 2), 127.0 * 127 * 1024))


@pytest.mark.parametrize(
    "name",
    [
        "reshape_and_cache",
        "concat_and_cache_mla",
        "compute_slot_mapping",
        "causal_conv1d_fn",
        "causal_conv1d_update",
    ],
)
def test_the_form_that_never_waits_for_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices and compiled graphs run: no look at the values, convolution by taps."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr("vllm_fl_reference.ops.conv._depthwise_as_image", _depthwise_by_taps)
    spec = CATALOG[name]
    for case in spec.inputs(InputMaker(torch.float32)):
        check(spec, getattr(ops, name), case)


def test_the_rotary_form_of_other_devices() -> None:
    """One result of its own for query and key, without writing in place."""

    def on_another_device(
        query: torch.Tensor,
        key: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor,
        is_neox_style: bool,
    ) -> Any:
        angles = [table[position_ids].unsqueeze(1).double() for table in (cos, sin)]
        q = rotary._rotated(query, *angles, is_neox_style)
        return q if key is None else (q, rotary._rotated(key, *angles, is_neox_style))

    spec = CATALOG["rotary_embedding"]
    for case in spec.inputs(InputMaker(torch.float32)):
        check(spec, on_another_device, case)
