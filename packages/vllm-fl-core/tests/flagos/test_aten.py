"""FlagGems in place of ATen: what is replaced when, and how the benchmark tells what is right.

Without a device a stand-in takes FlagGems' place.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_fl.catalog import CATALOG
from vllm_fl.config import ConfigProblems, Origin, Settings
from vllm_fl.dispatch.types import Availability
from vllm_fl.flagos import aten

USE_FLAGGEMS = Origin("environment", "environment variable USE_FLAGGEMS")
WHITELIST = Origin("environment", "environment variable VLLM_FL_FLAGOS_WHITELIST")
BLACKLIST = Origin("file", "my.yaml:3:1")

usefixtures = pytest.mark.usefixtures("flag_gems")


def settings(**values: Any) -> Settings:
    places = {"use_flaggems": USE_FLAGGEMS, "flagos_whitelist": WHITELIST, "flagos_blacklist": BLACKLIST}
    origins: dict[tuple[str, ...], Origin] = {(key,): places[key] for key in values if key in places}
    for key in ("flagos_whitelist", "flagos_blacklist"):
        origins.update({(key, name): places[key] for name in values.get(key) or ()})
    return Settings(**values, origins=origins)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "neither use_flaggems (USE_FLAGGEMS) nor flagos_whitelist is set"),
        ({"flagos_blacklist": frozenset({"mm"})}, "neither use_flaggems (USE_FLAGGEMS) nor flagos_whitelist is set"),
        ({"use_flaggems": False}, f"use_flaggems is off ({USE_FLAGGEMS})"),
        ({"use_flaggems": False, "flagos_whitelist": frozenset({"mm"})}, f"use_flaggems is off ({USE_FLAGGEMS})"),
        ({"prefer_enabled": False, "use_flaggems": True}, "vllm-fl is switched off (default)"),
        (
            {"flagos_whitelist": frozenset({"rms_norm", "silu_and_mul"})},
            f"flagos_whitelist names no ATen function ({WHITELIST})",
        ),
    ],
)
def test_aten_stays(flag_gems: Any, values: dict[str, Any], reason: str) -> None:
    assert aten.enable_aten(settings(**values)) == aten.AtenReplacement((), reason)
    assert flag_gems.registered == []


@pytest.mark.parametrize(
    ("values", "functions"),
    [
        ({"use_flaggems": True}, ["mm", "mm_out"]),
        ({"use_flaggems": True, "flagos_blacklist": frozenset({"mm"})}, []),
        ({"use_flaggems": True, "flagos_blacklist": frozenset({"mm_out"})}, ["mm"]),
        ({"flagos_whitelist": frozenset({"mm", "rms_norm"})}, ["mm", "mm_out"]),
        ({"flagos_whitelist": frozenset({"addmm_out", "zeros"})}, ["addmm_out", "zeros"]),
        ({"flagos_whitelist": frozenset({"mm"}), "flagos_blacklist": frozenset({"mm_out"})}, ["mm"]),
        ({"flagos_whitelist": frozenset({"mm"}), "flagos_blacklist": frozenset({"mm"})}, []),
    ],
)
def test_aten_is_replaced(flag_gems: Any, values: dict[str, Any], functions: list[str]) -> None:
    assert aten.enable_aten(settings(**values)).functions == tuple(functions)
    assert sorted(flag_gems.registered) == functions


@usefixtures
def test_functions_that_differ_from_pytorch_are_named(warnings: list[str]) -> None:
    done = aten.enable_aten(settings(flagos_whitelist=frozenset({"mm", "zeros", "_softmax", "addmm"})))
    assert done.functions == ("addmm", "addmm_out", "mm", "mm_out", "softmax", "zeros")
    assert warnings == [
        "FlagGems' addmm, addmm_out, softmax compute otherwise than PyTorch for some arguments, or were not compared"
        " with it (docs/flaggems.md); they are in place of PyTorch's, since flagos_whitelist names ATen functions"
        f" ({WHITELIST})"
    ]


@usefixtures
def test_another_release_than_the_compared_one_is_named(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(aten, "flaggems_version", lambda: "6.0")
    aten.enable_aten(settings(use_flaggems=True))
    assert warnings == ["FlagGems 6.0 is installed; its functions were compared with PyTorch's in 5.0.2"]


def test_aten_is_replaced_once(flag_gems: Any) -> None:
    first = aten.enable_aten(settings(flagos_whitelist=frozenset({"mm"})))
    assert aten.enable_aten(settings(use_flaggems=True)) is first
    assert flag_gems.registered == ["mm", "mm_out"]


@usefixtures
def test_unknown_names_are_errors() -> None:
    with pytest.raises(ConfigProblems) as caught:
        aten.enable_aten(settings(flagos_whitelist=frozenset({"mm", "sofmax"})))
    assert "environment variable VLLM_FL_FLAGOS_WHITELIST" in str(caught.value)
    assert "unknown flagos operator 'sofmax'" in str(caught.value)
    assert "did you mean 'softmax'?" in str(caught.value)


@usefixtures
def test_what_cannot_be_replaced_is_said(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.setattr(aten, "flaggems_aten", lambda: Availability(False, "FlagGems is not installed; install it"))
    done = aten.enable_aten(settings(use_flaggems=True))
    assert done == aten.AtenReplacement((), "FlagGems is not installed; install it")
    assert warnings == [
        f"no ATen function is replaced, although use_flaggems is on ({USE_FLAGGEMS}): "
        "FlagGems is not installed; install it"
    ]


def test_names_are_read_from_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "flag_gems"
    package.mkdir()
    source = """
