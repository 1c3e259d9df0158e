"""Every kernel compiles for four targets as its launcher launches it, without spilling, and once a model shape."""

from __future__ import annotations

import pytest
from compile_cases import CASES, Case
from kernel_inputs import INTERPRETED
from launches import TARGETS, Launch, record

pytestmark = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler by the interpreter")

#: Batch sizes that a server sees: what is compiled must not depend on them.
BATCHES = (1, 2, 7, 16, 64, 255, 1000, 4096)


_launches: dict[tuple[str, int], list[Launch]] = {}


def _launched(case: Case, tokens: int) -> list[Launch]:
    key = (case.name, tokens)
    if key not in _launches:
        _launches[key] = record(case.call, tokens)
    return _launches[key]


@pytest.mark.parametrize(
    ("case", "target"),
    [pytest.param(case, target, id=f"{case.name}-{target}") for case in CASES for target in case.targets],
)
def test_compiles_without_spilling(case: Case, target: str) -> None:
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
