"""The gated delta net layer: states across steps, mixed batches, and the recurrence written out in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fl.integration.layers import gdn

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, WIDTH, SLOTS = 2, 4, 8, 6, 4, 9
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


class Layer:
    """The attributes of vLLM's layer that the core reads, with our core."""

    prefix = "layer"
    activation = "silu"
    tp_size = 1
    key_dim, value_dim = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    head_k_dim, head_v_dim = KEY_DIM, VALUE_DIM
    _forward_core = gdn.FLQwenGatedDeltaNetAttention._forward_core
    _heads = gdn.FLQwenGatedDeltaNetAttention._heads

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.conv1d = SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH, generator=random), bias=None)
        self.A_log = torch.randn(VALUE_HEADS, generator=random)
        self.dt_bias = torch.randn(VALUE_HEADS, generator=random)
        # What an earlier request may have left behind; vLLM clears no state.
        self.kv_cache = (
            torch.full((SLOTS, WIDTH - 1, CHANNELS), 7.0),
            torch.full((SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM), 7.0),
        )


@pytest.fixture(autouse=True)
def _state_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn, "is_conv_state_dim_first", lambda: False)


def metadata(requests: list[tuple[int, int, int]]) -> Any:
    """vLLM's metadata of a step; a request is (slot, computed tokens, new tokens), requests of one token come first."""
    decodes = sum(new == 1 for _, _, new in requests)
    start = torch.tensor([0, *(new for _, _, new in requests)]).cumsum(0).int()
    return SimpleNamespace(
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_prefills=len(requests) - decodes,
        num_actual_tokens=int(start[-1]),
        non_spec_query_start_loc=start,
        non_spec_state_indices_tensor=torch.tensor([slot for slot, _, _ in requests], dtype=torch.int32),
    )


def step(
    layer: Layer, requests: list[tuple[int, int, int]], rows: list[torch.Tensor], patch: Any
) -> list[torch.Tensor]:
    """Run new tokens [new, CHANNELS + 2 * Hv] of each request, with a token of padding; outputs by request."""
    computed = torch.tensor([before for _, before, _ in requests])
    batch = gdn.make_batch(metadata(requests), computed)
    gdn.clear_fresh([layer], batch, computed, None)
    every_layer = {layer.prefix: SimpleNamespace(vllm_fl_batch=batch)}
    patch.setattr(gdn, "get_forward_context", lambda: SimpleNamespace(attn_metadata=every_layer))
    packed = torch.cat([*rows, torch.full_like(rows[0][:1], float("nan"))])
    output = torch.zeros(len(packed), VALUE_HEADS, VALUE_DIM)
    mixed, b, a = packed.split([CHANNELS, VALUE_HEADS, VALUE_HEADS], -1)
    layer._forward_core(mixed, b.contiguous(), a.contiguous(), output)
    assert (output[-1] == 0).all()
    return list(output[:-1].split([new for _, _, new in requests]))


