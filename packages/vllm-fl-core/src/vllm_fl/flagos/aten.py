"""FlagGems in place of PyTorch's own ATen functions; called in workers, once a process.

Nothing is replaced unless it is asked for: by a whitelist (``flagos_whitelist``) that names FlagGems' functions, or by
setting ``use_flaggems`` (``USE_FLAGGEMS``) to true in any layer above the defaults, which replaces those of
:data:`REPLACED` that the blacklist does not name. A name is that of a FlagGems function (``mm_out``) or of an ATen
function (``mm``, which means all its overloads). A name that the operator catalogue has (``rms_norm``) means the
operator, never ATen.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fl.errors import nearest
from vllm_fl.logging import get_logger

from .availability import flaggems_aten, flaggems_version

if TYPE_CHECKING:
    from vllm_fl.config import Settings

#: FlagGems' functions that ``use_flaggems`` puts in place of ATen's: those of release CHECKED that computed what
#: PyTorch's did on an H200, with strided, broadcast and empty arguments too (benchmarks/flaggems_aten.py). The others
#: differ, draw random numbers, or are not reached by that comparison.
REPLACED = frozenset(
    """
    abs abs_ acos add_ addcmul addmv addr alias_copy all all_dims allclose angle any_dims arange arange_start asinh_
    atan atan_ avg_pool2d baddbmm bitwise_and_tensor bitwise_and_tensor_ bitwise_not bitwise_not_ bitwise_or_tensor
    bitwise_or_tensor_ bmm cat ceil ceil_ celu celu_ clamp_min_ clamp_tensor clamp_tensor_ constant_pad_nd copy_ cos
    cos_ cosh cosh_ count_nonzero diag_embed digamma_ elu elu_ embedding eq equal erf_ exp exp2 exp2_ exp_ expm1
    expm1_ eye eye_m fill_scalar flip fmin full_like ge gelu glu gt hypot i0 isin isinf isnan isneginf le
    lerp_scalar lerp_scalar_ lerp_tensor lerp_tensor_ log10 log10_ log1p_ logaddexp logical_and logical_and_
    logical_not logical_or logical_or_ logical_xor logit_ logspace lt masked_fill_ masked_select max maximum mean
    min minimum mse_loss mul_ mv ne ne_scalar neg neg_ nonzero ones_like pixel_unshuffle reciprocal reciprocal_
    reflection_pad1d reflection_pad2d relu remainder remainder_ replication_pad1d roll rsqrt rsqrt_ sgn_ sigmoid
    sigmoid_ signbit silu silu_ sin sin_ soft_margin_loss softplus softshrink sort_stable stack std sub sub_ sum
    t_copy tan tan_ tanh tanh_ threshold to_copy trace tril triu triu_ true_divide true_divide_ vdot vector_norm
    where_self zeros_like
    """.split()  # noqa: SIM905  a line each, or no quotes: this can be read
)
#: As right, but replaced only where the whitelist names them: a launch costs the host several times PyTorch's.
SLOW = frozenset({"add", "full", "ones", "zeros"})
CHECKED = "5.0.2"

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
    _warn_of_unchecked(functions, reason)
    if functions:
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
        if settings.flagos_whitelist <= _operators():
            return False, f"flagos_whitelist names no ATen function ({origin})"
        return True, f"flagos_whitelist names ATen functions ({origin})"
    origin = settings.origin("use_flaggems")
    if origin.layer == "default":
        return False, "neither use_flaggems (USE_FLAGGEMS) nor flagos_whitelist is set"
    return True, f"use_flaggems is on ({origin})"


def _chosen(settings: Settings, table: Mapping[str, frozenset[str]]) -> set[str]:
    """FlagGems' functions to register."""

    def functions(names: Iterable[str]) -> set[str]:
        return set().union(*(table.get(name, ()) for name in set(names) - _operators()))

    denied = functions(settings.flagos_blacklist)
    if settings.flagos_whitelist is not None:
        return functions(settings.flagos_whitelist) - denied
    return (set().union(*table.values()) & REPLACED) - denied


def _warn_of_unchecked(functions: set[str], reason: str) -> None:
    logger = get_logger(__name__)
    if unchecked := functions - REPLACED - SLOW:
        logger.warning(
            "FlagGems' %s compute otherwise than PyTorch for some arguments, or were not compared with it"
            " (docs/flaggems.md); they are in place of PyTorch's, since %s",
            ", ".join(sorted(unchecked)),
            reason,
        )
    if functions and (installed := flaggems_version()) != CHECKED:
        logger.warning("FlagGems %s is installed; its functions were compared with PyTorch's in %s", installed, CHECKED)


def _table(entries: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    """Name -> FlagGems' functions that it means, from (ATen overload, function)."""
    found: dict[str, set[str]] = {}
    for overload, function in entries:
        for name in (function, overload.partition(".")[0]):
            found.setdefault(name, set()).add(function)
    return {name: frozenset(functions) for name, functions in found.items()}


def _check(settings: Settings, table: Mapping[str, Any]) -> None:
    from vllm_fl.config import KnownNames

    settings.check_names(KnownNames(flagos_operators=_operators() | set(table)))


def _operators() -> set[str]:
    from vllm_fl.dispatch import get_default_manager

    return set(get_default_manager().registry.known_operators())


class _WithoutFlagGems(frozenset[str]):
    """Operators, and whatever may be a function of the FlagGems that is not installed: what resembles no operator."""

    def __contains__(self, name: object) -> bool:
        import torch

        known = super().__contains__(name) or name in REPLACED or hasattr(torch.ops.aten, str(name))
        return known or nearest(str(name), self) is None


def flagos_names(operators: Iterable[str]) -> frozenset[str]:
    """What the lists of kind flagos may name, given the known operators."""
    table = flaggems_table()
    return _WithoutFlagGems(operators) if table is None else frozenset({*operators, *_table(table)})


@functools.cache
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
