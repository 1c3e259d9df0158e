"""The measurer and its watchdog, with a process in the place of the one that holds the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_fl.dispatch import ParameterPath, SelectionPolicy, get_default_manager, reset_default_manager
from vllm_fl.engines import Workload
from vllm_fl.errors import CommandError, Exit
from vllm_fl.policies import from_plain, to_plain
from vllm_fl.tune import Dimension, TrialFailed
from vllm_fl.tune import engine as module
from vllm_fl.tune.engine import EngineMeasurer
from vllm_fl.tune.host import Host

BLOCK = ParameterPath("norm", "good", "block")
POLICY = SelectionPolicy(per_op_order=(("gate", ("vendor",)),), parameters=((BLOCK, "128"),))


@pytest.fixture
def measurer(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineMeasurer]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(module, "HOST", "planted_host")
    with EngineMeasurer({"model": "m"}, POLICY, Workload(), hang_s=2.0) as made:
        made.check(made.space().baseline)
        yield made


def test_the_space_leaves_out_what_an_engine_decides_at_its_start(measurer: EngineMeasurer) -> None:
    (operator,) = measurer.space().operators
    assert (operator.name, operator.share) == ("norm", 0.4)


def test_parameters_begin_with_the_values_of_the_baseline(measurer: EngineMeasurer) -> None:
    (operator,) = measurer.space().operators
    assert operator.implementations[:2] == ("good(block=128)", "raises")
    assert list(operator.neighbours("good(block=128)")) == [
        "good",
        "good(block=128, warps.decode=2)",
        "good(block=128, warps.prefill=2)",
    ]
    assert operator.size == 3 * 2 * 2 + 6


def test_a_variant_is_a_policy_that_sets_its_parameters(measurer: EngineMeasurer) -> None:
    policy = measurer.policy_of({"norm": "good(warps.decode=2)"})
    assert policy.get_per_op_order("norm")[:2] == ["impl:good", "impl:raises"]  # type: ignore[index]
    warps = ParameterPath("norm", "good", "warps", "decode")
    assert policy.parameters == ((BLOCK, "64"), (warps, "2"))
    assert from_plain(to_plain(policy)).parameters == policy.parameters
    assert measurer.policy_of({"norm": "good(block=128)"}).parameters == POLICY.parameters
    assert measurer.policy_of({"norm": "dies"}).parameters == POLICY.parameters


def test_a_mix_is_a_policy_that_keeps_the_other_orders(measurer: EngineMeasurer) -> None:
    policy = measurer.policy_of({"norm": "dies"})
    assert policy.get_per_op_order("gate") == ["vendor"]
    order = policy.get_per_op_order("norm")
    assert order is not None
    assert order[:2] == ["impl:dies", "impl:good"]
    assert policy.strict is False


def test_workers_say_what_may_be_varied() -> None:
    pytest.importorskip("vllm", reason="a worker of vLLM is mixed with ours")
    pytest.importorskip("vllm_fl_reference", reason="its delta rule has a parameter")
    from vllm_fl.tune.worker import TuneWorker

    reset_default_manager()
    get_default_manager().ensure_initialized()
    host = Host()
    host._engine = SimpleNamespace(call=lambda name: [getattr(TuneWorker(), name)()])  # type: ignore[assignment]
    found = host.dimensions()["chunk_gated_delta_rule"]["reference.torch"]
    assert found == (Dimension("chunk", ("8", "16", "32", "64", "128"), "32"),)


def test_the_engine_stays_up(measurer: EngineMeasurer) -> None:
    assert [measurer.measure({"norm": "good"}, number) for number in range(3)] == [0.05] * 3
    assert measurer.starts == 1


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("raises", "crash: ValueError: planted"),
        ("memory", "out of memory: RuntimeError: CUDA out of memory. Tried to allocate"),
        ("hangs", "hang: no answer within 2 s"),
        ("dies", "crash: the engine's process was ended by SIGKILL, as when memory runs out"),
    ],
)
def test_a_failure_ends_the_engine_and_the_next_mix_has_a_new_one(
    measurer: EngineMeasurer, chosen: str, message: str
) -> None:
    with pytest.raises(TrialFailed) as caught:
        measurer.measure({"norm": chosen}, 1)
    assert str(caught.value) == message
    assert measurer.measure({"norm": "good"}, 1) == 0.05
    assert measurer.starts == 2


def test_an_implementation_that_serves_no_call_is_refused(measurer: EngineMeasurer) -> None:
    with pytest.raises(TrialFailed) as caught:
        measurer.check({"norm": "unused(block=1)"})
    assert str(caught.value) == "not used: unused took none of the calls of norm"


def test_an_error_of_the_command_line_stays_one(measurer: EngineMeasurer) -> None:
    with pytest.raises(CommandError) as caught:
        measurer.measure({"norm": "graphs"}, 1)
    assert (caught.value.code, str(caught.value)) == (Exit.USAGE, "planted graphs\nRemedy: none")
