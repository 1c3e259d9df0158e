"""Watchers: they take part in the calls while a manager has them, and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_helpers import FakeTensor, flagos, manager_of, reference, silu

from vllm_fl.dispatch import OpImpl, set_global_policy, with_preference
from vllm_fl.dispatch.links import Call
from vllm_fl.errors import FrozenError


class Log:
    """Writes down each call, around it."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, self.lines = name, lines

    def around(self, impl: OpImpl, call: Call) -> Call:
        def logged(*args: Any, **kwargs: Any) -> Any:
            self.lines.append(f"{self.name}> {impl.op_name} {impl.impl_id}")
            result = call(*args, **kwargs)
            self.lines.append(f"<{self.name} {result}")
            return result

        return logged


def test_around_the_call_the_last_one_outside() -> None:
    manager = manager_of(flagos("silu_and_mul", silu("answer")))
    lines: list[str] = []
    one, two = Log("one", lines), Log("two", lines)
    bound = manager.bind("silu_and_mul")
    assert bound(FakeTensor(2, 4)) == "answer"
    manager.watch(one)
    manager.watch(two)
    assert bound(FakeTensor(2, 4)) == "answer"
    assert lines == [
        "two> silu_and_mul default.flagos",
        "one> silu_and_mul default.flagos",
        "<one answer",
        "<two answer",
    ]
    manager.unwatch(one)
    lines.clear()
    bound(FakeTensor(2, 4))
    assert lines == ["two> silu_and_mul default.flagos", "<two answer"]


def test_nothing_is_left_behind() -> None:
    manager = manager_of(flagos("silu_and_mul", silu("answer")))
    manager.call("silu_and_mul", FakeTensor(2, 4))
    watcher = Log("one", [])
    manager.watch(watcher)
    manager.unwatch(watcher)
    link = manager._plans["silu_and_mul"].links[0]
    assert link.fn is link.call is link.impl.fn


def test_what_failed_stays_out_and_what_is_tried_is_watched() -> None:
    manager = manager_of(flagos("silu_and_mul", silu(ValueError("broken"))), reference("silu_and_mul", silu("right")))
    assert manager.call("silu_and_mul", FakeTensor(2, 4)) == "right"
    lines: list[str] = []
    manager.watch(Log("one", lines))
    assert manager.call("silu_and_mul", FakeTensor(2, 4)) == "right"
    assert lines == ["one> silu_and_mul reference.torch", "<one right"]
    manager.clear_failed_impls()
    lines.clear()
    assert manager.call("silu_and_mul", FakeTensor(2, 4)) == "right"
    assert lines[:2] == ["one> silu_and_mul default.flagos", "one> silu_and_mul reference.torch"]


def test_in_a_policy_context() -> None:
    manager = manager_of(flagos("silu_and_mul", silu("flagos")), reference("silu_and_mul", silu("reference")))
    lines: list[str] = []
    with with_preference("reference"):
        assert manager.call("silu_and_mul", FakeTensor(2, 4)) == "reference"
        manager.watch(Log("one", lines))
        assert manager.call("silu_and_mul", FakeTensor(2, 4)) == "reference"
    assert manager.call("silu_and_mul", FakeTensor(2, 4)) == "flagos"
    assert lines[::2] == ["one> silu_and_mul reference.torch", "one> silu_and_mul default.flagos"]


def test_while_the_selection_is_frozen() -> None:
    from vllm_fl.dispatch import SelectionPolicy

    manager = manager_of(flagos("silu_and_mul", silu("answer")))
    manager.call("silu_and_mul", FakeTensor(2, 4))
    manager.freeze("a graph has it")
    lines: list[str] = []
    watcher = Log("one", lines)
    manager.watch(watcher)
    manager.call("silu_and_mul", FakeTensor(2, 4))
    manager.unwatch(watcher)
    assert len(lines) == 2
    with pytest.raises(FrozenError):
        set_global_policy(SelectionPolicy(prefer="reference"))
    manager.thaw()
