"""Zeros by fresh pages of the system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from vllm_fl_reference.lazy_zeros import LazyZeros, release_pages

MIB = 1 << 20


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param((64 * MIB,), {"dtype": torch.int8}, id="bytes"),
        pytest.param((16, MIB), {}, id="sizes"),
        pytest.param(((16, MIB),), {"dtype": torch.bfloat16, "device": "cpu"}, id="shape"),
        pytest.param((3,), {}, id="small"),
        pytest.param((0,), {}, id="empty"),
    ],
)
def test_they_are_what_torch_makes(args: Any, kwargs: Any) -> None:
    expected = torch.zeros(*args, **kwargs)
    with LazyZeros():
        found = torch.zeros(*args, **kwargs)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    assert not found.any()
    found.fill_(1)
    assert found.bool().all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the resident memory")
def test_they_take_memory_when_written_and_give_it_back() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    with LazyZeros():
        zeros = torch.zeros(256 * MIB, dtype=torch.int8)
    assert process.memory_info().rss - before < 64 * MIB
    part = zeros[: 128 * MIB].fill_(1)
    assert process.memory_info().rss - before > 100 * MIB
    del zeros, part
    assert process.memory_info().rss - before < 64 * MIB


def test_other_functions_and_devices_are_left_alone() -> None:
    with LazyZeros(minimum=1):
        assert torch.ones(3).sum() == 3
        assert torch.zeros(3, device="meta").device.type == "meta"
        assert torch.zeros(3, requires_grad=True).requires_grad


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux for the resident memory")
@pytest.mark.parametrize("lazy", [True, False])
def test_pages_are_given_back_once_for_all_views(lazy: bool) -> None:
    with LazyZeros(minimum=0 if lazy else 1 << 40):
        tensor = torch.zeros(256 * MIB, dtype=torch.int8)
    tensor.fill_(1)
    process = psutil.Process()
    before = process.memory_info().rss
    freed = release_pages([tensor[10:20], tensor.view(torch.int32), torch.ones(3)])
    assert 255 * MIB < freed <= 256 * MIB
    assert before - process.memory_info().rss > 200 * MIB
    assert tensor[4096:-4096].count_nonzero() == 0
    tensor[12345] = 7
    assert tensor[12345] == 7
