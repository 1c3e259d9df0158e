"""The life of a worker and that of the selection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode

from vllm_fl.dispatch import bind, get_default_manager, oplist, reset_default_manager, set_global_policy
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.errors import FrozenError
from vllm_fl.flagos.aten import asked_for
from vllm_fl.integration import worker as worker_module
from vllm_fl.integration.platform import FINGERPRINT_KEY
from vllm_fl.integration.worker import FLWorkerMixin


class PlainWorker:
    def __init__(self, mode: Any, cudagraph_mode: Any = CUDAGraphMode.NONE) -> None:
        compilation = SimpleNamespace(mode=mode, cudagraph_mode=cudagraph_mode)
        parallel = SimpleNamespace(data_parallel_rank=0, data_parallel_index=1, world_size=4)
        self.vllm_config = SimpleNamespace(
            compilation_config=compilation, parallel_config=parallel, additional_config={}
        )
        self.rank = 2
        self.log: list[str] = []

    def load_model(self, *, load_dummy_weights: bool = False) -> str:
        self.log.append(f"load {FINGERPRINT_KEY in self.vllm_config.additional_config}")
        return "loaded"

    def compile_or_warm_up_model(self) -> str:
        return "warm"

    def shutdown(self) -> None:
        self.log.append("shutdown")


class Worker(FLWorkerMixin, PlainWorker):
    pass


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(oplist, "_rank", None)
    yield
    gc.collect()
    reset_default_manager()


def start(worker: Worker) -> Worker:
    assert worker.load_model(load_dummy_weights=False) == "loaded"
    assert worker.compile_or_warm_up_model() == "warm"
    return worker


def test_the_selection_is_stamped_before_the_model_is_loaded() -> None:
    assert start(Worker(CompilationMode.NONE)).log == ["load True"]


def test_flaggems_is_asked_to_replace_aten_before_the_model_is_loaded(clean_settings: pytest.MonkeyPatch) -> None:
    clean_settings.setenv("USE_FLAGGEMS", "1")
    worker = Worker(CompilationMode.NONE)
    clean_settings.setattr(worker_module, "enable_aten", lambda settings: worker.log.append(str(asked_for(settings))))
    assert start(worker).log == [
        "(True, 'use_flaggems is on (environment variable USE_FLAGGEMS)')",
        "load True",
    ]


def test_logs_and_traces_are_those_of_the_rank() -> None:
    start(Worker(CompilationMode.NONE))
    assert oplist.current_rank() == 6


@pytest.mark.parametrize(("out_of_tree", "warmed"), [(True, []), (False, ["the worker"])])
def test_kernels_of_cuda_are_not_warmed_up_on_other_platforms(
    monkeypatch: pytest.MonkeyPatch, out_of_tree: bool, warmed: list[str]
) -> None:
    from vllm.v1.worker import gpu_worker

    seen: list[str] = []
    monkeypatch.setattr(gpu_worker, "kernel_warmup", seen.append)
    monkeypatch.setattr(worker_module, "current_platform", SimpleNamespace(is_out_of_tree=lambda: out_of_tree))
    start(Worker(CompilationMode.NONE))
    gpu_worker.kernel_warmup("the worker")
    assert seen == warmed


def test_an_eager_worker_leaves_the_policy_free() -> None:
    worker = start(Worker(CompilationMode.NONE))
    old = set_global_policy(SelectionPolicy(prefer="reference"))
    set_global_policy(old)
    worker.shutdown()


@pytest.mark.parametrize(
    "modes",
    [
        pytest.param((CompilationMode.VLLM_COMPILE, CUDAGraphMode.NONE), id="compiled"),
        pytest.param((CompilationMode.NONE, CUDAGraphMode.FULL), id="captured"),
    ],
)
def test_policy_changes_raise_while_there_are_graphs(modes: tuple[Any, Any]) -> None:
    worker = start(Worker(*modes))
    with pytest.raises(FrozenError, match="because vLLM has compiled or captured graphs of the model with it"):
        set_global_policy(SelectionPolicy(prefer="reference"))
    worker.shutdown()
    assert worker.log[-1] == "shutdown"
    set_global_policy(set_global_policy(SelectionPolicy(prefer="reference")))


def test_the_last_worker_with_graphs_thaws() -> None:
    workers = [start(Worker(CompilationMode.VLLM_COMPILE)) for _ in range(2)]
    workers.pop().shutdown()
    assert get_default_manager().frozen is not None
    workers.clear()  # dropped without a shutdown, as an in-process engine is
    gc.collect()
    assert get_default_manager().frozen is None


def test_questions_that_collective_rpc_asks_by_name() -> None:
    import torch

    worker = Worker(CompilationMode.NONE)
    worker.fl_count_calls()
    for _ in range(3):
        bind("silu_and_mul").fn(torch.ones(1, 4))
    assert worker.fl_call_counts() == {"silu_and_mul": {"reference.torch": 3}}
    worker.fl_count_calls(False)
    assert worker.fl_selection()["silu_and_mul"] == "reference.torch"
