"""tests/matrix/vllm_tests.toml: which of vLLM's test modules run, why others do not, and where failures come from."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).resolve().parent.parent / "tests" / "matrix" / "vllm_tests.toml"


class SelectionError(Exception):
    """The file is wrong, or says nothing of a module; the message says which, and what to do."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Take(_Entry):
    """Modules, or folders of them, that run in one process; `name` says what they test.

    Tests that start an engine have no side without us: vLLM's own CPU platform has no attention without its kernels.
    """

    name: str
    engine: bool = False
    paths: list[str]


class Leave(_Entry):
    """Modules, or folders of them, that do not run."""

    reason: str
    paths: list[str]


class Known(_Entry):
    """Where some failures come from.

    `tests` are patterns of names as pytest prints them, such as ``v1/core/*::test_a*``; `message` is searched for in
    the text of the failure. Both have to fit.
    """

    reason: str
    tests: list[str] = ["*"]
    message: re.Pattern[str] = re.compile("")

    @field_validator("message", mode="before")
    @classmethod
    def _compile(cls, value: Any) -> Any:
        return re.compile(value, re.DOTALL) if isinstance(value, str) else value


class StandIn(_Entry):
    """A model of the hub that another takes the place of: the quickstart model, or a configuration of transformers.

    `config` is a class of transformers, whose defaults are the model's own, with `changes`; the tokenizer is the
    quickstart model's. With `weights` they are random, without it there are none. `same` says that the quickstart model
    is the very one.
    """

    name: str
    config: str = ""
    changes: dict[str, Any] = {}
    weights: bool = False
    same: bool = False


class Selection(_Entry):
    take: list[Take]
    leave: list[Leave]
    known: list[Known] = []
    stand_in: list[StandIn] = []

    def sort(self, modules: Iterable[str]) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
        """({index of `take`: its modules}, {index of `leave`: its modules}); the longest path that fits decides.

        Raises:
            SelectionError: a module is in neither, or a path fits no module.
        """
        places = {path: (True, index) for index, entry in enumerate(self.take) for path in entry.paths}
        places |= {path: (False, index) for index, entry in enumerate(self.leave) for path in entry.paths}
        taken: dict[int, list[str]] = {index: [] for index in range(len(self.take))}
        left: dict[int, list[str]] = {index: [] for index in range(len(self.leave))}
        unused, undecided = set(places), []
        for module in modules:
            path = max((path for path in places if fits(module, path)), key=len, default=None)
            unused.discard(path or "")
            if path is None:
                undecided.append(module)
            else:
                runs, index = places[path]
                (taken if runs else left)[index].append(module)
        if undecided or unused:
            parts = [f"says nothing of {', '.join(undecided)}"] if undecided else []
            parts += [f"names {', '.join(sorted(unused))}, which is not there"] if unused else []
            raise SelectionError(f"{FILE.name} {'; it '.join(parts)}. It holds for one version of vLLM: change it.")
        return taken, left

    def reason(self, test: str, text: str) -> str | None:
        """Where a failure comes from; None if nobody has found out."""
        for known in self.known:
            if known.message.search(text) and any(fnmatchcase(test, pattern) for pattern in known.tests):
                return known.reason
        return None


def fits(module: str, path: str) -> bool:
    """Whether a module is `path`, or in the folder `path`."""
    return module == path or module.startswith(f"{path}/")


def read(file: Path = FILE) -> Selection:
    """The selection.

    Raises:
        SelectionError: the file is no TOML, or an entry is wrong.
    """
    try:
        return Selection.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise SelectionError(f"{file}: {error}") from None
