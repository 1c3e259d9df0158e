"""The simulated torch_npu, and what the tests of the reference implementations have for every implementation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
REFERENCE_TESTS = HERE.parents[1] / "vllm-fl-reference/tests"
#: Oracles in float64, and how they are compared with.
sys.path += [str(REFERENCE_TESTS / "ops"), str(REFERENCE_TESTS / "attention")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors on one thread: waking more costs more than they save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def _simulation() -> Iterator[None]:
    """Registers the simulated operators, which stay; the module is found by these tests only."""
    path = str(HERE / "simulated_torch_npu")
    sys.path.insert(0, path)
    import torch_npu

    held = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == torch_npu.__name__}
    for name in held:
        del sys.modules[name]
    sys.path.remove(path)
    _held.update(held)
    yield
    _held.clear()


_held: dict[str, object] = {}


@pytest.fixture
def simulated_npu(_simulation: None, monkeypatch: pytest.MonkeyPatch) -> object:
    """The simulated torch_npu, imported, with a device."""
    for name, module in _held.items():
        monkeypatch.setitem(sys.modules, name, module)
    npu = sys.modules["torch_npu.npu"]
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    return sys.modules["torch_npu"]
