"""Names of the Triton kernels that the installed packages define, read from their sources: nothing is imported."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

#: A function under a decorator of Triton's; other decorators and comments may stand between.
_JITTED = re.compile(
    r"^[ \t]*@(?:\w+\.)*(?:jit|triton_jit)\b[^\n]*\n"
    r"(?:[ \t]*(?:[@#)\w\[\"'(,][^\n]*)?\n)*?"
    r"[ \t]*def[ \t]+(\w+)[ \t]*\(",
    re.MULTILINE,
)


@dataclass(frozen=True)
class KernelNames:
    """Names of Triton kernels by who defines them.

    Args:
        ours: of vllm-fl.
        vllm: of vLLM.
        flaggems: of FlagGems; those that it generates have a form of their own.
    """

    ours: frozenset[str] = frozenset()
    vllm: frozenset[str] = frozenset()
    flaggems: frozenset[str] = frozenset()


@cache
def installed_kernel_names() -> KernelNames:
    """The names in the packages that are installed here; reading them takes seconds, once a process."""
    ours, vllm, flaggems = (frozenset(_names(package)) for package in ("vllm_fl", "vllm", "flag_gems"))
    return KernelNames(ours, vllm, flaggems)


def kernel_names_of(source: str) -> list[str]:
    """Names of the functions in `source` that are compiled by Triton."""
    return _JITTED.findall(source)


def _names(package: str) -> set[str]:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return set()
    found: set[str] = set()
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in Path(folder).rglob("*.py"):
            source = path.read_text(encoding="utf-8", errors="replace")
            if "triton" in source:
                found.update(kernel_names_of(source))
    return found
