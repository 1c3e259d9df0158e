"""One rank of one method of benchmarks/allreduce.py, which starts it."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: Calls in a captured graph, and in a series.
GRAPH_CALLS = 20
SERIES_BYTES = 256 << 20  # a series of large messages is shorter


class Method:
    """One way of all-reducing. `bind` makes a function of no arguments that reduces `tensor` and gives the result."""

    #: The result overwrites the input.
    in_place = False
    #: Said in the report in place of the table's description.
    description: str | None = None

    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.rank, self.ranks, self.largest = spec["rank"], spec["ranks"], max(spec["sizes"])

    def refusal(self, tensor: torch.Tensor) -> str | None:
        """Why this size and dtype is not for this method."""
        return None

    def bind(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        raise NotImplementedError

    def capture(self) -> AbstractContextManager[Any]:
        """Around the capture of a graph."""
        return nullcontext()

    def close(self) -> None:
        """Before the process group is destroyed."""


class TorchDistributed(Method):
    """``torch.distributed.all_reduce``, in place: over NCCL on GPUs, over gloo on a CPU."""

    in_place = True

    def bind(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            dist.all_reduce(tensor)
            return tensor

        return call


class PyNccl(Method):
    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        super().__init__(spec, device)
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        self.communicator = PyNcclCommunicator(group=gloo_group(), device=device)
        if self.communicator.disabled:
            raise RuntimeError("PyNcclCommunicator is disabled: vLLM found no NCCL")

    def bind(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            return self.communicator.all_reduce(tensor, stream=torch.cuda.current_stream())

        return call


class Custom(Method):
    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        super().__init__(spec, device)
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        self.communicator = CustomAllreduce(group=gloo_group(), device=device)
        if self.communicator.disabled:
            raise RuntimeError("CustomAllreduce is disabled on this machine")

    def refusal(self, tensor: torch.Tensor) -> str | None:
        return None if self.communicator.should_custom_ar(tensor) else "too large"

    def bind(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: self.communicator.custom_all_reduce(tensor)

    def capture(self) -> AbstractContextManager[Any]:
        return self.communicator.capture()

    def close(self) -> None:
        self.communicator.close()


class Symmetric(Method):
    """torch's symmetric memory; every call copies its input into the shared buffer."""

    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        super().__init__(spec, device)
        import torch.distributed._symmetric_memory as symmetric

        self.group = dist.group.WORLD.group_name
        self.buffer = symmetric.empty(self.largest, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(self.buffer, self.group)
        if handle.multicast_ptr != 0:
            raise RuntimeError("symmetric memory has bound multicast although TORCH_SYMM_MEM_DISABLE_MULTICAST=1")

    def refusal(self, tensor: torch.Tensor) -> str | None:
        return None if tensor.dtype in (torch.bfloat16, torch.float32) else "no kernel"

    def shared(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.buffer[: tensor.nbytes].view(tensor.dtype)


class OneShot(Symmetric):
    def bind(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        shared, reduce = self.shared(tensor), torch.ops.symm_mem.one_shot_all_reduce

        def call() -> torch.Tensor:
            shared.copy_(tensor)
            return reduce(shared, "sum", self.group)

        return call


class TwoShot(Symmetric):
    def bind(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        shared, reduce = self.shared(tensor), torch.ops.symm_mem.two_shot_all_reduce_

        def call() -> torch.Tensor:
            shared.copy_(tensor)
            reduce(shared, "sum", self.group)
            return shared.clone()

        return call


class FlagCX(Method):
    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        super().__init__(spec, device)
        from vllm_fl_comm.collectives import TensorCommunicator
        from vllm_fl_comm.devices import device_selector, stream_getter
        from vllm_fl_comm.flagcx import Communicator, load
        from vllm_fl_comm.policy import Site, Thresholds

        library = load()
        name = "stand-in over NCCL" if "stand-in" in library.path else library.path
        self.description = f"FlagCX through vllm-fl-comm, {name}"
        identifier = [library.unique_id() if self.rank == 0 else None]
        dist.broadcast_object_list(identifier, src=0, group=gloo_group())
        self.communicator = Communicator.create(
            library, identifier[0], self.rank, self.ranks, "benchmark", on_thread=device_selector(device)
        )
        site = Site(self.ranks, refusal="not asked for")
        self.tensors = TensorCommunicator(self.communicator, stream_getter(device), site, Thresholds(), diverts=False)

    def bind(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: self.tensors.all_reduce(tensor)

    def close(self) -> None:
        self.communicator.destroy()


METHODS: dict[str, type[Method]] = {
    "flagcx": FlagCX,
    "nccl": TorchDistributed,
    "gloo": TorchDistributed,
    "pynccl": PyNccl,
    "custom": Custom,
    "one-shot": OneShot,
    "two-shot": TwoShot,
}

_gloo: list[Any] = []


def gloo_group() -> Any:
    """A group over gloo of all ranks, made at the first call, which all ranks make."""
    if not _gloo:
        _gloo.append(dist.new_group(backend="gloo"))
    return _gloo[0]


def work(spec: dict[str, Any]) -> None:
    """Measure one method as one rank; rank 0 writes a line a figure to ``spec["out"]``."""
    on_gpu = spec["device"] == "cuda"
    device = torch.device("cuda", spec["rank"]) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(spec["port"]))
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    more = {"device_id": device} if on_gpu else {}
    dist.init_process_group(backend, rank=spec["rank"], world_size=spec["ranks"], **more)
    gloo_group()
    method = METHODS[spec["method"]](spec, device)
    write(spec, {"machine": machine(device)})
    if method.description is not None:
        write(spec, {"methods": {spec["method"]: method.description}})
    # One allocation for every size: other processes may have it mapped.
    memory = torch.zeros(max(spec["sizes"]), dtype=torch.uint8, device=device)
    for dtype in spec["dtypes"]:
        for size in spec["sizes"]:
            measure_size(method, spec, memory[:size].view(getattr(torch, dtype)))
    method.close()
    if on_gpu:
        torch.cuda.synchronize()
    dist.destroy_process_group()


def write(spec: dict[str, Any], entry: dict[str, Any]) -> None:
    if spec["rank"] == 0:
        with Path(spec["out"]).open("a") as file:
            file.write(json.dumps(entry) + "\n")


def measure_size(method: Method, spec: dict[str, Any], tensor: torch.Tensor) -> None:
    size = tensor.nbytes
    name = {"method": spec["method"], "dtype": str(tensor.dtype).removeprefix("torch."), "size": size}
    refusal = method.refusal(tensor)
    call = method.bind(tensor) if refusal is None else None
    if call is not None:
        check(tensor, call, spec)
    for mode in spec["modes"]:
        if call is None:
            write(spec, {**name, "mode": mode, "skipped": refusal})
            continue
        us, host_us = (
            time_graph(method, tensor, call, spec) if mode == "graph" else time_eager(method.device, call, size, spec)
        )
        slowest: list[Any] = [None] * spec["ranks"]
        dist.all_gather_object(slowest, (us, host_us), group=gloo_group())
        entry = {"mode": mode, "us": max(us for us, _ in slowest), "host_us": max(host for _, host in slowest)}
        write(spec, {**name, **entry})


def check(tensor: torch.Tensor, call: Callable[[], torch.Tensor], spec: dict[str, Any]) -> None:
    """One call with small whole numbers, of which every dtype holds the sum exactly."""
    pattern = (torch.arange(tensor.numel(), device=tensor.device) % 8).to(tensor.dtype)
    tensor.copy_(pattern + spec["rank"])
    expected = pattern * spec["ranks"] + sum(range(spec["ranks"]))
    if not torch.equal(call(), expected):
        raise RuntimeError(f"{spec['method']} gives a wrong sum of {tensor.nbytes} bytes of {tensor.dtype}")
    tensor.zero_()


def time_eager(
    device: torch.device, call: Callable[[], torch.Tensor], size: int, spec: dict[str, Any]
) -> tuple[float, float]:
    """Microseconds a call, and microseconds that the host takes to make it."""
    calls = max(5, min(100, SERIES_BYTES // size))
    for _ in range(10):
        call()
    samples, hosts = [], []
    for _ in range(spec["repeats"]):
        dist.barrier(group=gloo_group())
        total, host = timed(device, call, lambda: [call() for _ in range(calls)])
        samples.append(total / calls)
        hosts.append(host / calls)
    return statistics.median(samples), statistics.median(hosts)


def time_graph(
    method: Method, tensor: torch.Tensor, call: Callable[[], torch.Tensor], spec: dict[str, Any]
) -> tuple[float, float]:
    """The same for calls that are replayed from a graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with method.capture(), torch.cuda.stream(stream):
        call()  # some libraries connect at the first call on a stream, which capture does not allow
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            kept = [call() for _ in range(GRAPH_CALLS)]
    torch.cuda.current_stream().wait_stream(stream)
    if not method.in_place:  # or the captured calls would reduce one another's results
        last = kept[-1]

        def replay() -> torch.Tensor:
            graph.replay()
            return last

        check(tensor, replay, spec)
    for _ in range(3):
        graph.replay()
    samples, hosts = [], []
    for _ in range(spec["repeats"]):
        dist.barrier(group=gloo_group())
        total, host = timed(method.device, graph.replay, graph.replay)
        samples.append(total / GRAPH_CALLS)
        hosts.append(host / GRAPH_CALLS)
    kept.clear()
    graph.reset()
    gc.collect()
    return statistics.median(samples), statistics.median(hosts)


def timed(device: torch.device, first: Callable[[], Any], series: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds until `series` has been done, and until it has been asked for; `first` brings the ranks together."""
    if device.type == "cpu":
        first()
        start = time.perf_counter()
        series()
        seconds = time.perf_counter() - start
        return seconds * 1e6, seconds * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first()
    start = time.perf_counter()
    begin.record()
    series()
    end.record()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3, host * 1e6


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on."""
    found = {"system": platform.platform(), "python": platform.python_version(), "torch": torch.__version__}
    for distribution in ("vllm", "vllm-fl-comm"):
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["peer access"] = torch.cuda.can_device_access_peer(0, 1)
        found["multicast"] = "kept off (NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1)"
    return found
