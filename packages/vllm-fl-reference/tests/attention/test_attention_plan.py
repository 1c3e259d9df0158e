"""Which padded batches a step is cut into: bounded waste, bounded memory, as few calls as that allows."""

from __future__ import annotations

import pytest
import torch

from vllm_fl_reference import attention_plan
from vllm_fl_reference.attention_plan import AttentionStep


def padding(step: AttentionStep) -> float:
    """Scores computed, over scores needed."""
    needed = sum(
        (end - start) * length
        for start, end, length in zip(step.query_start, step.query_start[1:], step.seq_lens, strict=False)
    )
    return sum(batch.size * batch.queries * batch.keys for batch in step.batches(None)) / needed


def make_step(requests: list[tuple[int, int]], row_bytes: int = 256) -> AttentionStep:
    query_start = [0]
    for _, new in requests:
        query_start.append(query_start[-1] + new)
    lengths = [sum(item) for item in requests]
    return AttentionStep(query_start, lengths, None, torch.device("cpu"), row_bytes=row_bytes)


def test_equal_decodes_are_one_batch_over_a_slice() -> None:
    (batch,) = make_step([(119, 1)] * 15).batches(None)
    assert (batch.size, batch.queries, batch.keys, batch.tokens) == (15, 1, 120, slice(0, 15))
    assert batch.mask(torch.float32) is None


def test_decodes_of_a_chat_are_one_batch() -> None:
    assert len(make_step([(50 + 10 * index, 1) for index in range(15)]).batches(None)) == 1


def test_a_prompt_beside_decodes_is_a_batch_of_its_own() -> None:
    step = make_step([(100, 1)] * 20 + [(0, 300)])
    assert sorted((batch.size, batch.queries, batch.keys) for batch in step.batches(None)) == [
        (1, 300, 300),
        (20, 1, 101),
    ]
    assert padding(step) == 1.0


def test_one_long_sequence_does_not_pad_the_short_ones() -> None:
    step = make_step([(60, 1)] * 30 + [(20000, 1)])
    assert padding(step) == 1.0


def test_the_waste_of_padding_is_bounded() -> None:
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        new = torch.randint(1, 300, (64,), generator=random).tolist()
        assert padding(make_step([(0, tokens) for tokens in new])) < 1.7
        old = torch.randint(1, 4000, (200,), generator=random).tolist()
        decodes = make_step([(tokens, 1) for tokens in old])
        assert padding(decodes) < 1.2
        assert len(decodes.batches(None)) < 30


def test_the_memory_of_a_batch_is_bounded() -> None:
    step = make_step([(8000, 1)] * 64, row_bytes=4096)
    assert all(batch.size * batch.keys * 4096 <= attention_plan.MAX_KEY_BYTES for batch in step.batches(None))


def test_a_long_prefill_is_cut() -> None:
    step = make_step([(10000, 2000)])
    batches = step.batches(None)
    assert all(batch.queries * batch.keys <= attention_plan.MAX_SCORES for batch in batches)
    assert sum(batch.queries for batch in batches) == 2000


def test_a_window_bounds_the_keys_that_are_read() -> None:
    (batch,) = make_step([(5000, 1)] * 4).batches(128)
    assert batch.keys == 128


def test_layers_share_the_batches_of_a_step() -> None:
    step = make_step([(100, 1), (3, 40)])
    assert step.batches(None) is step.batches(None)
    assert step.batches(7) is not step.batches(None)
    first, second = step.batches(None)
    for batch in (first, second):
        assert batch.mask(torch.float32) is batch.mask(torch.float32)


@pytest.mark.parametrize(
    ("queries", "on_a_device"), [(1, 1), (2, 2), (32, 32), (33, 34), (64, 64), (65, 66), (129, 130), (130, 130)]
)
def test_no_tile_of_one_query_on_a_device(queries: int, on_a_device: int) -> None:
    assert attention_plan.padded_queries(queries, torch.device("cuda")) == on_a_device
    assert attention_plan.padded_queries(queries, torch.device("cpu")) == queries


def test_a_padded_query_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "padded_queries", lambda queries, device: queries + 1)
    (batch,) = AttentionStep([0, 3], [5], None, torch.device("cpu")).batches(None)
    rows = torch.arange(3.0).view(3, 1, 1)
    taken = batch.take(rows)
    assert taken.flatten().tolist() == [0.0, 1.0, 2.0, 2.0]
    mask = batch.mask(torch.float32)
    assert mask is not None
    assert mask[0, 0, 2].equal(mask[0, 0, 3])
    written = torch.zeros_like(rows)
    batch.put(taken.unsqueeze(2), written)
    assert written.equal(rows)
