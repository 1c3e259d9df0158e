"""Where in a model a call happens: the step, and the module whose forward runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_NUMBERED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*\.(\d+)")
_RANGES = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*")


@dataclass(frozen=True)
class Filters:
    """Which calls are looked at; None means all.

    Args:
        operators: names.
        layers: numbers of decoder layers, from 0.
        steps: numbers of forwards of the model, from 1.
        ranks: ranks.
    """

    operators: frozenset[str] | None = None
    layers: frozenset[int] | None = None
    steps: frozenset[int] | None = None
    ranks: frozenset[int] | None = None

    def as_plain(self) -> dict[str, list[Any] | None]:
        return {name: None if value is None else sorted(value) for name, value in vars(self).items()}

    @classmethod
    def from_plain(cls, plain: dict[str, list[Any] | None]) -> Filters:
        return cls(**{name: None if value is None else frozenset(value) for name, value in plain.items()})

    def takes(self, place: Place, rank: int) -> bool:
        """Whether calls at `place` are looked at."""
        return (
            (self.steps is None or place.step in self.steps)
            and (self.layers is None or place.layer_number in self.layers)
            and (self.ranks is None or rank in self.ranks)
        )


def parse_numbers(text: str) -> frozenset[int]:
    """``"3"``, ``"0-3,7"`` as numbers.

    Raises:
        ValueError: the text has another form, or a range ends before it begins.
    """
    if not _RANGES.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of numbers; write 7 or 0-3,7")
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{part!r} in {text!r} ends before it begins")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


@dataclass(frozen=True)
class Place:
    """A step, counted from 1, and a module's name; "" outside of every module."""

    step: int
    module: str

    @property
    def layer_number(self) -> int | None:
        """The number of the decoder layer; None outside of all."""
        match = _NUMBERED.match(self.module)
        return int(match[1]) if match else None

    def __str__(self) -> str:
        return f"step {self.step}, {self.module or 'outside of the model'}"


class Tracker:
    """Follows the forwards of a model's modules.

    A step begins when the first module that is entered from outside is entered so again. What is called before the
    first module of a step counts to the step before.

    Args:
        model: the ``torch.nn.Module``; its hooks are taken away again by :meth:`remove`.
        on_layer: called with the name and the output of each decoder layer.
    """

    def __init__(self, model: Any, on_layer: Callable[[str, Any], None] | None = None) -> None:
        self.step = 0
        self._stack: list[str] = []
        self._first: str | None = None
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name)))
            if on_layer is not None and is_layer(name):
                self._hooks.append(module.register_forward_hook(_telling(name, on_layer)))
            self._hooks.append(module.register_forward_hook(self._leaving(), always_call=True))

    @property
    def place(self) -> Place:
        """Where the present call is."""
        return Place(self.step, self._stack[-1] if self._stack else "")

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if not self._stack:
                self._first = name if self._first is None else self._first
                self.step += name == self._first
            self._stack.append(name)

        return enter

    def _leaving(self) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            self._stack.pop()

        return leave


def is_layer(name: str) -> bool:
    """Whether a module of this name is a decoder layer: the first number in its name is at its end."""
    return bool(_NUMBERED.fullmatch(name)) and sum(part.isdigit() for part in name.split(".")) == 1


def _telling(name: str, tell: Callable[[str, Any], None]) -> Callable[..., None]:
    def told(_module: Any, _inputs: Any, output: Any) -> None:
        tell(name, output)

    return told


def tensors_of(output: Any) -> list[Any]:
    """The tensors in a module's output, in order."""
    import torch

    if isinstance(output, torch.Tensor):
        return [output]
    parts: Iterable[Any] = output if isinstance(output, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]
