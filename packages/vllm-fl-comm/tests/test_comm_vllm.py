"""vLLM's communicator contract over a simulated FlagCX: two ranks with torch tensors, every method, every dtype."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import socket
from typing import Any

import pytest
from comm_support import Doubles

torch = pytest.importorskip("torch", reason="the communicator needs PyTorch")
pytest.importorskip("vllm", reason="the communicator extends vLLM's")

RANKS = 2
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int32", "int64")
MOVED = (*FLOATS, *INTEGERS, "int16", "bool", "float8_e4m3fn", "float8_e5m2", "complex64")


def tensor_of(dtype: str, rank: int, shape: tuple[int, ...] = (3, 4)) -> Any:
    """Small whole numbers that differ between ranks, of which every dtype holds sums exactly."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) % 3 + rank).to(getattr(torch, dtype))


def rank_main(rank: int, port: int, folders: dict[str, str], queue: Any) -> None:
    try:
        queue.put((rank, Checks(rank, port, folders).run()))
    except BaseException as error:
        queue.put((rank, f"{type(error).__name__}: {error}"))
        raise


class Checks:
    """What one rank does and finds; the methods that begin with ``check_`` are called in order on every rank."""

    def __init__(self, rank: int, port: int, folders: dict[str, str]) -> None:
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.other, self.folders, self.dist = rank, 1 - rank, folders, dist
        os.environ["FLAGCX_PATH"] = folders["plain"]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
        self.group = dist.new_group(backend="gloo")
        self.communicator = self.make("FlagCXCommunicator", "tp:0")

    def run(self) -> dict[str, Any]:
        names = [name for name, _ in inspect.getmembers(type(self), inspect.isfunction) if name.startswith("check_")]
        found = {name.removeprefix("check_"): getattr(self, name)() for name in names}
        self.communicator.destroy()
        self.dist.destroy_process_group()
        return found

    def make(self, name: str, unique_name: str) -> Any:
        from vllm_fl_comm import communicator, cuda

        made = getattr(cuda if "Cuda" in name else communicator, name)
        return made(
            cpu_group=self.group,
            device=torch.device("cpu"),
            device_group=self.group,
            unique_name=unique_name,
            use_all2all=False,
        )

    def both(self, dtype: str, shape: tuple[int, ...] = (3, 4)) -> list[Any]:
        return [tensor_of(dtype, rank, shape) for rank in range(RANKS)]

    @staticmethod
    def same(one: Any, other: Any) -> bool:
        """Equal in shape, dtype and bits."""
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        )

    def error(self, function: Any, *args: Any, **kwargs: Any) -> str:
        from vllm_fl_comm.errors import CommunicationError

        with pytest.raises(CommunicationError) as caught:
            function(*args, **kwargs)
        return str(caught.value)

    def check_all_reduce(self) -> dict[str, bool]:
        found = {}
        for dtype in (*FLOATS, *INTEGERS):
            inputs = self.both(dtype)
            own = inputs[self.rank].clone()
            result = self.communicator.all_reduce(own)
            untouched = self.same(own, inputs[self.rank]) and result.data_ptr() != own.data_ptr()
            found[dtype] = self.same(result, inputs[0] + inputs[1]) and untouched
        return found

    def check_all_reduce_of_bools_says_whether_any_is_true(self) -> list[bool]:
        own = torch.tensor([False, self.rank == 0, self.rank == 1, True])
        return self.communicator.all_reduce(own).tolist()

    def check_all_reduce_of_a_strided_input(self) -> bool:
        inputs = self.both("float32", (6, 8))
        result = self.communicator.all_reduce(inputs[self.rank].t()[::2])
        return self.same(result, (inputs[0] + inputs[1]).t()[::2]) and result.is_contiguous()

    def check_empty_tensors(self) -> list[tuple[int, ...]]:
        empty = torch.empty(0, 5)
        c = self.communicator
        c.send(empty)
        results = [c.all_reduce(empty), c.all_gather(empty, 0), c.reduce_scatter(empty, 0), c.broadcast(empty, 1)]
        results += [c.recv(empty.size(), empty.dtype), c.all_gatherv(empty), *c.all_gatherv([empty], sizes=[0, 0])]
        gathered = c.gather(empty, 0, 0)
        return [tuple(result.shape) for result in results] + [None if gathered is None else tuple(gathered.shape)]

    def check_everything_can_be_moved(self) -> dict[str, bool]:
        found = {}
        for dtype in MOVED:
            inputs = self.both(dtype)
            joined = torch.stack([i.view(torch.uint8) for i in inputs]).reshape(6, -1)
            gathered = self.communicator.all_gather(inputs[self.rank], 0)
            copied = self.communicator.broadcast(inputs[self.rank].clone(), 1)
            found[dtype] = torch.equal(gathered.view(torch.uint8), joined) and self.same(copied, inputs[1])
        return found

    def check_all_gather_along_every_dimension(self) -> list[bool]:
        inputs = self.both("float32", (2, 3, 4))
        own = inputs[self.rank].transpose(0, 2).contiguous().transpose(0, 2)  # not contiguous
        results = [self.communicator.all_gather(own, dim) for dim in (0, 1, 2, -1, -3)]
        return [
            self.same(result, torch.cat(inputs, dim)) for result, dim in zip(results, (0, 1, 2, -1, -3), strict=True)
        ]

    def check_all_gatherv(self) -> list[bool]:
        found = []
        for sizes in ([3, 1], [0, 2], [2, 2]):
            inputs = [tensor_of("bfloat16", rank, (sizes[rank], 5)) for rank in range(RANKS)]
            weights = [tensor_of("float8_e4m3fn", rank, (sizes[rank],)) for rank in range(RANKS)]
            own = inputs[self.rank], weights[self.rank]
            both = self.communicator.all_gatherv(list(own), 0, sizes)
            one = self.communicator.all_gatherv(own[0], sizes=sizes)
            whole = torch.cat([w.view(torch.uint8) for w in weights])
            found.append(
                self.same(both[0], torch.cat(inputs))
                and torch.equal(both[1].view(torch.uint8), whole)
                and self.same(one, both[0])
            )
        return found

    def check_reduce_scatter(self) -> list[bool]:
        inputs = self.both("float32", (4, 6))
        total = inputs[0] + inputs[1]
        found = []
        for dim in (0, 1, -1):
            result = self.communicator.reduce_scatter(inputs[self.rank], dim)
            found.append(self.same(result, total.chunk(2, dim)[self.rank].contiguous()))
        for sizes in ([3, 1], [4, 0], [2, 2]):
            result = self.communicator.reduce_scatterv(inputs[self.rank], 0, sizes)
            found.append(self.same(result, total.split(sizes)[self.rank]))
        output = torch.empty(2, 6)
        self.communicator.reduce_scatterv_into_output(inputs[self.rank], output, 0)
        found.append(self.same(output, total.chunk(2)[self.rank]))
        return found

    def check_gather(self) -> list[bool]:
        inputs = self.both("int64", (2, 3))
        results = [
            (root, dim, self.communicator.gather(inputs[self.rank], root, dim)) for root in (0, 1) for dim in (0, -1)
        ]
        return [
            result is None if root != self.rank else self.same(result, torch.cat(inputs, dim))
            for root, dim, result in results
        ]

    def check_messages(self) -> list[bool]:
        inputs = self.both("bfloat16", (3, 4))
        if self.rank == 0:
            self.communicator.send(inputs[0].t())
            received = self.communicator.recv(torch.Size((3, 4)), torch.bfloat16)
            return [self.same(received, inputs[1])]
        received = self.communicator.recv(torch.Size((4, 3)), torch.bfloat16, 0)
        self.communicator.send(inputs[1], 0)
        return [self.same(received, inputs[0].t().contiguous())]

    def check_batched_messages(self) -> list[bool]:
        """Both ranks send first, and a megabyte, which no buffer takes."""
        inputs, target = self.both("float32", (512, 513)), torch.zeros(513, 512).t()
        operations = [
            self.dist.P2POp(self.dist.isend, inputs[self.rank], group=self.group, group_peer=self.other),
            self.dist.P2POp(self.dist.irecv, target, group=self.group, group_peer=self.other),
        ]
        self.communicator.batch_isend_irecv(operations)
        return [self.same(target, inputs[self.other])]

    def check_broadcast_into_a_strided_tensor(self) -> bool:
        inputs = self.both("float32", (4, 4))
        target = inputs[self.rank].clone().t()
        result = self.communicator.broadcast(target, 0)
        return result is target and self.same(target, inputs[0].t())

    def check_experts_without_a_manager_are_left_alone(self) -> list[bool]:
        hidden, weights, ids = (torch.ones(2, 2) for _ in range(3))
        c, extra = self.communicator, [torch.ones(1)]
        output = torch.empty(2, 2)
        return [
            all(a is b for a, b in zip(c.dispatch(hidden, weights, ids), (hidden, weights, ids), strict=True)),
            c.dispatch_router_logits(hidden, weights, False, extra)[2] is extra,
            c.combine(hidden) is hidden,
            self.same(c.combine_into_output(hidden, output), hidden),
            c.get_symmetric_memory_buffer("x", (1,), torch.float32, torch.device("cpu")) is None,
            c.allocate_combine_input((1,), torch.float32, torch.device("cpu")) is None,
        ]

    def check_mistakes(self) -> dict[str, str]:
        c, two = self.communicator, torch.ones(2, 2)
        return {
            "fp8": self.error(c.all_reduce, two.to(torch.float8_e4m3fn)),
            "int16": self.error(c.reduce_scatter, two.to(torch.int16), 0),
            "dim": self.error(c.all_gather, two, 2),
            "negative dim": self.error(c.gather, two, 0, -3),
            "gatherv dim": self.error(c.all_gatherv, two, 1),
            "sizes": self.error(c.all_gatherv, two, 0, [2]),
            "own size": self.error(c.all_gatherv, two, 0, [1, 1]),
            "shares": self.error(c.reduce_scatter, torch.ones(3, 2), 0),
            "uneven shares": self.error(c.reduce_scatterv, two, 0, [2, 1]),
        }

    def check_two_groups_and_the_class_for_graphs(self) -> list[bool]:
        from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

        second = self.make("FlagCXCudaCommunicator", "ep:0")
        inputs = self.both("float32")
        results = [c.all_reduce(inputs[self.rank]) for c in (second, self.communicator, second)]
        second.checkpoint_prepare()
        second.checkpoint_restore()
        second.suspend()
        second.resume()
        nothing = (second.custom_all_gather(inputs[0]), second.custom_reduce_scatter(inputs[0]), second.ca_comm)
        second.destroy()
        second.destroy()
        found = [self.same(result, inputs[0] + inputs[1]) for result in results]
        return [*found, isinstance(second, CudaCommunicator), nothing == (None, None, None)]

    def check_expert_parallelism_that_needs_another_library(self) -> str:
        self.communicator.use_all2all, self.communicator.all2all_backend = True, "deepep_low_latency"
        try:
            return self.error(self.communicator._connect_experts, None)
        finally:
            self.communicator.use_all2all = False

    def check_zz_custom_kernels(self) -> dict[str, Any]:
        """Last: in a process the switch is read once."""
        found: dict[str, Any] = {}
        for case, (folder, fault) in {
            "agreed": ("custom", ""),
            "refused by one rank": ("custom again", "flagcxDevCommCreate 1 error=9"),
        }.items():
            found[case] = self.with_custom(self.folders[folder], fault)
        return found

    def with_custom(self, folder: str, fault_text: str) -> dict[str, Any]:
        from comm_support import count, fault

        from vllm_fl.config import reset_settings
        from vllm_fl_comm import agreement, flagcx

        os.environ |= {"FLAGCX_PATH": folder, "VLLM_FL_COMM_CUSTOM_MAX_BYTES": "64KiB"}
        os.environ["VLLM_FL_COMM_CUSTOM_ALL_REDUCE"] = "1"
        agreement._switched_on = None
        flagcx.forget()
        reset_settings()
        library = flagcx.load()
        fault(library, fault_text)
        communicator = self.make("FlagCXCommunicator", "tp:1")
        customs, right = [], []
        for elements in (2, 3, 1 << 15, (1 << 15) + 2, 7 << 15):
            inputs = self.both("bfloat16", (elements,))
            before = count(library, "custom")
            right.append(self.same(communicator.all_reduce(inputs[self.rank]), inputs[0] + inputs[1]))
            customs.append(count(library, "custom") - before)
        decision = communicator.tensors.decision(torch.ones(2))
        communicator.destroy()
        return {"right": right, "custom": customs, "decision": [str(decision.algorithm), decision.reason]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the checks found on each rank."""
    doubles = Doubles(tmp_path_factory.mktemp("vllm"))
    folders = {
        "plain": str(doubles(12)),
        "custom": str(doubles(13, "CUSTOM")),
        "custom again": str(doubles(14, "CUSTOM")),
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=rank_main, args=(rank, port, folders, queue)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        answers = dict(queue.get(timeout=200) for _ in processes)
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    assert not [answer for answer in answers.values() if isinstance(answer, str)], answers
    return [answers[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("check", [name.removeprefix("check_") for name in vars(Checks) if name.startswith("check_")])
def test_checks(found: list[Any], check: str) -> None:
    """Those whose findings are all True; the others have tests of their own."""
    for rank in range(RANKS):
        result = found[rank][check]
        values = result.values() if isinstance(result, dict) else result if isinstance(result, list) else [result]
        if all(isinstance(value, bool) for value in values) and "any_is_true" not in check:
            assert all(values), (rank, result)


def test_bools(found: list[Any]) -> None:
    assert [r["all_reduce_of_bools_says_whether_any_is_true"] for r in found] == [[False, True, True, True]] * 2


def test_empty_tensors_have_the_right_shapes(found: list[Any]) -> None:
    shapes = [(0, 5)] * 7
    assert found[0]["empty_tensors"] == [*shapes, (0, 5)]
    assert found[1]["empty_tensors"] == [*shapes, None]


def test_messages_for_mistakes(found: list[Any]) -> None:
    reducible = "int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, and bool"
    assert found[1]["mistakes"] == {
        "fp8": f"all_reduce of torch.float8_e4m3fn: FlagCX can add up {reducible}; convert the tensor, or gather it",
        "int16": f"reduce_scatter of torch.int16: FlagCX can add up {reducible}; convert the tensor, or gather it",
        "dim": "all_gather: there is no dimension 2 in a tensor of shape (2, 2)",
        "negative dim": "gather: there is no dimension -3 in a tensor of shape (2, 2)",
        "gatherv dim": "all_gatherv along dimension 1: only dimension 0 is possible",
        "sizes": "all_gatherv: 1 sizes for 2 ranks",
        "own size": "all_gatherv: rank 1 has 2 rows, and sizes say 1 ([1, 1])",
        "shares": "reduce_scatter: 3 slices cannot be shared by 2 ranks equally",
        "uneven shares": "reduce_scatterv: sizes [2, 1] do not share 2 slices among 2 ranks",
    }
    assert found[0]["expert_parallelism_that_needs_another_library"] == (
        "--all2all-backend deepep_low_latency needs a library of its own; over FlagCX there is allgather_reducescatter"
        " and naive: pass --all2all-backend allgather_reducescatter"
    )


def test_custom_kernels_up_to_the_threshold(found: list[Any]) -> None:
    for rank in range(RANKS):
        agreed = found[rank]["zz_custom_kernels"]["agreed"]
        assert agreed["right"] == [True] * 5
        # 2 elements: yes; 3: an odd number; 64 KiB: yes; more: in two steps, past FlagCX's kernels.
        assert agreed["custom"] == [1, 0, 1, 0, 0]
        assert agreed["decision"] == ["LSA", "no multicast between the devices"]


def test_one_rank_that_cannot_keeps_all_from_the_custom_kernels(found: list[Any]) -> None:
    for rank in range(RANKS):
        refused = found[rank]["zz_custom_kernels"]["refused by one rank"]
        assert refused["right"] == [True] * 5
        assert refused["custom"] == [0] * 5
        assert refused["decision"] == ["plain", "rank 1: flagcxDevCommCreate returned 9"]
