"""Comparison inside a model without vLLM: the shadow, the places, the search for the culprits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from compare_helpers import WRONG, implementation, silu

from vllm_fl.catalog import CATALOG, InputMaker
from vllm_fl.compare import Filters, Place, load_dump, parse_numbers
from vllm_fl.compare.bisect import _Runner, smallest
from vllm_fl.compare.model import _layers, _tokens
from vllm_fl.compare.places import Tracker, is_layer
from vllm_fl.compare.shadow import Shadow
from vllm_fl.dispatch import (
    BackendImplKind,
    OpImpl,
    OpManager,
    Parameter,
    ParameterPath,
    SelectionPolicy,
    call_op,
    set_global_policy,
)
from vllm_fl.engines import Workload
from vllm_fl.testing.subjects import reference_implementations


class Layer(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.experts = torch.nn.ModuleList([torch.nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](call_op("silu_and_mul", torch.cat([x * self.scale, torch.ones_like(x)], -1)))


class Model(torch.nn.Module):
    """Two layers; the first entry that the second one gives to the operator is above 4 where that of `x` is above 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(1.0), Layer(1.5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs(step: int) -> torch.Tensor:
    return torch.full((2, 3), 3.2 if step == 7 else 1.0)


@pytest.fixture
def run(manager: OpManager, tmp_path: Path) -> Callable[..., Shadow]:
    """``run(Filters(...))``: eight steps of the model under a shadow of the wrong implementation."""

    def go(filters: Filters | None = None, rank: int = 0) -> Shadow:
        model = Model()
        tracker = Tracker(model)
        shadow = Shadow(manager, WRONG, filters or Filters(), rank, lambda: tracker.place, tmp_path)
        manager.watch(shadow)
        for step in range(1, 9):
            want = inputs(step)
            for layer in model.layers:
                want = torch.nn.functional.silu(want * layer.scale)
            assert torch.equal(model(inputs(step)), want), "the model goes on with the results of the first policy"
        manager.unwatch(shadow)
        tracker.remove()
        return shadow

    return go


def test_the_first_difference_has_layer_and_step(run: Callable[..., Shadow]) -> None:
    (pairing,) = run().pairings.values()
    assert (pairing.operator, pairing.first, pairing.second) == ("silu_and_mul", "vendor.right", "vendor.wrong")
    assert (pairing.calls, pairing.outside) == (16, 1)
    ((order, place, difference),) = pairing.kept
    assert (order, place) == (1, Place(7, "layers.1"))
    assert place.layer_number == 1
    assert difference.outside == 1
    assert pairing.max_abs == pytest.approx(64.0)
    assert pairing.dump is not None
    dump = load_dump(Path(pairing.dump))
    assert (dump.step, dump.module, list(dump.inputs)) == (7, "layers.1", ["x"])
    assert float(dump.inputs["x"][0, 0]) > 4, "the inputs as they were before the call"


@pytest.mark.parametrize(
    ("filters", "rank", "calls", "outside"),
    [
        (Filters(layers=frozenset({0})), 0, 8, 0),
        (Filters(layers=frozenset({1})), 0, 8, 1),
        (Filters(steps=frozenset({7, 8})), 0, 4, 1),
        (Filters(operators=frozenset({"silu_and_mul"})), 0, 16, 1),
        (Filters(ranks=frozenset({0})), 0, 16, 1),
    ],
    ids=["layer 0", "layer 1", "steps", "operator", "rank"],
)
def test_filters(run: Callable[..., Shadow], filters: Filters, rank: int, calls: int, outside: int) -> None:
    (pairing,) = run(filters, rank).pairings.values()
    assert (pairing.calls, pairing.outside) == (calls, outside)
    assert Filters.from_plain(filters.as_plain()) == filters


@pytest.mark.parametrize("filters", [Filters(operators=frozenset({"rms_norm"})), Filters(ranks=frozenset({1}))])
def test_nothing_is_left(run: Callable[..., Shadow], filters: Filters) -> None:
    assert run(filters).pairings == {}


def test_a_second_implementation_that_fails(manager: OpManager, tmp_path: Path) -> None:
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no such luck")

    manager.registry.register_impl(implementation("failing", failing))
    second = WRONG.derive("test", per_op_order=(("silu_and_mul", ("vendor:failing", "vendor:right")),))
    shadow = Shadow(manager, second, Filters(), 0, lambda: Place(3, "layers.0"), tmp_path)
    manager.watch(shadow)
    call_op("silu_and_mul", torch.ones(2, 4))
    manager.unwatch(shadow)
    (pairing,) = shadow.pairings.values()
    assert pairing.failed == "step 3, layers.0: ZeroDivisionError: no such luck"


def scaled(x: torch.Tensor, *, factor: int = 1) -> torch.Tensor:
    return silu(x) * factor


def test_one_implementation_with_two_values_of_a_parameter(manager: OpManager, tmp_path: Path) -> None:
    manager.registry.register_impl(implementation("scaled", scaled, parameters=(Parameter("factor", (1, 2, 3), 1),)))
    path = ParameterPath("silu_and_mul", "vendor.scaled", "factor")
    first, second = (
        SelectionPolicy(per_op_order=(("silu_and_mul", ("vendor:scaled",)),), parameters=((path, factor),))
        for factor in ("2", "3")
    )
    set_global_policy(first)
    shadow = Shadow(manager, second, Filters(), 0, lambda: Place(1, ""), tmp_path)
    manager.watch(shadow)
    assert torch.equal(call_op("silu_and_mul", torch.ones(2, 4)), 2 * silu(torch.ones(2, 4)))
    manager.unwatch(shadow)
    (pairing,) = shadow.pairings.values()
    assert (pairing.first, pairing.second) == ("vendor.scaled(factor=2)", "vendor.scaled(factor=3)")
    assert pairing.max_abs == pytest.approx(float(silu(torch.ones(1, 2))))


@pytest.mark.parametrize(
    "op_name", [name for name, spec in CATALOG.items() if spec.cases and name != "attention_backend"]
)
def test_every_operator_agrees_with_itself(op_name: str, manager: OpManager, tmp_path: Path) -> None:
    """Written arguments are the same for both, and results come in the form that is the same for all right answers."""
    fn = reference_implementations()[op_name]
    for name in ("one", "two"):
        impl = OpImpl(op_name, f"vendor.{name}", BackendImplKind.VENDOR, fn, vendor=name, priority=100)
        manager.registry.register_impl(impl)
    orders = [SelectionPolicy(per_op_order=((op_name, (f"vendor:{name}",)),)) for name in ("one", "two")]
    set_global_policy(orders[0])
    shadow = Shadow(manager, orders[1], Filters(), 0, lambda: Place(1, ""), tmp_path)
    manager.watch(shadow)
    cases = list(itertools.islice(CATALOG[op_name].inputs(InputMaker(torch.float32)), 6))
    for case in cases:
        call_op(op_name, *case.args, **case.kwargs)
    (pairing,) = shadow.pairings.values()
    assert (pairing.calls, pairing.outside, pairing.failed, pairing.max_abs) == (len(cases), 0, "", 0.0)


def test_a_mixture_of_two_policies_has_the_parameters_of_each_operators_own() -> None:
    paths = [ParameterPath(name, "vendor.right", "factor") for name in ("rms_norm", "silu_and_mul")]
    good, bad = (SelectionPolicy(parameters=tuple((path, value) for path in paths)) for value in "12")
    runner = _Runner({}, good, bad, Workload())
    of_good = {"rms_norm": ["vendor.right(factor=1)"], "silu_and_mul": ["reference.torch"]}
    of_bad = {"rms_norm": ["reference.torch"], "silu_and_mul": ["vendor.right(factor=2)", "vendor.wrong"]}
    runner._accepted = of_good, of_bad
    mixture = runner.policy(("silu_and_mul",))
    assert mixture.per_op_order == (
        ("rms_norm", ("impl:vendor.right",)),
        ("silu_and_mul", ("impl:vendor.right", "impl:vendor.wrong")),
    )
    assert mixture.parameters == ((paths[0], "1"), (paths[1], "2"))


def test_what_one_policy_denies_a_mixture_may_still_take_from_the_other() -> None:
    runner = _Runner({}, SelectionPolicy(deny_vendors=frozenset({"right"})), SelectionPolicy(), Workload())
    runner._accepted = {"silu_and_mul": ["reference.torch"]}, {"silu_and_mul": ["vendor.right"]}
    mixture = runner.policy(("silu_and_mul",))
    assert mixture.per_op_order == (("silu_and_mul", ("impl:vendor.right",)),)
    assert not mixture.deny_vendors


def test_no_trace_is_left(manager: OpManager, tmp_path: Path) -> None:
    call_op("silu_and_mul", torch.ones(2, 4))
    before = manager.bind("silu_and_mul").fn.__code__
    chosen = manager.find("silu_and_mul")
    shadow = Shadow(manager, WRONG, Filters(), 0, lambda: Place(1, ""), tmp_path)
    manager.watch(shadow)
    assert manager.find("silu_and_mul") is not chosen
    manager.unwatch(shadow)
    plan = manager._plans["silu_and_mul"]
    assert plan.links[0].fn is plan.links[0].impl.fn, "a call goes to the implementation again, with nothing between"
    assert manager.bind("silu_and_mul").fn.__code__ is before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3", True),
        ("layers.0", True),
        ("model.layers.3.mlp", False),
        ("model.layers.3.mlp.experts.7", False),
        ("model.norm", False),
        ("", False),
    ],
)
def test_which_modules_are_layers(name: str, expected: bool) -> None:
    assert is_layer(name) is expected


