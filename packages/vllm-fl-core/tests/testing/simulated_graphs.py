"""A simulated device module whose graphs record PyTorch operations on the CPU and run them again at a replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SimulatedGraph:
    """What was recorded, in order; results stay where they were."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def capture_begin(self) -> None:
        """Recording is begun by :func:`graph`."""

    def replay(self) -> None:
        for function, args, kwargs, results in self.calls:
            again = function(*args, **kwargs)
            for result, value in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(result, torch.Tensor):
                    result.copy_(value)


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, results))
        return results


@contextmanager
def graph(captured: SimulatedGraph) -> Iterator[None]:
    with _Recorder(captured.calls):
        yield


def device_module(device: Any = None) -> SimpleNamespace:
    """Stands for ``torch.get_device_module(device)``."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    return SimpleNamespace(
        SimulatedGraph=SimulatedGraph,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda entered: nullcontext(),
        graph=graph,
        synchronize=lambda: None,
    )