raise RuntimeError("imported")
_FULL_CONFIG = (
    ("mm.out", mm_out),
    ("ones", ops.ones, lambda: torch_ge("2.4")),
)
"""
    (package / "__init__.py").write_text(source, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "flag_gems", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    aten.flaggems_table.cache_clear()
    assert aten.flagos_names(["rms_norm"]) == {"rms_norm", "mm", "mm_out", "ones"}
    aten.flaggems_table.cache_clear()


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("rms_norm", True),
        ("rms_nrom", False),
        ("mul", True),  # of ATen
        ("vector_norm", True),  # FlagGems' name of a function that is replaced
        ("sum_dim_out", True),  # may be FlagGems', and is no operator that was misspelt
    ],
)
def test_without_flaggems_only_what_resembles_an_operator_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, name: str, known: bool
) -> None:
    monkeypatch.setattr(aten.importlib.util, "find_spec", lambda name: None)
    aten.flaggems_table.cache_clear()
    assert (name in aten.flagos_names(CATALOG)) is known
    aten.flaggems_table.cache_clear()


@usefixtures
def test_operators_of_plug_ins_are_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "_operators", lambda: {"my_op"})
    mine = settings(flagos_whitelist=frozenset({"my_op"}))
    assert aten.asked_for(mine) == (False, f"flagos_whitelist names no ATen function ({WHITELIST})")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/flaggems_aten.py."""
    file = Path(__file__).parents[4] / "benchmarks" / "flaggems_aten.py"
    spec = importlib.util.spec_from_file_location("flaggems_aten", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    return module


def contiguous_fill(x: torch.Tensor, value: float) -> torch.Tensor:
    x.as_strided((x.numel(),), (1,)).copy_(torch.full((x.numel(),), value))
    return x


def refuse(*args: Any) -> Any:
    raise ValueError("not today")


X = torch.arange(12.0).reshape(3, 4)
ONE, TWO = "2d float32 cpu", "2d float32 cpu, 2d float32 cpu"
#: What stands in the place of an ATen function, a call of that, and what is found.
REPLACEMENTS: dict[str, tuple[str, Callable[..., Any], Callable[[], Any], dict[str, str]]] = {
    "right": ("mul.Tensor", lambda x, y: y * x, lambda: X * X, {}),
    "result in an argument": (
        "cumsum.out",
        lambda x, dim, out: out.copy_(x.cumsum(dim)),
        lambda: (x := X.clone(), torch.cumsum(x, 0, out=x)),
        {},
    ),
    "values": ("mul.Tensor", lambda x, y: x * x, lambda: X * (X + 1), {"other values": TWO}),
    "nan": ("mul.Tensor", lambda x, y: x * torch.nan, lambda: X * X, {"other values": TWO}),
    "type": ("mul.Tensor", lambda x, y: (x * y).long(), lambda: X * X, {"torch.int64 for torch.float32": TWO}),
    "shape": ("mul.Tensor", lambda x, y: x * 1, lambda: X[:1] * X, {"another shape": f"{TWO}, of several shapes"}),
    "whole argument": ("fill_.Scalar", contiguous_fill, lambda: X.clone().fill_(5.0), {}),
    "strided argument": (
        "fill_.Scalar",
        contiguous_fill,
        lambda: X.clone()[:, 1].fill_(5.0),
        {"other values": "1d float32 strided cpu"},
    ),
    "memory beside an argument": (
        "fill_.Scalar",
        lambda x, value: (x.as_strided((12,), (1,), 0).fill_(value), x)[1],
        lambda: X.clone()[:, 1].fill_(5.0),
        {"other values": "1d float32 strided cpu"},
    ),
    "argument that must stay": ("neg", lambda x: x.neg_().clone(), lambda: X.neg(), {"other values": ONE}),
    "random numbers": ("bernoulli_.float", lambda x, p: x.zero_(), lambda: X.clone().bernoulli_(1.0), {}),
    "refusal": ("neg", refuse, lambda: X.neg(), {"ValueError: not today": ONE}),
}


@pytest.mark.parametrize("what", REPLACEMENTS)
def test_the_benchmark_tells_what_differs(benchmark: Any, what: str) -> None:
    name, replacement, call, found = REPLACEMENTS[what]
    before = X.clone()
    both = benchmark.BothWays({name: replacement}, "cpu")
    with both:
        call()
    assert both.kinds.keys() == {name}
    assert both.found == ({name: {text: f"{name}({sort})" for text, sort in found.items()}} if found else {})
    assert torch.equal(X, before), "the second call works on copies"
