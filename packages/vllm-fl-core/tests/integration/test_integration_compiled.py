"""Compiled code that follows the selection: a small model under vLLM's own decorator, with the backend ``eager``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

from vllm_fl.dispatch import BackendImplKind, OpImpl, bind, get_default_manager, reset_default_manager
from vllm_fl.dispatch import set_global_policy as select_by
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.integration.compiled import CompiledModel, Survey, traced_form

_op = bind("silu_and_mul")


@support_torch_compile(dynamic_arg_dims={"x": 0})
class Model(torch.nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _op.fn(x)


class Runner:
    """As one of vLLM's: it compiles the model in its first run."""

    def __init__(self, config: Any) -> None:
        self.config, self.runs = config, 0
        with set_current_vllm_config(config):
            self._model = torch.nn.Sequential(Model(vllm_config=config))

    def get_model(self) -> Any:
        return self._model

    def profile_run(self) -> None:
        self.runs += 1
        self(1.0)

    def __call__(self, value: float) -> float:
        """What the selected implementation multiplies `value` by."""
        with set_forward_context(None, self.config), torch.inference_mode():
            return float(self._model(torch.full((3, 4), value))[0, 0]) / value


def times(factor: float) -> Any:
    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        return x[..., : x.shape[-1] // 2] * factor

    return silu_and_mul


@pytest.fixture
def implementations() -> Iterator[None]:
    """Of silu_and_mul: ``two`` and ``three`` are traced, ``four`` and ``five`` are opaque."""
    reset_default_manager()
    manager = get_default_manager()
    manager.ensure_initialized()
    for factor, name in enumerate(("two", "three", "four", "five"), 2):
        implementation = OpImpl(
            "silu_and_mul",
            f"vendor.{name}",
            BackendImplKind.VENDOR,
            times(factor),
            vendor=name,
            opaque=factor > 3,
        )
        manager.registry.register_impl(implementation)
    yield
    reset_default_manager()
    select_by(SelectionPolicy())


def select(*names: str) -> None:
    select_by(SelectionPolicy(per_op_order=(("silu_and_mul", tuple(f"vendor:{name}" for name in names)),)))


@pytest.fixture
def runner(implementations: None, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, backend="eager")
    return Runner(VllmConfig(compilation_config=compilation))


def test_code_is_traced_anew_only_where_an_implementation_is_in_it(runner: Runner) -> None:
    select("two", "three", "four", "five")
    runner.profile_run()
    model = CompiledModel(SimpleNamespace(vllm_config=runner.config, model_runner=runner))

    def follow(*names: str) -> tuple[float, int]:
        select(*names)
        model.follow()
        return runner(3.0), runner.runs

    select("three", "two", "four", "five")
    assert runner(3.0) == 2.0  # it is in the code
    model.follow()
    assert (runner(3.0), runner.runs) == (3.0, 2)
    assert follow("two", "three", "four", "five") == (2.0, 2)  # kept
    assert follow("four", "five") == (4.0, 3)
    assert follow("five", "four") == (5.0, 3)  # behind the same custom operator
    assert model.number == 2
    model.switch_off(True)
    select("two", "three", "four", "five")
    assert runner(3.0) == 2.0  # not compiled
    model.switch_off(False)
    assert follow("five", "four") == (5.0, 3)


def test_operators_that_a_custom_operator_hides_are_not_in_the_code(runner: Runner) -> None:
    select("two", "three", "four", "five")
    library = torch.library.Library("hiding", "FRAGMENT")
    library.define("silu_and_mul(Tensor x) -> Tensor")
    library.impl("silu_and_mul", lambda x: _op.fn(x), "CompositeExplicitAutograd")
    manager = get_default_manager()
    for call, expected in ((torch.ops.hiding.silu_and_mul, set()), (_op.fn, {"silu_and_mul"})):
        survey = Survey()
        manager.watch(survey)
        with torch.inference_mode():
            call(torch.ones(2, 4))
        manager.unwatch(survey)
        assert survey.operators == expected


def test_the_survey_leaves_out_what_the_workload_does_not_call(runner: Runner) -> None:
    select("two", "three", "four", "five")
    runner.profile_run()
    model = CompiledModel(SimpleNamespace(vllm_config=runner.config, model_runner=runner))
    model.begin_survey()
    runner(1.0)
    model.end_survey()
    order = ("silu_and_mul", tuple(f"vendor:{name}" for name in ("two", "three", "four", "five")))
    select_by(SelectionPolicy(per_op_order=(("rms_norm", ("flagos",)), order)))
    model.follow()
    assert runner.runs == 1
    select("three", "two", "four", "five")
    model.follow()
    assert (runner(3.0), runner.runs) == (3.0, 2)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("two", "four", "five"), ("vendor.two", frozenset({"vendor.four", "vendor.five"}))),
        (("five", "four", "two"), (frozenset({"vendor.four", "vendor.five"}), "vendor.two")),
        (("five", "two", "four"), (frozenset({"vendor.five"}), "vendor.two", frozenset({"vendor.four"}))),
    ],
)
def test_neighbouring_opaque_implementations_are_one(
    implementations: None, names: tuple[str, ...], expected: tuple[Any, ...]
) -> None:
    select(*names)
    assert traced_form(get_default_manager().selection("silu_and_mul")) == expected
