"""FlagGems in place of PyTorch's own ATen functions; called in workers, once a process.

Nothing is replaced unless it is asked for: by a whitelist (``flagos_whitelist``) that names FlagGems' functions, or by
setting ``use_flaggems`` (``USE_FLAGGEMS``) to true in any layer above the defaults, which replaces all but those of
:data:`LEFT_OUT` and of the blacklist. A name is that of a FlagGems function (``mm_out``) or of an ATen function
(``mm``, which means all its overloads). A name that the operator catalogue has (``rms_norm``) means the operator,
never ATen.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fl.catalog import CATALOG
from vllm_fl.logging import get_logger

from .availability import flaggems_aten

if TYPE_CHECKING:
    from vllm_fl.config import Settings

#: Not replaced unless the whitelist names them. A launch of the elementwise ones costs the host several times what
#: PyTorch's does, and addmm is known to fail in graph capture on some devices.
LEFT_OUT = ("add", "addmm", "full", "ones", "zeros")

_done: dict[str, AtenReplacement] = {}


@dataclass(frozen=True)
class AtenReplacement:
    """What was replaced.

    Args:
        functions: FlagGems' functions that now serve ATen; empty if none.
        reason: why these, or why none.
    """

    functions: tuple[str, ...]
    reason: str


def enable_aten(settings: Settings) -> AtenReplacement:
    """Register FlagGems' functions with ATen as `settings` ask. A second call in a process changes nothing.

    Raises:
        ConfigError: the white- or blacklist names what is neither an operator nor a function of FlagGems.
    """
    if "done" not in _done:
        _done["done"] = _enable(settings)
    return _done["done"]


def _enable(settings: Settings) -> AtenReplacement:
    asked, reason = asked_for(settings)
    if not asked:
        return AtenReplacement((), reason)
    available = flaggems_aten()
    if not available:
        get_logger(__name__).warning("no ATen function is replaced, although %s: %s", reason, available.reason)
        return AtenReplacement((), available.reason)
    from .flaggems import gems

    try:
        flag_gems = gems()
    except NotImplementedError as error:
        return AtenReplacement((), str(error))
    table = _table((entry[0], entry[1].__name__) for entry in flag_gems._FULL_CONFIG)
    _check(settings, table)
    functions = _chosen(settings, table)
    if settings.flagos_whitelist is None:
        everything = set().union(*table.values())
        flag_gems.enable(unused=sorted(everything - functions))
    elif functions:
        flag_gems.only_enable(include=sorted(functions))
    names = tuple(sorted(set(flag_gems.all_registered_ops()))) if functions else ()
    get_logger(__name__).info("FlagGems replaces %d ATen functions, since %s", len(names), reason)
    return AtenReplacement(names, reason)


def asked_for(settings: Settings) -> tuple[bool, str]:
    """Whether `settings` ask for any replacement, and why so."""
    if not settings.prefer_enabled:
        return False, f"vllm-fl is switched off ({settings.origin('prefer_enabled')})"
    if not settings.use_flaggems:
        return False, f"use_flaggems is off ({settings.origin('use_flaggems')})"
    if settings.flagos_whitelist is not None:
        origin = settings.origin("flagos_whitelist")
        if settings.flagos_whitelist <= set(CATALOG):
            return False, f"flagos_whitelist names no ATen function ({origin})"
        return True, f"flagos_whitelist names ATen functions ({origin})"
    origin = settings.origin("use_flaggems")
    if origin.layer == "default":
        return False, "neither use_flaggems (USE_FLAGGEMS) nor flagos_whitelist is set"
    return True, f"use_flaggems is on ({origin})"


def _chosen(settings: Settings, table: Mapping[str, frozenset[str]]) -> set[str]:
    """FlagGems' functions to register."""

    def functions(names: Iterable[str]) -> set[str]:
        return set().union(*(table.get(name, ()) for name in set(names) - set(CATALOG)))

    denied = functions(settings.flagos_blacklist)
    if settings.flagos_whitelist is not None:
        return functions(settings.flagos_whitelist) - denied
    return set().union(*table.values()) - functions(LEFT_OUT) - denied


def _table(entries: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    """Name -> FlagGems' functions that it means, from (ATen overload, function)."""
    found: dict[str, set[str]] = {}
    for overload, function in entries:
        for name in (function, overload.partition(".")[0]):
            found.setdefault(name, set()).add(function)
    return {name: frozenset(functions) for name, functions in found.items()}


def _check(settings: Settings, table: Mapping[str, Any]) -> None:
    from vllm_fl.config import KnownNames
    from vllm_fl.dispatch import get_default_manager

    operators = get_default_manager().registry.known_operators()
    settings.check_names(KnownNames(flagos_operators={*operators, *table}))


@functools.cache
def flagos_operators() -> frozenset[str] | None:
    """Every name that the white- and blacklist of kind flagos may hold; None if FlagGems is not installed."""
    table = flaggems_table()
    return None if table is None else frozenset({*CATALOG, *_table(table)})


def flaggems_table() -> list[tuple[str, str]] | None:
    """(ATen function and overload, FlagGems' function) that FlagGems can replace; None if it is not installed.

    Read from its source, since importing it initialises the device.
    """
    try:
        spec = importlib.util.find_spec("flag_gems")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return list(_entries(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))))


def _entries(tree: ast.Module) -> Iterable[tuple[str, str]]:
    """(ATen overload, function) of the table ``_FULL_CONFIG`` in FlagGems' source."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "_FULL_CONFIG" for t in node.targets):
            for entry in getattr(node.value, "elts", ()):
                overload, function = entry.elts[:2]
                if isinstance(overload, ast.Constant) and isinstance(overload.value, str):
                    yield overload.value, getattr(function, "id", getattr(function, "attr", ""))
