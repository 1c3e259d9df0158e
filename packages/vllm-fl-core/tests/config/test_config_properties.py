"""Laws of merging, for any layers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.config import KEYS
from vllm_fl.config.layer import Layer, OriginPath
from vllm_fl.config.merge import merge
from vllm_fl.config.problems import Origin

NAMES = st.sampled_from(["a", "b", "c", "d"])
TOKENS = st.lists(st.sampled_from(["flagos", "vendor", "reference"]), min_size=1, unique=True).map(tuple)
PLAIN = st.lists(NAMES, unique=True).map(tuple)
ADDITIONS = st.lists(NAMES, unique=True, min_size=1).map(lambda names: tuple(f"+{name}" for name in names))
VALUES = {
    "prefer": st.sampled_from(["flagos", "vendor", "reference"]),
    "strict": st.booleans(),
    "plugin_modules": PLAIN,
    "op_backends": st.dictionaries(NAMES, TOKENS),
    "deny_vendors": st.one_of(PLAIN, ADDITIONS),
    "oot_blacklist": PLAIN,
    "allow_vendors": st.one_of(PLAIN, st.just(("*",))),
}


def layer(name: str, values: dict[str, Any]) -> Layer:
    """A layer whose every origin is called by the layer's name."""
    origins: dict[OriginPath, Origin] = {}
    here = Origin("environment", name)
    for key, value in values.items():
        origins[(key,)] = here
        if isinstance(value, dict):
            for op_name, tokens in value.items():
                origins[(key, op_name)] = here
                origins.update({(key, op_name, token): here for token in tokens})
        elif isinstance(value, tuple):
            origins.update({(key, entry.lstrip("+-")): here for entry in value})
    return Layer(values, origins)


LAYERS = st.lists(st.fixed_dictionaries({}, optional=VALUES), max_size=4).map(
    lambda found: [layer(f"layer {index}", values) for index, values in enumerate(found)]
)


@given(LAYERS)
def test_the_highest_layer_that_names_a_single_value_wins(layers: list[Layer]) -> None:
    merged = merge(layers)
    for key in ("prefer", "strict", "plugin_modules"):
        naming = [layer for layer in layers if key in layer.values]
        assert merged.values[key] == (naming[-1].values[key] if naming else KEYS[key].default)
        where = str(naming[-1].origins[(key,)]) if naming else "default"
        assert str(merged.origins[(key,)]) == where


@given(LAYERS)
def test_the_highest_layer_that_names_an_operator_wins(layers: list[Layer]) -> None:
    merged = merge(layers)
    operators = merged.values["op_backends"]
    assert set(operators) == {op for layer in layers for op in layer.values.get("op_backends", {})}
    for op_name, tokens in operators.items():
        winner = next(layer for layer in reversed(layers) if op_name in layer.values.get("op_backends", {}))
        assert tokens == winner.values["op_backends"][op_name]
        places = {origin for path, origin in merged.origins.items() if path[:2] == ("op_backends", op_name)}
        assert places == {winner.origins[("op_backends", op_name)]}
        assert {path[2] for path in merged.origins if path[:2] == ("op_backends", op_name) and len(path) == 3} == set(
            tokens
        )


@given(LAYERS)
def test_a_set_is_the_highest_plain_list_and_the_additions_above_it(layers: list[Layer]) -> None:
    merged = merge(layers)
    expected: dict[str, Origin] = {}
    for layer in reversed(layers):  # downwards, so that the first layer to name an item is its origin
        entries = layer.values.get("deny_vendors")
        if entries is None:
            continue
        for entry in entries:
            expected.setdefault(entry.lstrip("+"), layer.origins[("deny_vendors", entry.lstrip("+"))])
        if not any(entry.startswith("+") for entry in entries):
            break
    assert merged.values["deny_vendors"] == frozenset(expected)
    assert {item: merged.origins[("deny_vendors", item)] for item in expected} == expected


@given(LAYERS)
def test_the_highest_restriction_wins(layers: list[Layer]) -> None:
    naming = [layer.values["allow_vendors"] for layer in layers if "allow_vendors" in layer.values]
    expected = None if not naming or naming[-1] == ("*",) else frozenset(naming[-1])
    assert merge(layers).values["allow_vendors"] == expected


@given(LAYERS)
def test_repeating_the_highest_layer_changes_nothing(layers: list[Layer]) -> None:
    assert merge([*layers, *layers[-1:]]) == merge(layers)


@given(LAYERS)
def test_an_empty_layer_changes_nothing(layers: list[Layer]) -> None:
    assert merge([Layer(), *layers, Layer()]) == merge(layers)


@given(LAYERS)
def test_origins_are_those_of_effective_values_only(layers: list[Layer]) -> None:
    merged = merge(layers)
    for path in merged.origins:
        value = merged.values[path[0]]
        assert len(path) == 1 or path[1] in value
        assert len(path) < 3 or path[2] in value[path[1]]


@given(PLAIN, st.sets(NAMES, min_size=1), st.sets(NAMES))
def test_edits(below: tuple[str, ...], added: set[str], removed: set[str]) -> None:
    removed -= added
    edits = [f"+{name}" for name in sorted(added)] + [f"-{name}" for name in sorted(removed)]
    merged = merge([layer("low", {"oot_blacklist": below}), layer("high", {"oot_blacklist": tuple(edits)})])
    assert merged.values["oot_blacklist"] == (frozenset(below) | added) - removed
    absent = sorted(removed - set(below))
    assert [problem.text.split(" ")[0] for problem in merged.problems] == [f"'-{name}'" for name in absent]
    for item in merged.values["oot_blacklist"]:
        assert str(merged.origins[("oot_blacklist", item)]) == ("high" if item in added else "low")
