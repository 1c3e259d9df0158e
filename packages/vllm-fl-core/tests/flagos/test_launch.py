"""Remembered launches, with a simulated driver: what goes to Triton, what goes straight to the compiled kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_inputs import INTERPRETED
from simulated_driver import Machine

from vllm_fl.flagos.kernels import launch

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter launches by itself")


@triton.jit(do_not_specialize=["rows"])
def _kernel(x, y, rows, width, scale, KIND: tl.constexpr, BLOCK: tl.constexpr = 64):
    pass


#: Names that a launcher may use itself.
NAMES = ("key", "grid", "size", "device", "entry", "run", "function", "metadata", "cold", "entries", "self", "args")


@triton.jit
def _with_names(key, grid, size, device, entry, run, function, metadata, cold, entries, self, args):
    pass


@pytest.fixture
def kernel(machine: Machine) -> launch.FastKernel:
    made = launch.FastKernel(_kernel)
    call(made)  # decides the kinds of the arguments
    machine.compiled.clear()
    return made


def call(kernel: Any, grid: tuple[int, ...] = (3,), **changes: Any) -> None:
    values: dict[str, Any] = {
        "x": torch.zeros(64), "y": None, "rows": 5, "width": 16, "scale": 0.5, "KIND": "a", "num_warps": 4, **changes
    }  # fmt: skip
    x, y, rows, width, scale = (values.pop(name) for name in ("x", "y", "rows", "width", "scale"))
    kernel[grid](x, y, rows, width, scale, **values)


def test_the_second_launch_goes_straight_to_the_compiled_kernel(machine: Machine, kernel: Any) -> None:
    call(kernel)
    assert len(machine.compiled) == 1
    assert machine.compiled[0]["num_warps"] == 4
    assert "num_stages" not in machine.compiled[0]
    x, y = torch.zeros(64), torch.ones(8)
    call(kernel, (7, 8), x=x)
    assert len(machine.compiled) == 1
    head, args = machine.ran[0][:9], machine.ran[0][9:]
    assert head == (7, 8, 1, "stream of 0", "function 0", "metadata 0", None, None, None)
    assert args == (x.data_ptr(), None, 5, 16, 0.5, "a", 64)
    call(kernel, (1, 2, 3), y=y)
    assert len(machine.compiled) == 2


@pytest.mark.parametrize(
    ("change", "again"),
    [
        pytest.param({"rows": 6}, False, id="an-integer-that-is-not-specialised"),
        pytest.param({"rows": 1}, False, id="one-not-specialised"),
        pytest.param({"rows": 2**31}, True, id="an-integer-of-64-bits"),
        pytest.param({"width": 17}, True, id="a-specialised-integer"),
        pytest.param({"scale": 0.25}, False, id="a-float"),
        pytest.param({"KIND": "b"}, True, id="a-constant"),
        pytest.param({"BLOCK": 128}, True, id="a-constant-with-a-default"),
        pytest.param({"num_warps": 8}, True, id="an-option"),
        pytest.param({"num_stages": 2}, True, id="another-option"),
        pytest.param({"x": torch.zeros(64, dtype=torch.float16)}, True, id="dtype"),
        pytest.param({"x": torch.zeros(80)[1:]}, True, id="alignment"),
        pytest.param({"x": torch.zeros(80)[4:]}, False, id="aligned-all-the-same"),
        pytest.param({"y": torch.zeros(1)}, True, id="a-tensor-instead-of-none"),
    ],
)
def test_what_a_launch_is_remembered_by(machine: Machine, kernel: Any, change: dict[str, Any], again: bool) -> None:
    call(kernel)
    call(kernel, **change)
    assert len(machine.compiled) == 1 + again
    call(kernel, **change)
    assert len(machine.compiled) == 1 + again


def test_no_name_of_an_argument_is_taken(machine: Machine) -> None:
    kernel, values = launch.FastKernel(_with_names), tuple(range(10, 10 + len(NAMES)))
    for _ in range(3):
        kernel[(1,)](*values)
    assert [made["args"] for made in machine.compiled] == [values, values]
    assert [args[9:] for args in machine.ran] == [values]


def test_each_device_has_its_own(machine: Machine, kernel: Any) -> None:
    call(kernel)
    machine.device = 1
    call(kernel)
    call(kernel)
    assert len(machine.compiled) == 2
    assert machine.ran[-1][3:5] == ("stream of 1", "function 1")


def test_with_a_launch_hook_every_launch_is_tritons(machine: Machine, kernel: Any) -> None:
    def hook(metadata: Any) -> None:
        pass

    call(kernel)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        call(kernel)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(machine.compiled) == 2
    assert not machine.ran
    call(kernel)
    assert len(machine.ran) == 1


def test_the_memory_is_bounded(machine: Machine, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST_ENTRIES", 4)
    for width in range(2, 12):
        call(kernel, width=width)
    assert len(kernel._entries) <= 4


def test_an_argument_of_an_unknown_kind_leaves_it_to_triton(machine: Machine) -> None:
    kernel = launch.FastKernel(_kernel)
    for _ in range(3):
        call(kernel, width="wide")
    assert len(machine.compiled) == 3
    assert not machine.ran


def test_without_a_device_it_is_triton_that_complains() -> None:
    with pytest.raises(RuntimeError, match="active drivers"):
        call(launch.FastKernel(_kernel))


def test_what_is_not_tritons_kernel_stays_as_it_is() -> None:
    assert launch.fast(len) is len
    assert isinstance(launch.fast(_kernel), launch.FastKernel)
