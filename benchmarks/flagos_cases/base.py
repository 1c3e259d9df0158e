"""What a case is: an operator, or a step of several, on the shapes of a model, and how to call vLLM for the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Lookup = Callable[[str], Callable[..., Any]]
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32


@dataclass(frozen=True)
class Case:
    """One operator, or a step of several, on one shape.

    Args:
        name: the operator, or what the step is called.
        shape: for the title.
        args: makes the arguments on a device; torch's default generator is seeded before.
        run: what is computed, given operators by name and the arguments.
        operators: those it needs; the tolerance is that of the last one.
        vllm: prepares vLLM's call for the arguments; it writes the same arguments.
        inputs: dtype of the inputs where written arguments carry its rounding.
    """

    name: str
    shape: str
    args: Callable[[str], tuple[Any, ...]]
    run: Callable[[Lookup, tuple[Any, ...]], Any]
    operators: tuple[str, ...]
    vllm: Callable[..., Callable[[], Any]] | None = None
    inputs: torch.dtype | None = None

    @property
    def title(self) -> str:
        return f"{self.name} {self.shape}"


def one(
    name: str,
    shape: str,
    args: Callable[[str], tuple[Any, ...]],
    vllm: Callable[..., Callable[[], Any]] | None = None,
    inputs: torch.dtype | None = None,
) -> Case:
    """A case of a single operator."""
    return Case(name, shape, args, lambda ops, given: ops(name)(*given), (name,), vllm, inputs)


def normal(device: str, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)
