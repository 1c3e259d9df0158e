"""Attention over the paged cache, on all paths, against a literal softmax in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE_IDS, DTYPES, maker

from vllm_fl.flagos.kernels import splits
from vllm_fl.flagos.kernels.paged_attention import Scratch, encoder_attention, paged_attention

#: (rtol and atol): products are rounded to the query's dtype once.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NONE = Scratch(*(torch.zeros(0, device=DEVICE) for _ in range(3)))


@dataclass
class Batch:
    """Requests (tokens before the query, tokens of the query), a cache that holds them all, and the queries."""

    requests: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    page: int = 4
    dtype: torch.dtype = torch.float32
    heads_first: bool = False
    query: torch.Tensor = field(init=False)
    cache: torch.Tensor = field(init=False)
    table: torch.Tensor = field(init=False)
    lengths: torch.Tensor = field(init=False)
    starts: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        make = maker(self.dtype)
        lengths = [before + new for before, new in self.requests]
        per_request = max(-(-max(lengths) // self.page), 1)
        blocks = len(lengths) * per_request + 1
        shape = (blocks, self.page, self.kv_heads, 2 * self.size)
        if self.heads_first:
            self.cache = make.normal(blocks, self.kv_heads, self.page, 2 * self.size)
        else:
            self.cache = make.normal(*shape).transpose(1, 2)
        self.table = (make.permutation(blocks - 1) + 1).view(len(lengths), per_request)
        self.lengths = make.tensor(lengths, dtype=torch.int32)
        new = [new for _, new in self.requests]
        self.starts = torch.tensor([0, *new]).cumsum(0).int().to(DEVICE)
        self.query = make.normal(sum(new) + 2, self.heads, self.size)  # with rows of padding

    def want(self, window: int = 0, soft_cap: float = 0.0, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H, D] in float64, token by token."""
        rows = self.cache.cpu().double()
        query, table = self.query.cpu().double(), self.table.cpu().long()
        group = self.heads // self.kv_heads
        out, token = [], 0
        for r, (before, new) in enumerate(self.requests):
            both = rows[table[r]].transpose(1, 2).flatten(0, 1).repeat_interleave(group, 1)  # [tokens, H, 2 D]
            for position in range(before, before + new):
                first = max(position - window + 1, 0) if window else 0
                seen = both[first : position + 1]
                scores = torch.einsum("hd,nhd->hn", query[token], seen[..., : self.size]) * 0.3
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.cpu().double()[:, None]], 1)
                weights = scores.softmax(1)[:, : len(seen)]
                out.append(torch.einsum("hn,nhd->hd", weights, seen[..., self.size :]))
                token += 1
        return torch.stack(out)

    def check(self, decodes: int, scratch: Scratch | None = None, **options: Any) -> None:
        """Run it, with the first `decodes` requests on the decode path."""
        output = torch.full_like(self.query, float("nan"))
        longest = max(new for _, new in self.requests)
        paged_attention(
            self.query, *self.cache.split(self.size, -1), self.table, self.lengths, self.starts, output, 0.3, longest,
            decodes, scratch=scratch, **options,
        )  # fmt: skip
        tolerance = TOLERANCES[self.dtype]
        got = output[:-2].cpu().double()
        torch.testing.assert_close(got, self.want(**options), rtol=tolerance, atol=tolerance)
        assert output[-2:].isnan().all(), "rows of padding were written"


