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
