"""Every kernel compiles for four targets as its launcher launches it, without spilling, and once a model shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from kernel_inputs import INTERPRETED
from launches import TARGETS, Launch, record

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler by the interpreter")

#: Batch sizes that a server sees: what is compiled must not depend on them.
BATCHES = (1, 2, 7, 16, 64, 255, 1000, 4096)


@dataclass(frozen=True)
class Case:
    """A launcher with the shapes of a model; `call` takes the number of tokens (or requests).

    Args:
        name: for the test's id.
        call: calls the launcher with meta tensors.
        targets: names of :data:`TARGETS`; the kernel is for these only.
        variants: compilations of each kernel over all batch sizes.
        spills: kernel -> target -> bytes that it may spill, with the reason in a comment.
        tokens: how many the compiled launch has.
    """

    name: str
    call: Callable[[int], Any]
    targets: tuple[str, ...] = tuple(TARGETS)
    variants: int = 1
    spills: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tokens: int = 256


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


CASES: list[Case] = []

_launches: dict[tuple[str, int], list[Launch]] = {}


def _launched(case: Case, tokens: int) -> list[Launch]:
    key = (case.name, tokens)
    if key not in _launches:
        _launches[key] = record(case.call, tokens)
    return _launches[key]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiles_without_spilling(case: Case, target: str) -> None:
    if target not in case.targets:
        pytest.skip(f"not for {target}")
    launches = dict.fromkeys(_launched(case, case.tokens))
    assert launches, "nothing was launched"
    for launch in launches:
        used = launch.compile(target)
        print(f"{case.name} {launch.name} {target}: {used}")
        assert used.spilled <= case.spills.get(launch.name, {}).get(target, 0), f"{launch.name}: {used}"
        assert used.shared <= TARGETS[target][1], f"{launch.name}: {used}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_is_compiled_once_a_model_shape(case: Case) -> None:
    versions: dict[str, set[Launch]] = {}
    for tokens in BATCHES:
        for launch in _launched(case, tokens):
            versions.setdefault(launch.name, set()).add(launch)
    counts = {name: len(found) for name, found in versions.items()}
    assert versions
    assert max(counts.values()) <= case.variants, counts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_grid_is_within_the_limits(case: Case) -> None:
    """65,535 programs along the second and third dimension of the grid, at any batch size."""
    for launch in record(case.call, 100_000):
        assert all(size <= 65535 for size in launch.grid[1:]), launch
        assert all(size < 2**31 for size in launch.grid), launch
