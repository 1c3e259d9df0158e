"""Merges the layers, item by item: VLLM_FL_CONFIG file > environment > platform file > defaults.

- A single value, and ``plugin_modules``: the highest layer that names the key wins.
- ``op_backends``: for each operator, the highest layer that names the operator wins.
- ``parameters``: for each parameter of an implementation, with all its buckets, the highest layer that names it wins.
- Sets: a plain list replaces the list of the layers below; a list of ``+name`` and ``-name`` adds to it and removes
  from it; ``*`` (restrictions only) lifts the restriction of the layers below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_fl.dispatch.parameters import ParameterPath
from vllm_fl.errors import did_you_mean

from .keys import KEYS
from .layer import Layer, OriginPath
from .model import EVERY, is_edit
from .problems import DEFAULT_ORIGIN, Origin, Problem

_FAMILIES = (("flagos_whitelist", "flagos_blacklist"), ("oot_whitelist", "oot_blacklist"))


@dataclass
class Merged:
    """Effective values of every key, the origin of each key, item and token, and what does not fit together."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[OriginPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def merge(layers: Iterable[Layer]) -> Merged:
    """Merge `layers`, given from the lowest to the highest."""
    ordered = list(layers)
    merged = Merged()
    for key, description in KEYS.items():
        naming = [layer for layer in ordered if key in layer.values]
        merged.origins[(key,)] = naming[-1].origins[(key,)] if naming else DEFAULT_ORIGIN
        if description.merging == "replace":
            merged.values[key] = naming[-1].values[key] if naming else description.default
            merged.origins.update(_below(naming[-1], (key,)) if naming else {})
        elif description.merging == "per operator":
            merged.values[key] = _merge_operators(key, naming, merged)
        elif description.merging == "per parameter":
            merged.values[key] = _merge_parameters(key, naming, merged)
        else:
            merged.values[key] = _merge_set(key, naming, merged)
    merged.problems.extend(conflicts(merged))
    return merged


def conflicts(merged: Merged) -> list[Problem]:
    """A whitelist and a blacklist of one family: which of them counts would be a guess."""
    problems = []
    for white, black in _FAMILIES:
        if merged.values[white] is None or not merged.values[black]:
            continue
        text = (
            f"{white} is set here and {black} by {merged.origins[(black,)]}; only one of them can count. "
            f"Remove one, or switch off the one of a lower layer: {white} '{EVERY}', or an empty {black}"
        )
        problems.append(Problem(str(merged.origins[(white,)]), "", text))
    return problems


def _merge_operators(key: str, naming: Sequence[Layer], merged: Merged) -> dict[str, tuple[str, ...]]:
    operators: dict[str, tuple[str, ...]] = {}
    for layer in naming:
        for op_name, tokens in layer.values[key].items():
            for old in operators.get(op_name, ()):
                del merged.origins[(key, op_name, old)]
            operators[op_name] = tokens
            merged.origins[(key, op_name)] = layer.origins[(key, op_name)]
            merged.origins.update(_below(layer, (key, op_name)))
    return dict(sorted(operators.items()))


def _merge_parameters(key: str, naming: Sequence[Layer], merged: Merged) -> dict[ParameterPath, str]:
    settings: dict[ParameterPath, str] = {}
    for layer in naming:
        named = {path[:3] for path in layer.values[key]}
        for path in [path for path in settings if path[:3] in named]:
            overridden: OriginPath = (key, *path)
            del settings[path], merged.origins[overridden]
        settings.update(layer.values[key])
        merged.origins.update(_below(layer, (key,)))
    return dict(sorted(settings.items()))


def _merge_set(key: str, naming: Sequence[Layer], merged: Merged) -> frozenset[str] | None:
    items: dict[str, Origin] | None = None if KEYS[key].merging == "restriction" else {}
    for layer in naming:
        entries: tuple[str, ...] = layer.values[key]
        if entries == (EVERY,):
            items = None
        elif not is_edit(entries):
            items = {entry: layer.origins[(key, entry)] for entry in entries}
        elif items is None:
            text = f"{', '.join(entries)}: there is no list below to edit; write the whole list without + and -"
            merged.problems.append(Problem(str(layer.origins[(key,)]), key, text))
        else:
            _edit(key, items, layer, merged)
    merged.origins.update({(key, item): origin for item, origin in (items or {}).items()})
    return None if items is None else frozenset(items)


def _edit(key: str, items: dict[str, Origin], layer: Layer, merged: Merged) -> None:
    for entry in layer.values[key]:
        name, origin = entry[1:], layer.origins[(key, entry[1:])]
        if entry.startswith("+"):
            items[name] = origin
        elif name in items:
            del items[name]
        else:
            held = ", ".join(sorted(items)) or "nothing"
            text = f"{entry!r} removes nothing: the list below holds {held}{did_you_mean(name, items)}"
            merged.problems.append(Problem(str(origin), key, text))


def _below(layer: Layer, path: OriginPath) -> Mapping[OriginPath, Origin]:
    return {p: origin for p, origin in layer.origins.items() if len(p) > len(path) and p[: len(path)] == path}
