"""Latent attention on all paths against the reference in float64; how the cache is written is test_cache.py's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_inputs import DEVICE, DTYPE_IDS, DTYPES, check, maker

from vllm_fl.catalog import CATALOG
from vllm_fl.catalog.inputs.attention import make_latent_batch
from vllm_fl.flagos.kernels import splits
from vllm_fl.flagos.kernels.mla import concat_and_cache_mla, mla_attention

MIXED = [(5, 1), (40, 1), (0, 5), (30, 9), (16, 2)]
KERNELS = {"mla_attention": mla_attention, "concat_and_cache_mla": concat_and_cache_mla}
#: All in float32; the interpreter has time for one of each operator in the other dtypes.
CASES = [
    pytest.param(name, case.name, dtype, id=f"{name}-{case.name}-{label}")
    for name in KERNELS
    for case in CATALOG[name].inputs(maker())
    for dtype, label in zip(DTYPES, DTYPE_IDS, strict=True)
    if dtype == torch.float32 or DEVICE != "cpu" or case.name in ("mixed", "padding slots")
]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds a program: a device that four splits fill."""
    if DEVICE == "cpu":
        monkeypatch.setattr(splits, "multiprocessors", lambda device: 8)


def run(requests: list[tuple[int, int]], decodes: int, heads: int = 4, page: int = 16, **change: Any) -> torch.Tensor:
    """Compare a batch with latents of 32 entries, and 16 more with positions; `change` replaces arguments by name."""
    names = list(CATALOG["mla_attention"].signature.parameters)
    longest = max(new for _, new in requests)
    batch = (*make_latent_batch(maker(), requests, heads, (32, 16), page), 32, 0.2, longest, decodes)
    arguments = {**dict(zip(names, batch, strict=True)), **change}
    return check(mla_attention, "mla_attention", *arguments.values())


@pytest.mark.parametrize(("name", "case", "dtype"), CASES)
def test_cases(device: str, name: str, case: str, dtype: torch.dtype) -> None:
    (args,) = [found.args for found in CATALOG[name].inputs(maker(dtype)) if found.name == case]
    check(KERNELS[name], name, *args)


@pytest.mark.parametrize("decodes", [0, 1, 2])
def test_decodes_on_either_path(device: str, decodes: int) -> None:
    run(MIXED, decodes)


@pytest.mark.parametrize("processors", [1, 132])
def test_any_number_of_splits(device: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "multiprocessors", lambda device: processors)
    run([(130, 1), (0, 1), (39, 1)], 3)


@pytest.mark.parametrize("heads", [1, 3, 20])
def test_heads_that_do_not_fill_a_tile_and_more_than_do(device: str, heads: int) -> None:
    run([(9, 1), (17, 12), (0, 3)], 1, heads, page=5)


def test_a_cache_of_another_dtype(device: str) -> None:
    query, cache, *rest = make_latent_batch(maker(), [(33, 1), (0, 5)], 4, (32, 16), 16)
    check(mla_attention, "mla_attention", query, cache.half(), *rest, 32, 0.2, 5, 1)


def test_what_is_not_read_does_not_count(device: str) -> None:
    """Slots past the end of a request, and blocks of others, may hold anything."""
    query, cache, table, lengths, *rest = make_latent_batch(maker(), MIXED, 4, (32, 16), 16)
    live = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for request, length in enumerate(lengths.tolist()):
        for position in range(length):
            live[table[request, position // 16], position % 16] = True
    tail = (table, lengths, *rest, 32, 0.2, 9, 2)
    want = mla_attention(query, cache, *tail)
    cache.masked_fill_(~live.to(device)[:, :, None], float("nan"))
    assert torch.equal(mla_attention(query, cache, *tail), want)


def test_refusals(device: str) -> None:
    query, cache, *rest = make_latent_batch(maker(), [(4, 1)], 1, (513, 16), 16)
    with pytest.raises(NotImplementedError) as caught:
        mla_attention(query, cache, *rest, 513, 0.2, 1, 1)
    assert str(caught.value) == "kv_lora_rank: latents of 513 entries, at most 512"
    with pytest.raises(NotImplementedError) as caught:
        mla_attention(query[..., ::2], cache[..., ::2], *rest, 250, 0.2, 1, 1)
    assert str(caught.value) == "query: the last dimension has stride 2, expected 1"
    with pytest.raises(NotImplementedError) as caught:
        mla_attention(query[..., :264], cache[..., ::2][..., :264], *rest, 250, 0.2, 1, 1)
    assert str(caught.value) == "kv_cache: the last dimension has stride 2, expected 1"