def test_places_outside_of_the_model() -> None:
    assert Place(2, "").layer_number is None
    assert str(Place(2, "")) == "step 2, outside of the model"
    assert Place(1, "model.layers.12.self_attn.rotary_emb").layer_number == 12


def test_numbers() -> None:
    assert parse_numbers("0-3,7") == {0, 1, 2, 3, 7}


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "3-1", "1-2-3"])
def test_no_numbers(text: str) -> None:
    with pytest.raises(ValueError):
        parse_numbers(text)


@pytest.mark.parametrize(
    ("guilty", "expected"),
    [
        ([{"c"}], ("c",)),
        ([{"b"}, {"e"}], ("b",)),
        ([{"a", "f"}], ("a", "f")),
        ([{"a", "c", "h"}], ("a", "c", "h")),
        ([set("abcdefgh")], tuple("abcdefgh")),
    ],
    ids=["one", "either of two", "two together", "three together", "all"],
)
def test_smallest_set(guilty: list[set[str]], expected: tuple[str, ...]) -> None:
    tried: list[tuple[str, ...]] = []

    def differs(operators: Sequence[str]) -> bool:
        tried.append(tuple(operators))
        return any(some <= set(operators) for some in guilty)

    assert smallest(tuple("abcdefgh"), differs) == expected
    assert len(tried) < 60


def test_layers_by_the_first_step_at_which_they_differ() -> None:
    def layer(step: int, module: str, within: bool, error: float) -> dict[str, object]:
        return {"step": step, "module": module, "within": within, "max_abs": error, "outside": 3, "entries": 9}

    result = {
        "rank": 0,
        "layers": [
            layer(1, "layers.0", True, 0.0),
            layer(1, "layers.1", True, 0.0),
            layer(2, "layers.0", True, 1e-9),
            layer(2, "layers.1", False, 0.5),
            layer(2, "layers.1", False, 0.7),
            layer(3, "layers.0", False, 9.0),
            layer(3, "layers.1", False, 9.0),
        ],
    }
    found = list(_layers([result]))
    assert [(x.module, x.step, x.max_abs) for x in found] == [("layers.1", 2, 0.7), ("layers.0", 3, 9.0)]


def test_tokens() -> None:
    (found,) = _tokens([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 7, 6]])
    assert (found.request, found.position, found.first, found.second) == (1, 1, 5, 7)
