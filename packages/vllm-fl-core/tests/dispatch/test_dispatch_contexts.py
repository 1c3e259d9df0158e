"""Policies for a block: seen by its own thread or task, and nowhere else; free outside."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import pytest
from dispatch_helpers import manager_of, reference, silu, vendor

from vllm_fl.dispatch import OpManager, SelectionPolicy, call_op, policy_context, with_denied_vendors, with_preference
from vllm_fl.dispatch.default import adopt_default_manager
from vllm_fl.errors import NoImplementationError


@pytest.fixture
def manager() -> OpManager:
    manager = manager_of(vendor("acme", "silu_and_mul", silu("acme")), reference("silu_and_mul", silu("reference")))
    adopt_default_manager(manager)
    return manager


def test_inside_and_outside(manager: OpManager) -> None:
    bound = manager.bind("silu_and_mul")
    assert bound(1) == "acme"
    with with_preference("reference"):
        assert bound(1) == call_op("silu_and_mul", 1) == manager.call("silu_and_mul", 1) == "reference"
        assert manager.get_selected_impl_id("silu_and_mul") == "reference.torch"
        with with_preference("vendor"):
            assert bound(1) == call_op("silu_and_mul", 1) == "acme"
        assert bound(1) == "reference"
    assert bound(1) == call_op("silu_and_mul", 1) == "acme"


def test_the_fast_function_comes_back(manager: OpManager) -> None:
    bound = manager.bind("silu_and_mul")
    bound(1)
    fast = bound.fn
    with with_preference("reference"):
        assert bound.fn is not fast
    assert bound.fn is fast


def test_operator_first_called_inside(manager: OpManager) -> None:
    bound = manager.bind("silu_and_mul")
    with with_preference("reference"):
        assert bound(1) == call_op("silu_and_mul", 1) == "reference"
    assert bound(1) == call_op("silu_and_mul", 1) == "acme"


def test_operator_that_only_the_block_allows() -> None:
    manager = manager_of(vendor("acme", "silu_and_mul", silu("acme")))
    bound = manager.bind("silu_and_mul")
    with with_denied_vendors("acme"):
        with pytest.raises(NoImplementationError, match="with_denied_vendors"):
            bound(1)
        with policy_context(SelectionPolicy()):
            assert bound(1) == "acme"
        with pytest.raises(NoImplementationError):
            bound(1)
    assert bound(1) == "acme"


def test_two_threads_keep_their_own(manager: OpManager) -> None:
    bound = manager.bind("silu_and_mul")
    barrier = threading.Barrier(3, timeout=30)
    answers: dict[str, list[str]] = {"reference": [], "vendor": [], "none": []}

    def inside(prefer: str) -> None:
        with with_preference(prefer):
            barrier.wait()
            answers[prefer] += [bound(1) for _ in range(200)]
            barrier.wait()
            answers[prefer] += [call_op("silu_and_mul", 1) for _ in range(200)]

    def outside() -> None:
        barrier.wait()
        answers["none"] += [bound(1) for _ in range(200)]
        barrier.wait()
        answers["none"] += [call_op("silu_and_mul", 1) for _ in range(200)]

    threads = [threading.Thread(target=inside, args=(prefer,)) for prefer in ("reference", "vendor")]
    threads.append(threading.Thread(target=outside))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == {"reference": ["reference"] * 400, "vendor": ["acme"] * 400, "none": ["acme"] * 400}


def test_tasks_keep_their_own(manager: OpManager) -> None:
    async def ask(prefer: str) -> list[str]:
        seen = []
        with with_preference(prefer):
            for _ in range(5):
                seen.append(call_op("silu_and_mul", 1))
                await asyncio.sleep(0)
        return seen

    async def both() -> list[list[str]]:
        return list(await asyncio.gather(ask("reference"), ask("vendor")))

    assert asyncio.run(both()) == [["reference"] * 5, ["acme"] * 5]
    assert call_op("silu_and_mul", 1) == "acme"


def test_a_block_that_is_closed_in_another_context(manager: OpManager) -> None:
    """As an async generator is whose consumer has gone away."""

    def stream() -> Iterator[str]:
        with with_preference("reference"):
            yield call_op("silu_and_mul", 1)

    bound = manager.bind("silu_and_mul")
    bound(1)
    fast = bound.fn
    running = stream()
    assert contextvars.copy_context().run(next, running) == "reference"
    assert bound.fn is not fast
    running.close()
    assert bound.fn is fast


def test_selection_is_made_once_a_policy(manager: OpManager, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    build = OpManager._build

    def counted(self, op_name, policy, demoted):  # type: ignore[no-untyped-def]
        made.append(policy.prefer)
        return build(self, op_name, policy, demoted)

    monkeypatch.setattr(OpManager, "_build", counted)
    with with_preference("reference"):
        for _ in range(5):
            call_op("silu_and_mul", 1)
        with with_preference("reference"):
            call_op("silu_and_mul", 1)
    assert made == ["reference"]
