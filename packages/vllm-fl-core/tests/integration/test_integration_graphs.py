"""Graphs that follow the selection: vLLM's own tables and wrappers, with stand-ins for the device's graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation import cuda_graph
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_fl.integration.graphs import KEPT, CapturedGraphs, FirstTable, SecondTable, obstacle

SIZES = [1, 2, 4, 8]


class Device:
    """What the selection is, and what has been captured under it."""

    def __init__(self) -> None:
        self.selected = "a"
        self.captured: list[str] = []


class Graph:
    """Of the device: remembers the selection that it was captured under."""

    value = ""

    def replay(self) -> None:
        pass


class FirstRunner:
    """As vLLM's first one: a wrapper around the model holds the graphs."""

    def __init__(self, config: Any, device: Device) -> None:
        self.config = config
        self.cudagraph_dispatcher = CudagraphDispatcher(config)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL)
        self.model = cuda_graph.CUDAGraphWrapper(lambda: device.selected, config, CUDAGraphMode.FULL)
        self.table = FirstTable

    def step(self, tokens: int) -> Any:
        return self._run(*self.cudagraph_dispatcher.dispatch(tokens))

    def capture_model(self) -> None:
        for mode, batches in self.cudagraph_dispatcher.get_capture_descs():
            for batch in batches:
                self._run(mode, batch)

    def _run(self, mode: Any, batch: Any) -> Any:
        with set_forward_context(
            None, self.config, batch.num_tokens, cudagraph_runtime_mode=mode, batch_descriptor=batch
        ):
            return self.model()


