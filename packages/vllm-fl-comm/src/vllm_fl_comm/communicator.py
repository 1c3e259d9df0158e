"""vLLM's device communicator over FlagCX, for any device.

One class for the versions 0.26 to 0.33: the base class is made with those arguments that it accepts.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from vllm_fl.logging import get_logger

from . import flagcx
from .agreement import DeviceFacts, Report, agree_on_custom, agree_on_library, common_site, settle_environment
from .collectives import TensorCommunicator
from .devices import device_facts, device_selector, stream_getter, stream_outside_graphs
from .errors import CommunicationError, FlagCXLoadError
from .settings import CommSettings, comm_settings
from .watchdog import watch

__all__ = ["FlagCXCommunicator", "FlagCXMixin", "base_arguments"]

#: Ways of expert parallelism that are made of all_gatherv and reduce_scatterv, and so work over any library.
ALL2ALL_BACKENDS = ("allgather_reducescatter", "naive")
#: Barriers between the ranks of one host that FlagCX's kernels use: one for each of their thread blocks.
_KERNEL_BARRIERS = 36


def base_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Those of `given` that this version's base class takes."""
    known = inspect.signature(DeviceCommunicatorBase.__init__).parameters
    return {name: value for name, value in given.items() if name in known}


class FlagCXMixin:
    """vLLM's methods on top of a :class:`TensorCommunicator`; mixed in before a communicator class of vLLM.

    Of that class the constructor of DeviceCommunicatorBase alone is run: no other library is started.
    """

    tensors: TensorCommunicator
    unique_name: str
    ranks: list[int]
    cpu_group: Any
    world_size: int
    rank_in_group: int
    device: torch.device
    all2all_manager: Any

    def __init__(
        self,
        cpu_group: Any,
        device: torch.device | None = None,
        device_group: Any = None,
        unique_name: str = "",
        **more: Any,
    ) -> None:
        given = {"device": device, "device_group": device_group, "unique_name": unique_name, **more}
        DeviceCommunicatorBase.__init__(self, cpu_group, **base_arguments(given))
        self.connect(more.get("tcp_store_group"))

    def connect(self, tcp_store_group: Any = None) -> None:
        """Load FlagCX, agree with the other ranks on what to use, and join them. Collective.

        Raises:
            FlagCXLoadError: FlagCX cannot be loaded, here or on another rank.
            FlagCXStatusError: it could not connect the ranks.
            CommunicationError: the way of expert parallelism that is asked for needs another library.
        """
        settings = comm_settings()
        library, reports = self._report(settings)
        refusal = agree_on_custom(reports)
        switched_on = settle_environment(refusal is None)
        communicator = flagcx.Communicator(
            library,
            self.rank_in_group,
            self.world_size,
            self.unique_name,
            peers=tuple(report.peer for report in reports if report.peer.rank != self.rank_in_group),
            on_thread=device_selector(self.device),
        )
        watch(communicator, settings.timeout, asynchronous=self.device.type != "cpu")
        communicator.connect(self._shared_id(library))
        homogeneous = communicator.is_homogeneous()
        diverts = any(self._exchange(switched_on))
        if refusal is None:
            multicast = any(report.device.multicast for report in reports)
            problems = self._exchange(communicator.probe_device_communicator(multicast, _KERNEL_BARRIERS))
            refusal = next((f"rank {r}: {problem}" for r, problem in enumerate(problems) if problem), None)
        self.tensors = TensorCommunicator(
            communicator,
            (stream_getter if homogeneous else stream_outside_graphs)(self.device),
            common_site(reports, refusal, homogeneous=homogeneous),
            settings.thresholds,
            diverts=diverts,
        )
        self._connect_experts(tcp_store_group)
        if self.rank_in_group == 0:
            custom = "on" if refusal is None else f"off ({refusal})"
            get_logger(__name__).info(
                "group %r: %d ranks over FlagCX, %s; custom all-reduce %s",
                self.unique_name,
                self.world_size,
                library.path,
                custom,
            )

    def _report(self, settings: CommSettings) -> tuple[flagcx.Library, list[Report]]:
        library, error = None, None
        try:
            library = flagcx.load()
        except FlagCXLoadError as raised:
            error = str(raised)
        own = Report.here(
            self.rank_in_group,
            settings,
            error=error,
            built=library is not None and library.features.custom_all_reduce,
            device=device_facts(self.device) if settings.custom_all_reduce else DeviceFacts(),
        )
        reports: list[Report] = self._exchange(own)
        agree_on_library(reports, self.unique_name)
        assert library is not None  # or the agreement has failed
        return library, reports

    def _exchange(self, own: Any) -> list[Any]:
        """`own` of every rank, over the host's network."""
        answers: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(answers, own, group=self.cpu_group)
        return answers

    def _shared_id(self, library: flagcx.Library) -> bytes:
        identifier = [library.unique_id() if self.rank_in_group == 0 else None]
        torch.distributed.broadcast_object_list(identifier, src=self.ranks[0], group=self.cpu_group)
        assert identifier[0] is not None
        return identifier[0]

    def _connect_experts(self, tcp_store_group: Any) -> None:
        if not getattr(self, "use_all2all", False):
            return
        backend = getattr(self, "all2all_backend", None) or ALL2ALL_BACKENDS[0]
        if backend not in ALL2ALL_BACKENDS:
            raise CommunicationError(
                f"--all2all-backend {backend} needs a library of its own; over FlagCX there is"
                f" {' and '.join(ALL2ALL_BACKENDS)}: pass --all2all-backend {ALL2ALL_BACKENDS[0]}"
            )
        from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager

        self.all2all_manager = AgRsAll2AllManager(self.cpu_group, tcp_store_group)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return self.tensors.all_reduce(input_)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.tensors.all_gather(input_, dim)

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        if dim != 0:
            raise CommunicationError(f"all_gatherv along dimension {dim}: only dimension 0 is possible")
        if isinstance(input_, torch.Tensor):
            return self.tensors.all_gather_rows([input_], sizes)[0]
        return self.tensors.all_gather_rows(input_, sizes)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.tensors.reduce_scatter(input_, dim)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        return self.tensors.reduce_scatter(input_, dim, sizes)

    # vLLM 0.32 and later: results in a given tensor. FlagCX has no buffers that would be better than any other.

    def reduce_scatterv_into_output(
        self, input_: torch.Tensor, output: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        return output.copy_(self.reduce_scatterv(input_, dim, sizes))

    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return output.copy_(self.combine(hidden_states, *args, **kwargs))

    def get_symmetric_memory_buffer(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return None

    def allocate_combine_input(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return None

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        return self.tensors.gather(input_, dst, dim)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        self.tensors.send(tensor, (self.rank_in_group + 1) % self.world_size if dst is None else dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        peer = (self.rank_in_group - 1) % self.world_size if src is None else src
        return self.tensors.receive(torch.empty(size, dtype=dtype, device=self.device), peer)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return self.tensors.broadcast(tensor, src)

    def batch_isend_irecv(self, p2p_ops: list[Any]) -> None:
        sends = [(op.tensor, op.group_peer) for op in p2p_ops if op.op is torch.distributed.isend]
        receives = [(op.tensor, op.group_peer) for op in p2p_ops if op.op is torch.distributed.irecv]
        if len(sends) + len(receives) != len(p2p_ops):
            raise CommunicationError("batch_isend_irecv takes operations of isend and irecv only")
        self.tensors.exchange(sends, receives)

    def dispatch_router_logits(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._expert_parallel("dispatch_router_logits", hidden_states, *args, **kwargs)

    def dispatch(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._expert_parallel("dispatch", hidden_states, *args, **kwargs)

    def combine(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._expert_parallel("combine", hidden_states, *args, **kwargs)

    def destroy(self) -> None:
        if self.all2all_manager is not None:
            self.all2all_manager.destroy()
            self.all2all_manager = None
        self.tensors.communicator.destroy()

    def _expert_parallel(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.all2all_manager is not None:
            return getattr(self.all2all_manager, method)(*args, **kwargs)
        return getattr(DeviceCommunicatorBase, method)(self, *args, **kwargs)  # which leaves the tensors as they are


class FlagCXCommunicator(FlagCXMixin, DeviceCommunicatorBase):
    """The communicator of a group of ranks on any device whose graphs vLLM does not capture itself."""
