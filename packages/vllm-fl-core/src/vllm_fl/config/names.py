"""Checks names that only the registered backends can know: operators, vendors, implementations."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from vllm_fl.errors import did_you_mean

from .layer import OriginPath
from .problems import DEFAULT_ORIGIN, Origin, Problem

if TYPE_CHECKING:
    from .settings import Settings

_LISTED = 40  #: more known names than this are counted, not listed


def unknown_names(
    settings: Settings,
    origins: Mapping[OriginPath, Origin],
    *,
    operators: Collection[str] | None = None,
    vendors: Collection[str] | None = None,
    impl_ids: Collection[str] | None = None,
    flagos_operators: Collection[str] | None = None,
    oot_layers: Collection[str] | None = None,
) -> list[Problem]:
    """The names in `settings` that are not among the given ones; what is None is not checked."""
    known_by_kind = {
        "operator": operators,
        "vendor": vendors,
        "implementation": impl_ids,
        "flagos operator": flagos_operators,
        "layer": oot_layers,
    }
    problems = []
    for path, kind, name in _names(settings):
        known = known_by_kind[kind]
        if known is None or name in known:
            continue
        where = str(origins.get(path, DEFAULT_ORIGIN))
        key = ".".join(path[:-1])
        problems.append(Problem(where, key, f"unknown {kind} {name!r} ({_listing(known)}){did_you_mean(name, known)}"))
    return problems


def _names(settings: Settings) -> Iterator[tuple[OriginPath, str, str]]:
    """(path of the origin, kind, name) of every name in `settings`."""
    for op_name, tokens in settings.op_backends.items():
        yield ("op_backends", op_name), "operator", op_name
        for token in tokens:
            prefix, _, name = token.partition(":")
            if name:
                kind = "vendor" if prefix == "vendor" else "implementation"
                yield ("op_backends", op_name, token), kind, name
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