class SecondRunner:
    """As vLLM's second one: its manager holds the graphs."""

    def __init__(self, config: Any, device: Device) -> None:
        self.device = device
        self.cudagraph_manager = cudagraph_utils.CudaGraphManager(
            config, torch.device("cpu"), CUDAGraphMode.FULL, decode_query_len=1
        )
        self.table = SecondTable

    def step(self, tokens: int) -> Any:
        batch = self.cudagraph_manager.dispatch(tokens, tokens, 1, num_active_loras=0)
        if batch.cg_mode == CUDAGraphMode.NONE:
            return self.device.selected
        self.cudagraph_manager.run_fullgraph(batch)
        return self.cudagraph_manager.graphs[batch].value

    def capture_model(self) -> None:
        self.cudagraph_manager.capture(lambda batch, warmup: lambda mode: None)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Stand-ins for all that needs a GPU."""
    made = Device()

    @contextmanager
    def capture(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
        made.captured.append(made.selected)
        graph.value = made.selected
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda output: output)
    monkeypatch.setattr(cuda_graph, "current_stream", lambda: None)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: 0)
    monkeypatch.setattr(cudagraph_utils, "graph_capture", lambda device: nullcontext())
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    return made


@pytest.fixture(params=[FirstRunner, SecondRunner], ids=["first", "second"])
def runner(request: pytest.FixtureRequest, vllm_config: Any, device: Device) -> Any:
    compilation = vllm_config.compilation_config
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = SIZES, max(SIZES)
    vllm_config.scheduler_config.max_num_seqs = max(SIZES)
    made = request.param(vllm_config, device)
    made.capture_model()  # as an engine does when it starts
    assert device.captured == ["a"] * len(SIZES)
    device.captured.clear()
    return made


@pytest.fixture
def graphs(runner: Any) -> CapturedGraphs:
    """After a workload with batches of 3 and 4 tokens, which one graph serves."""
    made = CapturedGraphs(runner, runner.table(runner))
    for tokens in (3, 4):
        runner.step(tokens)
    return made


def test_each_selection_has_its_graphs(runner: Any, graphs: CapturedGraphs, device: Device) -> None:
    graphs.use("a")
    device.selected = "b"
    assert runner.step(3) == "a"  # replayed
    graphs.use("b")
    assert runner.step(3) == "b"
    graphs.use("a")
    assert runner.step(3) == "a"
    assert device.captured == ["a", "b"]


def test_only_batches_that_were_seen_are_captured(runner: Any, graphs: CapturedGraphs, device: Device) -> None:
    graphs.use("a")
    device.selected = "b"
    assert runner.step(8) == "b"  # without a graph
    device.selected = "a"
    graphs.use("a")
    device.selected = "b"
    assert runner.step(8) == "a"
    assert device.captured == ["a", "a"]


def test_a_selection_from_before_gets_the_batches_that_were_seen_since(
    runner: Any, graphs: CapturedGraphs, device: Device
) -> None:
    graphs.use("a")
    device.selected = "b"
    runner.step(8)
    graphs.use("b")
    graphs.use("a")
    assert device.captured == ["a", "b", "b", "b"]  # 4 of a; 4 and 8 of b; 8 of the first, under what is selected


def test_batches_that_are_seldom_seen_have_no_graph(runner: Any, graphs: CapturedGraphs, device: Device) -> None:
    for _ in range(200):
        runner.step(4)
    runner.step(1)
    graphs.use("a")
    device.selected = "b"
    assert runner.step(4) == "a"
    assert runner.step(1) == "b"


def test_the_graphs_of_the_last_selections_are_kept(runner: Any, graphs: CapturedGraphs, device: Device) -> None:
    for number in range(KEPT + 1):
        device.selected = str(number)
        graphs.use(number)
    graphs.use(1)
    assert runner.step(4) == "1"
    device.selected = "anew"
    graphs.use(0)
    assert runner.step(4) == "anew"


def test_without_graphs(runner: Any, graphs: CapturedGraphs, device: Device) -> None:
    graphs.use("a")
    graphs.switch_off(True)
    device.selected = "b"
    assert runner.step(4) == "b"
    graphs.switch_off(False)
    assert runner.step(4) == "a"


def test_a_failure_while_capturing_leaves_the_engine_without_the_graphs(
    runner: Any, graphs: CapturedGraphs, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    graphs.use("a")
    monkeypatch.setattr(runner, "capture_model", fail)
    with pytest.raises(RuntimeError, match="planted"):
        graphs.use("b")
    device.selected = "b"
    assert runner.step(4) == "b"


def worker(runner: Any, **changes: Any) -> Any:
    compilation = {"mode": CompilationMode.NONE, "cudagraph_mode": CUDAGraphMode.FULL, "cudagraph_mm_encoder": False}
    parallel = {"data_parallel_size": 1, "use_ubatching": False}
    for part in (compilation, parallel):
        part.update({name: value for name, value in changes.items() if name in part})
    config = SimpleNamespace(
        speculative_config=changes.get("speculative_config"),
        compilation_config=SimpleNamespace(**compilation),
        parallel_config=SimpleNamespace(**parallel),
    )
    return SimpleNamespace(vllm_config=config, model_runner=runner)


class UnknownRunner:
    def capture_model(self) -> None:
        pass


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"speculative_config": object()}, "speculative decoding has graphs of its own"),
        ({"cudagraph_mm_encoder": True}, "the encoder has graphs of its own (cudagraph_mm_encoder)"),
        ({"use_ubatching": True}, "data-parallel engines and microbatches agree on the graph of each step"),
        (
            {"mode": CompilationMode.STOCK_TORCH_COMPILE},
            "the compilation mode STOCK_TORCH_COMPILE compiles outside of vLLM's wrapper",
        ),
        ({}, f"the model runner {__name__}.UnknownRunner is not one that vllm-fl knows"),
    ],
)
def test_what_cannot_be_exchanged_is_said(changes: dict[str, Any], expected: str) -> None:
    assert obstacle(worker(UnknownRunner(), **changes)) == expected


def test_nothing_is_in_the_way(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "vllm.compilation.cuda_graph.CUDAGraphWrapper"
    assert obstacle(worker(runner)).startswith("graphs of vllm.compilation.base_static_graph.AbstractStaticGraph")
    monkeypatch.setattr(type(current_platform), "get_static_graph_wrapper_cls", classmethod(lambda cls: path))
    assert obstacle(worker(runner)) == ""