def by_hand(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """The whole sequence, one token and one head at a time."""
    rows = rows.double()
    mixed, b, a = rows.split([CHANNELS, VALUE_HEADS, VALUE_HEADS], -1)
    past = torch.cat([mixed.new_zeros(WIDTH - 1, CHANNELS), mixed])
    weight = layer.conv1d.weight[:, 0].double()
    conv = torch.stack([(past[t : t + WIDTH].T * weight).sum(-1) for t in range(len(mixed))])
    conv = torch.nn.functional.silu(conv)
    q, k, v = conv.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
    output = torch.empty(len(rows), VALUE_HEADS, VALUE_DIM, dtype=torch.float64)
    for head in range(VALUE_HEADS):
        key = slice(head * KEY_HEADS // VALUE_HEADS * KEY_DIM, (head * KEY_HEADS // VALUE_HEADS + 1) * KEY_DIM)
        state = torch.zeros(VALUE_DIM, KEY_DIM, dtype=torch.float64)
        for t in range(len(rows)):
            q_t, k_t = (x[t, key] / (x[t, key].square().sum() + 1e-6).sqrt() for x in (q, k))
            v_t = v[t, head * VALUE_DIM : (head + 1) * VALUE_DIM]
            softplus = torch.nn.functional.softplus(a[t, head] + layer.dt_bias[head].double())
            state = state * torch.exp(-layer.A_log[head].double().exp() * softplus)
            state = state + torch.sigmoid(b[t, head]) * torch.outer(v_t - state @ k_t, k_t)
            output[t, head] = state @ q_t * KEY_DIM**-0.5
    return output


def sequence(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, CHANNELS + 2 * VALUE_HEADS, generator=torch.Generator().manual_seed(seed))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("pieces", [[12], [5, 7], [11, 1], [1, 11], [2, 1, 1, 8], [1] * 12], ids=str)
def test_a_sequence_in_pieces(pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = Layer(), sequence(12, 1)
    outputs, done = [], 0
    for new in pieces:
        outputs += step(layer, [(3, done, new)], [rows[done : done + new]], monkeypatch)
        done += new
    assert_same(torch.cat(outputs), by_hand(layer, rows))


def test_decodes_fresh_prompts_of_one_token_and_prefills_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    old, chunked, fresh, long = sequence(6, 1), sequence(9, 2), sequence(1, 3), sequence(70, 4)
    step(layer, [(5, 0, 5), (2, 0, 4)], [old[:5], chunked[:4]], monkeypatch)
    requests = [(5, 5, 1), (7, 0, 1), (2, 4, 5), (1, 0, 70)]
    outputs = step(layer, requests, [old[5:], fresh, chunked[4:], long], monkeypatch)
    for output, rows in zip(outputs, (old, fresh, chunked, long), strict=True):
        assert_same(output, by_hand(layer, rows)[-len(output) :])


def test_states_of_others_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    step(layer, [(5, 0, 1), (2, 0, 4)], [sequence(1, 1), sequence(4, 2)], monkeypatch)
    others = [slot for slot in range(SLOTS) if slot not in (5, 2)]
    for state in layer.kv_cache:
        assert (state[others] == 7.0).all()
        assert not (state[[5, 2]] == 7.0).any()


def test_a_run_without_requests_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, output = Layer(), torch.zeros(3, VALUE_HEADS, VALUE_DIM)
    layer.kv_cache = ()
    monkeypatch.setattr(gdn, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    layer._forward_core(torch.ones(3, CHANNELS), torch.ones(3, 4), torch.ones(3, 4), output)
    assert (output == 0).all()


@pytest.mark.parametrize(
    ("computed", "maybe_fresh", "wanted"),
    [
        ([3, 0, 5, 0], None, [0, 7, 0, 4]),
        ([3, 0, 5, 0], [True, True, True, True], [0, 7, 0, 4]),
        ([3, 0, 5, 9], [False, True, False, False], [7]),
        ([3, 0, 5, 0], [False, True, False, True], [7, 0, 4]),
        ([3, 1, 5, 2], [False, True, False, False], [0]),
        ([3, 4, 5, 9], [False, False, False, False], None),
    ],
)
def test_slots_of_decodes_without_a_state(
    computed: list[int], maybe_fresh: list[bool] | None, wanted: list[int] | None
) -> None:
    """One slot for each decode between the first and the last that the host cannot rule out; 0 if it has a state."""
    slots = torch.tensor([5, 7, 2, 4], dtype=torch.int32)
    hint = None if maybe_fresh is None else torch.tensor(maybe_fresh)
    found = gdn.fresh_slots(slots, torch.tensor(computed), hint)
    assert (None if found is None else found.tolist()) == wanted


@pytest.mark.parametrize(
    ("prefilling", "bound", "wanted"),
    [
        (None, [1, 1, 9], None),
        ([True, False, True], None, [True, False]),
        ([True, True, True], [1, 8, 1], [True, False]),
    ],
)
def test_what_the_host_knows_about_states(
    prefilling: list[bool] | None, bound: list[int] | None, wanted: list[bool] | None
) -> None:
    common = SimpleNamespace(is_prefilling=None if prefilling is None else torch.tensor(prefilling))
    if bound is not None:
        common.seq_lens_cpu_upper_bound = torch.tensor(bound)
    found = gdn._maybe_fresh(common, 2)
    assert (None if found is None else found.tolist()) == wanted


def test_all_layers_are_cleared_before_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the builder, which runs before a captured step is replayed."""
    layers = {name: Layer() for name in ("a", "b", "other")}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    base = gdn.GDNAttentionMetadataBuilder
    requests = [(5, 5, 1), (7, 0, 1), (2, 4, 3)]
    built = metadata(requests)
    built.spec_sequence_masks = None
    monkeypatch.setattr(base, "__init__", lambda self, *args: None)
    monkeypatch.setattr(base, "build", lambda self, *args: built)
    builder = gdn.FLGDNAttentionMetadataBuilder(None, ["a", "b"], config, torch.device("cpu"))
    common = SimpleNamespace(
        seq_lens=torch.tensor([6, 1, 7]),
        query_start_loc=built.non_spec_query_start_loc,
        is_prefilling=torch.tensor([False, True, True]),
    )
    assert builder.build(0, common).vllm_fl_batch.decodes == 2
    for name, layer in layers.items():
        for state in layer.kv_cache:
            assert (state[7] == 0).all() == (name != "other")
            assert (state[[0, 5, 2]] == 7.0).all()


def test_speculative_decoding_is_refused() -> None:
    gdn._refuse_speculation(False)
    with pytest.raises(NotImplementedError) as caught:
        gdn._refuse_speculation(True)
    assert str(caught.value) == (
        "speculative decoding of a model with gated delta networks is not available through dispatch; leave out "
        "--speculative-config, or set VLLM_FL_OOT_BLACKLIST=gated_delta_net to use vLLM's own layer where it runs"
    )
