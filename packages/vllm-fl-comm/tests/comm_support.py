"""The simulated FlagCX of the tests, its faults and counts, and ranks that are threads."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_fl_comm.flagcx import Communicator, Library

HERE = Path(__file__).parent
FORMS = (12, 13, 14)
CALL_SECONDS = 60


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Doubles:
    """Builds a form of the double at the first request; `fault` and `count` act on a loaded one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.module = folder, _load(HERE / "double" / "build.py")

    def __call__(self, form: int = 13, *defines: str) -> Path:
        """A folder for FLAGCX_PATH."""
        path = self.folder / "-".join([str(form), *defines])
        built: Path = path if path.exists() else self.module.build(path, form, defines)
        return built

    def library(self, form: int = 13, *defines: str) -> Library:
        return Library(str(self(form, *defines) / "lib" / "libflagcx.so"))


def fault(library: Library, text: str) -> None:
    """Let the double fail; see double.c for the form of `text`."""
    function = ctypes.CDLL(library.path).flagcxDoubleFault
    function.argtypes, function.restype = [ctypes.c_char_p], None
    function(text.encode())


def count(library: Library, what: str) -> int:
    """open, created, destroyed, custom, streams or calls, since the double was loaded."""
    function = ctypes.CDLL(library.path).flagcxDoubleCount
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_long
    return int(function(what.encode()))


def on_ranks(
    library: Library, function: Callable[[Communicator], Any], ranks: int = 2, name: str = "tp:0", **options: Any
) -> list[Any]:
    """`function(communicator)` of every rank, each on a thread; the communicators are destroyed afterwards."""
    identifier = library.unique_id()

    def run(rank: int) -> Any:
        communicator = Communicator.create(library, identifier, rank, ranks, name, **options)
        try:
            return function(communicator)
        finally:
            communicator.destroy()

    with ThreadPoolExecutor(ranks) as pool:
        return [future.result(CALL_SECONDS) for future in [pool.submit(run, rank) for rank in range(ranks)]]


def in_process(code: str, env: dict[str, str] | None = None, check: bool = True) -> tuple[int, Any, str]:
    """Run `code` in a fresh Python; (exit status, what ``answer(x)`` gave, standard error)."""
    prologue = "import json, sys\ndef answer(x): print('answer:' + json.dumps(x), flush=True)\n"
    done = subprocess.run(
        [sys.executable, "-c", prologue + code],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=CALL_SECONDS,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("answer:") for line in done.stdout.splitlines() if line.startswith("answer:")]
    return done.returncode, json.loads(lines[-1]) if lines else None, done.stderr


class Buffer:
    """Host memory of one ctypes type."""

    def __init__(self, kind: type, values: Sequence[float]) -> None:
        self.array = (kind * len(values))(*values)
        self.address = ctypes.addressof(self.array)

    @property
    def values(self) -> list[Any]:
        return list(self.array)
