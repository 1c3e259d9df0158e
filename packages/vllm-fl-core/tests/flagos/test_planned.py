"""Launchers that follow a plan, with a simulated driver: what is decided anew, what is replayed, what never is."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from kernel_inputs import INTERPRETED
from simulated_driver import Machine
from torch import Tensor

from vllm_fl.flagos.kernels import planned
from vllm_fl.flagos.kernels.launch import FastKernel

pytestmark = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter launches by itself")


@triton.jit(do_not_specialize=["rows"])
def _add(x, y, out, rows, scale, BLOCK: tl.constexpr):
    pass


class Launcher:
    """An operator whose decisions are counted."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.kernel, self.decisions = machine, FastKernel(_add), 0
        self.call = planned.planned(self.launch)
        self.call(torch.zeros(3, 5))  # Triton's launch, which decides the kinds of the arguments
        assert self.decisions == 1

    def launch(self, x: Tensor, y: Tensor | None = None, scale: float = 0.5, *, block: int = 64) -> Tensor:
        self.decisions += 1
        out = x.new_empty((x.shape[0], 2 * x.shape[1]))
        self.kernel[(x.shape[0], 2)](x.view(-1), y, out, x.shape[0], scale, BLOCK=block, num_warps=2)
        return out


@pytest.fixture
def launcher(machine: Machine) -> Launcher:
    return Launcher(machine)


def test_a_call_of_known_layouts_is_replayed(machine: Machine, launcher: Launcher) -> None:
    results = []
    for number in range(4):
        x = torch.full((3, 5), float(number))
        results.append(launcher.call(x, scale=0.25))
        if number:  # the first one was compiled
            head, args = machine.ran[-1][:9], machine.ran[-1][9:]
            assert head == (3, 2, 1, "stream of 0", "function 1", "metadata 1", None, None, None)
            assert args == (x.data_ptr(), None, results[-1].data_ptr(), 3, 0.25, 64)
    assert launcher.decisions == 2
    assert len({result.data_ptr() for result in results}) == 4
    assert {(r.shape, r.stride(), r.dtype) for r in results} == {(torch.Size((3, 10)), (10, 1), torch.float32)}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"x": torch.zeros(4, 5)}, id="shape"),
        pytest.param({"x": torch.zeros(3, 5, dtype=torch.float16)}, id="dtype"),
        pytest.param({"x": torch.zeros(16)[1:].view(3, 5)}, id="alignment"),
        pytest.param({"y": torch.zeros(2)}, id="a-tensor-instead-of-none"),
        pytest.param({"scale": 0.75}, id="a-number"),
        pytest.param({"block": 128}, id="a-parameter"),
    ],
)
def test_anything_else_is_decided(launcher: Launcher, change: dict[str, Any]) -> None:
    arguments = {"x": torch.zeros(3, 5), **change}
    launcher.call(torch.zeros(3, 5))
    before = launcher.decisions
    for _ in range(3):
        launcher.call(**arguments)
    assert launcher.decisions == before + 1


def test_each_device_has_its_own(machine: Machine, launcher: Launcher) -> None:
    for device in (0, 1, 1):
        machine.device = device
        launcher.call(torch.zeros(3, 5))
    assert launcher.decisions == 3
    assert machine.ran[-1][3] == "stream of 1"


def test_strides_are_part_of_the_layout(machine: Machine) -> None:
    kernel, seen = FastKernel(_add), []

    def launch(x: Tensor) -> None:
        seen.append(x.stride())
        kernel[(1,)](x, None, x, 1, 0.5, BLOCK=1)

    call = planned.planned(launch)
    for x in (torch.zeros(4, 4), torch.zeros(4, 4).t(), torch.zeros(4, 4), torch.zeros(4, 4).t(), torch.zeros(4, 4)):
        assert call(x) is None
    assert seen == [(4, 1), (1, 4), (4, 1)]  # the very first was Triton's


def make_calls(machine: Machine, launch: Any, *args: Any, number: int = 4) -> tuple[int, list[Any]]:
    """How often a launcher ran in so many calls, behind the first, and what came out."""
    runs = []

    def counted(x: Tensor, y: Tensor | None = None) -> Any:
        runs.append(None)
        return launch(FastKernels[launch], x, y)

    FastKernels = {launch: FastKernel(_add)}
    call = planned.planned(counted)
    call(torch.zeros(2, 2))
    runs.clear()
    results = [call(*args) for _ in range(number)]
    return len(runs), results


def a_pair(kernel: Any, x: Tensor, y: Tensor | None) -> Any:
    first, second = torch.empty_like(x), x.new_empty((7, 3)).t()
    kernel[(1,)](x, y, first, 1, 0.5, BLOCK=1)
    kernel[(2,)](first, y, second, 1, 0.5, BLOCK=1)
    return first, second


