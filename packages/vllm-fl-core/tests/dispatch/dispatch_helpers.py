"""Implementations and managers for the tests of dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_fl.dispatch import BackendImplKind, OpImpl, OpManager


class FakeTensor:
    """What dispatch looks at in a tensor; torch is not needed to test decisions."""

    def __init__(self, *shape: int, dtype: str = "float32", device: str = "cpu") -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.values = [0]


def vendor(name: str, op: str, fn: Callable[..., Any], *, priority: int = 100, **fields: Any) -> OpImpl:
    return OpImpl(op, f"vendor.{name}", BackendImplKind.VENDOR, fn, vendor=name, priority=priority, **fields)


def reference(op: str, fn: Callable[..., Any], **fields: Any) -> OpImpl:
    return OpImpl(op, "reference.torch", BackendImplKind.REFERENCE, fn, priority=50, **fields)


def flagos(op: str, fn: Callable[..., Any], **fields: Any) -> OpImpl:
    return OpImpl(op, "default.flagos", BackendImplKind.DEFAULT, fn, priority=150, **fields)


def manager_of(*impls: OpImpl) -> OpManager:
    """A manager with these implementations and no others."""
    manager = OpManager(register_builtins=False)
    manager.registry.register_many(impls)
    return manager


def silu(answer: Any) -> Callable[[Any], Any]:
    """An implementation of silu_and_mul that returns `answer`, or raises it."""

    def silu_and_mul(x: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return silu_and_mul
