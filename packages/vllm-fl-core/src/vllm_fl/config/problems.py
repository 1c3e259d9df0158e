"""Where a value comes from, and what can be wrong with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vllm_fl.errors import ConfigError

LayerName = Literal["file", "environment", "platform", "default"]


@dataclass(frozen=True)
class Origin:
    """The layer that gave a value, and the place in it; ``str()`` is the place.

    Examples of places: ``my.yaml:3:1`` (line and column, from 1), ``environment variable VLLM_FL_PREFER``,
    ``platform file ascend.yaml:2:1``, ``default``.
    """

    layer: LayerName
    where: str

    def __str__(self) -> str:
        return self.where


DEFAULT_ORIGIN = Origin("default", "default")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the configuration; ``str()`` is the line to show.

    Args:
        where: file, line and column, or the variable.
        key: the key, such as ``op_backends.rms_norm``; empty where the place says it already.
        text: the value, what is allowed, the nearest match and the remedy.
    """

    where: str
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.text) if part)


class ConfigProblems(ConfigError):
    """Everything that is wrong with the configuration; `problems` holds the lines of the message one by one."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        if len(lines) > 1:
            lines = [f"{len(lines)} problems in the configuration:", *(f"  {line}" for line in lines)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigProblems], tuple[tuple[Problem, ...]]]:
        return ConfigProblems, (self.problems,)