def an_argument(kernel: Any, x: Tensor, y: Tensor | None) -> Any:
    room = x.new_empty((9,), dtype=torch.int32)
    kernel[(1,)](x, y, room, 1, 0.5, BLOCK=1)
    return x


def test_tuples_and_views_of_what_was_allocated(machine: Machine) -> None:
    runs, results = make_calls(machine, a_pair, torch.zeros(4, 4))
    assert runs == 1
    first, second = results[-1]
    assert (second.shape, second.stride()) == ((3, 7), (1, 3))
    assert [ran[11] for ran in machine.ran[-2:]] == [first.data_ptr(), second.data_ptr()]
    assert machine.ran[-1][9] == first.data_ptr()
    assert [ran[0] for ran in machine.ran[-2:]] == [1, 2]


def test_an_argument_comes_back(machine: Machine) -> None:
    x = torch.zeros(4, 4)
    runs, results = make_calls(machine, an_argument, x)
    assert runs == 1
    assert all(result is x for result in results)


def copies(kernel: Any, x: Tensor, y: Tensor | None) -> Any:
    flat = x.t().reshape(-1)
    kernel[(1,)](flat, y, flat, 1, 0.5, BLOCK=1)


def zeros(kernel: Any, x: Tensor, y: Tensor | None) -> Any:
    out = x.new_zeros(x.shape)
    kernel[(1,)](x, y, out, 1, 0.5, BLOCK=1)
    return out


def a_part_of_an_argument(kernel: Any, x: Tensor, y: Tensor | None) -> Any:
    kernel[(1,)](x[1:], y, x, 1, 0.5, BLOCK=1)


def a_view_of_an_argument(kernel: Any, x: Tensor, y: Tensor | None) -> Any:
    kernel[(1,)](x, y, x, 1, 0.5, BLOCK=1)
    return x.view(-1)


def a_part_of_what_was_allocated(kernel: Any, x: Tensor, y: Tensor | None) -> Any:
    out = x.new_empty((2, 8))
    kernel[(1,)](x, y, out, 1, 0.5, BLOCK=1)
    return out[0]


def nothing(kernel: Any, x: Tensor, y: Tensor | None) -> Any:
    return x.new_empty(3)


@pytest.mark.parametrize(
    "launch",
    [copies, zeros, a_part_of_an_argument, a_view_of_an_argument, a_part_of_what_was_allocated, nothing],
)
def test_what_is_never_replayed(machine: Machine, launch: Any) -> None:
    runs, _ = make_calls(machine, launch, torch.zeros(4, 4))
    assert runs == 4


def test_arguments_at_one_address_are_never_replayed(machine: Machine) -> None:
    x = torch.zeros(4, 4)
    runs, _ = make_calls(machine, an_argument, x, x)
    assert runs == 4


def test_with_a_launch_hook_every_launch_is_tritons(machine: Machine, launcher: Launcher) -> None:
    def hook(metadata: Any) -> None:
        pass

    launcher.call(torch.zeros(3, 5))
    launcher.call(torch.zeros(3, 5))
    compiled = len(machine.compiled)
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launcher.call(torch.zeros(3, 5))
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(machine.compiled) == compiled + 1


def test_launches_of_other_threads_are_not_taken_for_the_own(machine: Machine, launcher: Launcher) -> None:
    def elsewhere() -> None:
        launcher.kernel[(77,)](torch.zeros(2), None, torch.zeros(2), 1, 0.5, BLOCK=64, num_warps=2)

    def launch(x: Tensor) -> None:
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
        launcher.kernel[(1,)](x, None, x, 1, 0.5, BLOCK=64, num_warps=2)

    call = planned.planned(launch)
    x = torch.zeros(8)
    call(x)
    machine.ran.clear()
    call(x)
    assert [ran[0] for ran in machine.ran] == [1]


def test_the_memory_is_bounded(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "_MOST_PLANS", 4)
    plans = launcher.call.__globals__["_Plans"]
    for rows in range(2, 12):
        launcher.call(torch.zeros(rows, 5))
        assert len(plans) <= 4


def test_an_error_is_the_launchers(machine: Machine) -> None:
    def launch(x: Tensor) -> None:
        raise NotImplementedError("not this one")

    call = planned.planned(launch)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="not this one"):
            call(torch.zeros(2))
    assert not planned.OBSERVERS


def test_without_a_driver_the_launcher_runs() -> None:
    def launch(x: Tensor) -> Tensor:
        return x.new_empty(0)

    assert planned.planned(launch)(torch.zeros(0)).shape == (0,)
