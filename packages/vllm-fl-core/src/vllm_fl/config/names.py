"""Checks what only the registered backends can know: operators, vendors, implementations and their parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_fl.dispatch.parameters import problem_with
from vllm_fl.errors import did_you_mean

from .layer import OriginPath
from .problems import DEFAULT_ORIGIN, Origin, Problem

if TYPE_CHECKING:
    from vllm_fl.dispatch.types import OpImpl

    from .settings import Settings

_LISTED = 40  #: more known names than this are counted, not listed


@dataclass(frozen=True)
class KnownNames:
    """What a configuration may name; of what is None nothing is known, and nothing checked.

    Args:
        operators: names of the catalogue and of the registry.
        vendors: those of the registered implementations and of the installed backends.
        impl_ids: ids of the registered implementations.
        flagos_operators: operators that flagos offers, those of FlagGems included.
        oot_layers: names of the layers that can be replaced.
        implementations: the registered ones, for the parameters that they declare.
    """

    operators: Collection[str] | None = None
    vendors: Collection[str] | None = None
    impl_ids: Collection[str] | None = None
    flagos_operators: Collection[str] | None = None
    oot_layers: Collection[str] | None = None
    implementations: Collection[OpImpl] | None = None


def unknown_names(settings: Settings, origins: Mapping[OriginPath, Origin], names: KnownNames) -> list[Problem]:
    """The names and parameters in `settings` that are not among the known ones."""
    known_by_kind = {
        "operator": names.operators,
        "vendor": names.vendors,
        "implementation": names.impl_ids,
        "flagos operator": names.flagos_operators,
        "layer": names.oot_layers,
    }
    problems = []
    by_operator: dict[str, list[str]] = {}
    for impl in names.implementations or ():
        by_operator.setdefault(impl.op_name, []).append(impl.impl_id)
    for path, kind, name in _names(settings):
        known = known_by_kind[kind]
        if kind == "implementation" and path[1] in by_operator:
            known, kind = by_operator[path[1]], f"implementation of {path[1]}"
        if known is None or name in known:
            continue
        where = str(origins.get(path, DEFAULT_ORIGIN))
        key = "parameters" if path[0] == "parameters" else ".".join(path[:-1])
        problems.append(Problem(where, key, f"unknown {kind} {name!r} ({_listing(known)}){did_you_mean(name, known)}"))
    if names.implementations is not None:
        problems += _wrong_parameters(settings, origins, names.implementations, names.operators)
    return problems


def _wrong_parameters(
    settings: Settings,
    origins: Mapping[OriginPath, Origin],
    implementations: Collection[OpImpl],
    operators: Collection[str] | None,
) -> Iterator[Problem]:
    known = {(impl.op_name, impl.impl_id): impl for impl in implementations}
    reported = set()
    for path, text in settings.parameters.items():
        where = str(origins.get(("parameters", *path), DEFAULT_ORIGIN))
        impl = known.get((path.operator, path.implementation))
        if impl is not None:
            wrong = problem_with(impl, path, text)
            if wrong is not None:
                yield Problem(where, f"parameters.{path}", wrong)
        elif path[:2] not in reported and (operators is None or path.operator in operators):
            reported.add(path[:2])
            ids = [impl_id for op_name, impl_id in known if op_name == path.operator]
            text = f"unknown implementation {path.implementation!r} of {path.operator!r} ({_listing(ids)})"
            yield Problem(where, "parameters", f"{text}{did_you_mean(path.implementation, ids)}")


def _names(settings: Settings) -> Iterator[tuple[OriginPath, str, str]]:
    """(path of the origin, kind, name) of every name in `settings`."""
    for op_name, tokens in settings.op_backends.items():
        yield ("op_backends", op_name), "operator", op_name
        for token in tokens:
            prefix, _, name = token.partition(":")
            if name:
                kind = "vendor" if prefix == "vendor" else "implementation"
                yield ("op_backends", op_name, token), kind, name
    for op_name in dict.fromkeys(path.operator for path in settings.parameters):
        path = next(path for path in settings.parameters if path.operator == op_name)
        yield ("parameters", *path), "operator", op_name
    sets = (
        ("allow_vendors", "vendor", settings.allow_vendors),
        ("deny_vendors", "vendor", settings.deny_vendors),
        ("flagos_whitelist", "flagos operator", settings.flagos_whitelist),
        ("flagos_blacklist", "flagos operator", settings.flagos_blacklist),
        ("oot_whitelist", "layer", settings.oot_whitelist),
        ("oot_blacklist", "layer", settings.oot_blacklist),
    )
    for key, kind, names in sets:
        for name in sorted(names or ()):
            yield (key, name), kind, name


def _listing(known: Collection[str]) -> str:
    if not known:
        return "none is known"
    return f"{len(known)} are known" if len(known) > _LISTED else f"known: {', '.join(sorted(known))}"
