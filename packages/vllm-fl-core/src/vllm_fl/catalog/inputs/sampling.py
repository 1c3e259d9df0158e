"""Inputs of the sampling operators."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_fl.catalog.spec import Case, InputMaker


def apply_repetition_penalties(maker: InputMaker) -> Iterator[Case]:
    for name, requests, vocabulary in (
        ("regular", 4, 1000),
        ("one request", 1, 32_003),
        ("odd", 3, 17),
        ("large", 24, 5_000),
        ("no requests", 0, 100),
    ):
        logits = maker.normal(requests, vocabulary, scale=5.0)
        seen = maker.integers(0, 10, 2, requests, vocabulary) < 2
        yield Case(name, (logits, seen[0], seen[1], maker.uniform(0.5, 2.0, requests)))
    logits = maker.normal(5, 64)
    seen = maker.integers(0, 2, 2, 5, 64) > 0
    yield Case("penalty 1", (logits, seen[0], seen[1], maker.full(1.0, 5)))
    yield Case("nothing seen", (logits, seen[0] & ~seen[0], seen[1] & ~seen[1], maker.full(1.5, 5)))
    yield Case("rows of a wider tensor", (maker.normal(5, 100)[:, :64], seen[0], seen[1], maker.uniform(1.0, 1.5, 5)))


def apply_top_k_top_p(maker: InputMaker) -> Iterator[Case]:
    for name, requests, vocabulary in (
        ("regular", 6, 1000),
        ("one request", 1, 32_003),
        ("odd", 3, 17),
        ("one token", 2, 1),
        ("large", 24, 5_000),
        ("no requests", 0, 100),
    ):
        logits = maker.normal(requests, vocabulary, scale=4.0)
        top_k = maker.integers(1, vocabulary + 1, requests)
        # In tenths and a bit, so that no sum of probabilities lies within rounding of it.
        top_p = maker.integers(1, 10, requests).to(logits.dtype) / 10 + 0.0123
        for kind, k, p in (("both", top_k, top_p), ("top k", top_k, None), ("top p", None, top_p)):
            yield Case(f"{name}, {kind}", (logits.clone(), k, p))
    logits = maker.normal(6, 200, scale=4.0)
    yield Case("limits", (logits.clone(), maker.tensor([1, 2, 200, 1000, 0, -1]), maker.full(1.0, 6)))
    p = maker.tensor([0.0, 1e-6, 0.5, 0.999, 1.0, 1.5])
    yield Case("extremes of p", (logits.clone(), None, p))
    yield Case("no limits", (logits.clone(), None, None))
    masked = logits.masked_fill(maker.integers(0, 3, 6, 200) > 0, float("-inf"))
    yield Case("masked", (masked, maker.integers(1, 100, 6), maker.full(0.7123, 6)))
    ties = maker.integers(0, 5, 6, 200).to(logits.dtype)
    yield Case("equal logits", (ties, maker.integers(1, 201, 6), maker.full(0.5123, 6)))
    wide = maker.normal(5, 100, scale=4.0)[:, :64]
    yield Case("rows of a wider tensor", (wide, maker.integers(1, 64, 5), maker.full(0.8123, 5)))