DECODES = [(4, 1), (69, 1), (0, 1), (130, 1)]
MIXED = [(5, 1), (33, 1), (0, 5), (66, 35), (3, 2)]
WITH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds a program: a device that four splits fill."""
    if DEVICE == "cpu":
        monkeypatch.setattr(splits, "multiprocessors", lambda device: 16)


@WITH_DTYPES
@pytest.mark.parametrize("scratch", [None, NONE], ids=["splits", "one split"])
def test_decodes(device: str, dtype: torch.dtype, scratch: Scratch | None) -> None:
    Batch(DECODES, dtype=dtype).check(4, scratch)


@WITH_DTYPES
def test_a_mixed_batch(device: str, dtype: torch.dtype) -> None:
    Batch(MIXED, dtype=dtype).check(2)


@pytest.mark.parametrize("decodes", [0, 1], ids=str)
def test_decodes_on_the_path_of_longer_queries(device: str, decodes: int) -> None:
    Batch(MIXED).check(decodes)
    Batch(DECODES).check(decodes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page"), [(6, 2, 16, 16), (7, 1, 40, 3), (3, 3, 8, 5), (32, 1, 16, 4)]
)
def test_shapes(device: str, heads: int, kv_heads: int, size: int, page: int) -> None:
    """Groups and heads that are no powers of two, more heads in a group than a tile has rows, blocks of any size."""
    Batch([(9, 1), (17, 40), (0, 3)], heads, kv_heads, size, page).check(1)


@pytest.mark.parametrize("scratch", [None, NONE], ids=["splits", "one split"])
@pytest.mark.parametrize("options", [{"window": 9}, {"soft_cap": 0.4}, {"window": 40, "soft_cap": 1.0}], ids=str)
def test_windows_and_soft_caps(device: str, options: dict[str, float], scratch: Scratch | None) -> None:
    Batch(MIXED).check(2, scratch, **options)


@pytest.mark.parametrize("scratch", [None, NONE], ids=["splits", "one split"])
def test_sinks(device: str, scratch: Scratch | None) -> None:
    Batch(MIXED).check(2, scratch, sinks=maker().normal(4), window=9)


def test_heads_first_in_the_cache_and_a_query_that_is_part_of_a_projection(device: str) -> None:
    batch = Batch(MIXED, heads_first=True)
    projected = torch.cat([batch.query.flatten(1), maker().normal(batch.query.shape[0], 24)], 1)
    batch.query = projected[:, : 4 * 16].view(-1, 4, 16)
    assert not batch.query.is_contiguous()
    batch.check(2)


def test_no_more_splits_than_the_scratch_holds(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    batch = Batch(DECODES)
    scratch = Scratch(*(torch.full((n,), float("nan"), device=device) for n in (80 * 16, 80, 80)))
    found = splits.choose_splits(4, 4, 2, 16, scratch, batch.query)
    assert found == (4, scratch)  # 80 // (4 requests * 4 heads) = 5
    batch.check(4, scratch)


def test_splits_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    query = torch.empty(1, device="meta")
    sizes = {
        requests: splits.choose_splits(requests, 32, 8, 128, None, query)[0] for requests in (1, 4, 16, 32, 33, 256)
    }
    assert sizes == {1: 16, 4: 16, 16: 4, 32: 2, 33: 1, 256: 1}


def test_requests_that_pad_the_batch(device: str) -> None:
    """In captured graphs: as decodes they have a row, which becomes zero; as others they have none."""
    batch = Batch([(4, 1), (9, 1)])
    lengths = torch.cat([batch.lengths, batch.lengths.new_zeros(2)])
    starts = torch.cat([batch.starts, batch.starts[-1:].expand(2)])
    table = torch.cat([batch.table, torch.full_like(batch.table, 10**6)])
    for decodes, tail in ((4, 0.0), (2, 7.0)):
        output = torch.full_like(batch.query, 7.0)
        caches = batch.cache.split(batch.size, -1)
        paged_attention(batch.query, *caches, table, lengths, starts, output, 0.3, 1, decodes)
        torch.testing.assert_close(output[:2].cpu().double(), batch.want(), rtol=1e-5, atol=1e-5)
        assert (output[2:] == tail).all()


def test_what_is_not_read_does_not_count(device: str) -> None:
    """Slots past the end of a request, and blocks of others, may hold anything."""
    batch = Batch(MIXED, page=16)
    want = batch.want()
    live = torch.zeros(batch.cache.shape[0], 16, dtype=torch.bool)
    for r, length in enumerate(batch.lengths.tolist()):
        for position in range(length):
            live[batch.table[r, position // 16], position % 16] = True
    batch.cache.masked_fill_(~live.to(device)[:, None, :, None], float("nan"))
    batch.want = lambda: want  # type: ignore[method-assign]
    batch.check(2)


def test_nothing_to_do(device: str) -> None:
    batch = Batch([(4, 1)])
    caches = batch.cache.split(batch.size, -1)
    paged_attention(batch.query[:0], *caches, batch.table, batch.lengths, batch.starts, batch.query[:0], 0.3, 1, 0)
    paged_attention(batch.query, *caches, batch.table, batch.lengths[:0], batch.starts, batch.query, 0.3, 1, 0)


def test_refusals(device: str) -> None:
    batch = Batch([(4, 1)], size=272)
    tail = (batch.table, batch.lengths, batch.starts, batch.query, 0.3, 1, 1)
    with pytest.raises(NotImplementedError) as caught:
        paged_attention(batch.query, *batch.cache.split(272, -1), *tail)
    assert str(caught.value) == "query: heads of 272 entries, at most 256"
    batch = Batch([(4, 1)])
    with pytest.raises(NotImplementedError) as caught:
        paged_attention(batch.query, batch.cache[..., ::2], batch.cache[..., 16:], *tail)
    assert str(caught.value) == "key: the last dimension has stride 2, expected 1"


def check_encoder(
    lengths: list[int], heads: int, kv_heads: int, size: int, dtype: torch.dtype, window: int = 0, soft_cap: float = 0.0
) -> None:
    """Against a literal softmax in float64; the projections lie in one tensor, with rows of padding behind."""
    tokens, longest = sum(lengths), max(lengths)
    projected = maker(dtype).normal(tokens + 2, heads + 2 * kv_heads, size)
    query, key, value = projected.split([heads, kv_heads, kv_heads], 1)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    output = torch.full_like(query.contiguous(), float("nan"))
    encoder_attention(query, key, value, starts, output, 0.3, longest, window, soft_cap)
    assert output[tokens:].isnan().all(), "rows of padding were written"
    q, k, v = (x.cpu().double() for x in (query, key, value))
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    for begin, length in zip(starts.tolist(), lengths, strict=False):
        own = slice(begin, begin + length)
        scores = torch.einsum("qhd,khd->hqk", q[own], k[own]) * 0.3
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if window:
            at = torch.arange(length)
            scores.masked_fill_((at[:, None] - at).abs() >= window, float("-inf"))
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[own])
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(output[own].cpu().double(), want, rtol=tolerance, atol=tolerance)


@WITH_DTYPES
@pytest.mark.parametrize("window", [0, 1, 9])
def test_encoders_look_to_both_sides(device: str, dtype: torch.dtype, window: int) -> None:
    check_encoder([5, 1, 70, 0, 33], 4, 2, 16, dtype, window)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 16), (7, 1, 40), (3, 3, 8)])
def test_shapes_of_encoders(device: str, heads: int, kv_heads: int, size: int) -> None:
    check_encoder([64, 3, 130], heads, kv_heads, size, torch.float32, soft_cap=2.0)


def test_encoders_without_tokens(device: str) -> None:
    empty, starts = torch.empty(0, 2, 16, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    encoder_attention(empty, empty, empty, starts, empty, 0.3, 0)
