"""Collectives of tensors over a FlagCX communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from .errors import CommunicationError
from .flagcx.abi import DataType, Reduction
from .flagcx.communicator import Communicator
from .policy import Call, Decision, Site, Thresholds, decide

__all__ = ["TensorCommunicator"]

#: What can be reduced -> flagcxDataType_t, as plain integers, which ctypes converts in less time than an enum's.
#: Everything else can still be moved, as bytes.
_REDUCIBLE = {
    torch.int8: int(DataType.INT8),
    torch.uint8: int(DataType.UINT8),
    torch.int32: int(DataType.INT32),
    torch.uint32: int(DataType.UINT32),
    torch.int64: int(DataType.INT64),
    torch.uint64: int(DataType.UINT64),
    torch.float16: int(DataType.FLOAT16),
    torch.float32: int(DataType.FLOAT32),
    torch.float64: int(DataType.FLOAT64),
    torch.bfloat16: int(DataType.BFLOAT16),
}
_SUM, _MAX, _BYTES = int(Reduction.SUM), int(Reduction.MAX), int(DataType.UINT8)
#: Site on which nothing but the call itself speaks against FlagCX's kernels.
_ABLE = Site(ranks=2)


class TensorCommunicator:
    """All-reduce by the policy, and every other collective, of tensors on one device.

    Results are new tensors that no rank shares and the allocator has aligned, so that no rank can decide otherwise than
    the others; inputs may be strided.

    Args:
        communicator: connected.
        stream: gives the current raw stream.
        site: what the ranks agreed on.
        thresholds: of the custom kernels.
        diverts: FlagCX was switched to its kernels in the process of at least one rank, so that it would take them
            there for every call that it finds fit.
    """

    def __init__(
        self,
        communicator: Communicator,
        stream: Callable[[], int],
        site: Site,
        thresholds: Thresholds,
        *,
        diverts: bool,
    ) -> None:
        self.communicator, self.stream = communicator, stream
        self.rank, self.size = communicator.rank, communicator.size
        self.site, self.thresholds, self.diverts = site, thresholds, diverts
        self._decisions: dict[tuple[int, int, int], bool] = {}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, of the shape and dtype of `tensor`; of bools, whether any is true."""
        dtype, op = self._reduction("all_reduce", tensor)
        source = tensor.contiguous()
        count = source.numel()
        if self.diverts and self._must_avoid(count, dtype, op):
            return self._in_two_steps(source, count, dtype, op)
        result = torch.empty_like(source)
        if count:
            self.communicator.all_reduce(source.data_ptr(), result.data_ptr(), count, dtype, op, self.stream())
        return result

    def decision(self, tensor: torch.Tensor) -> Decision:
        """How :meth:`all_reduce` of `tensor` is done, and why."""
        dtype, op = self._reduction("all_reduce", tensor)
        return decide(Call(tensor.numel(), DataType(dtype), Reduction(op)), self.site, self.thresholds)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Every rank's `tensor`, joined along `dim`."""
        dim = _dimension("all_gather", tensor, dim)
        return _join(self._gathered(tensor), tensor.shape, dim)

    def all_gather_rows(self, tensors: Sequence[torch.Tensor], sizes: list[int] | None) -> list[torch.Tensor]:
        """Every rank's rows of each tensor; `sizes[r]` rows come from rank r, by default as many as here."""
        if sizes is not None and len(sizes) != self.size:
            raise CommunicationError(f"all_gatherv: {len(sizes)} sizes for {self.size} ranks")
        plans = []
        for tensor in tensors:
            own = sizes[self.rank] if sizes is not None else tensor.shape[0]
            if tensor.shape[0] != own:
                raise CommunicationError(
                    f"all_gatherv: rank {self.rank} has {tensor.shape[0]} rows, and sizes say {own} ({sizes})"
                )
            rows = sizes if sizes is not None else [own] * self.size
            source = tensor.contiguous()
            result = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
            plans.append((source, result, rows))
        alike = sizes is None or len(set(sizes)) == 1
        with self.communicator.group() if len(plans) > 1 or not alike else nullcontext():
            for source, result, rows in plans:
                self._gather_rows(source, result, rows, alike)
        return [result for _, result, _ in plans]

    def reduce_scatter(self, tensor: torch.Tensor, dim: int, sizes: list[int] | None = None) -> torch.Tensor:
        """This rank's share of the sum over the ranks: `sizes[rank]` slices along `dim`, by default equal shares."""
        dim = _dimension("reduce_scatter", tensor, dim)
        dtype, op = self._reduction("reduce_scatter", tensor)
        source = tensor.movedim(dim, 0).contiguous()
        rows = self._shares(source.shape[0], sizes)
        result = torch.empty((rows[self.rank], *source.shape[1:]), dtype=source.dtype, device=source.device)
        width = source[0].numel() if source.shape[0] else 0
        if len(set(rows)) == 1:
            if result.numel():
                self.communicator.reduce_scatter(
                    source.data_ptr(), result.data_ptr(), result.numel(), dtype, op, self.stream()
                )
        else:
            stream, address = self.stream(), source.data_ptr()
            with self.communicator.group():
                for root, share in enumerate(rows):
                    count = share * width
                    if count:
                        self.communicator.reduce(address, result.data_ptr(), count, dtype, op, root, stream)
                    address += count * source.element_size()
        return result.movedim(0, dim).contiguous()

    def gather(self, tensor: torch.Tensor, root: int, dim: int) -> torch.Tensor | None:
        """Every rank's `tensor`, joined along `dim`, on the rank `root`; None on the others."""
        dim = _dimension("gather", tensor, dim)
        source, is_root = tensor.contiguous(), self.rank == root
        shape = (self.size, *source.shape) if is_root else (0,)
        result = torch.empty(shape, dtype=source.dtype, device=source.device)
        if source.nbytes:
            self.communicator.gather(source.data_ptr(), result.data_ptr(), source.nbytes, _BYTES, root, self.stream())
        return _join(result, tensor.shape, dim) if is_root else None

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Overwrite `tensor` with that of the rank `root`, and return it."""
        if tensor.nbytes:
            buffer = tensor.contiguous()
            address = buffer.data_ptr()
            self.communicator.broadcast(address, address, buffer.nbytes, _BYTES, root, self.stream())
            if buffer is not tensor:
                tensor.copy_(buffer)
        return tensor

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send `tensor` to the rank `peer`."""
        source = tensor.contiguous()
        if source.nbytes:
            self.communicator.send(source.data_ptr(), source.nbytes, _BYTES, peer, self.stream())

    def receive(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Overwrite the contiguous `tensor` with what the rank `peer` sends, and return it."""
        if tensor.nbytes:
            self.communicator.recv(tensor.data_ptr(), tensor.nbytes, _BYTES, peer, self.stream())
        return tensor

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Send and receive (tensor, peer) pairs, all begun together."""
        outgoing = [(tensor.contiguous(), peer) for tensor, peer in sends]
        incoming = [(tensor, tensor.contiguous(), peer) for tensor, peer in receives]
        with self.communicator.group():
            for tensor, peer in outgoing:
                self.send(tensor, peer)
            for _, buffer, peer in incoming:
                self.receive(buffer, peer)
        for tensor, buffer, _ in incoming:
            if buffer is not tensor:
                tensor.copy_(buffer)

    # --- parts ---

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.contiguous()
        result = torch.empty((self.size, *source.shape), dtype=source.dtype, device=source.device)
        if source.nbytes:
            self.communicator.all_gather(source.data_ptr(), result.data_ptr(), source.nbytes, _BYTES, self.stream())
        return result

    def _gather_rows(self, source: torch.Tensor, result: torch.Tensor, rows: list[int], alike: bool) -> None:
        stream = self.stream()
        if alike:
            if source.nbytes:
                self.communicator.all_gather(source.data_ptr(), result.data_ptr(), source.nbytes, _BYTES, stream)
            return
        row_bytes = result.nbytes // result.shape[0] if result.shape[0] else 0
        address = result.data_ptr()
        for root, count in enumerate(rows):
            if count * row_bytes:
                self.communicator.broadcast(source.data_ptr(), address, count * row_bytes, _BYTES, root, stream)
            address += count * row_bytes

    def _shares(self, rows: int, sizes: list[int] | None) -> list[int]:
        if sizes is None:
            if rows % self.size:
                raise CommunicationError(f"reduce_scatter: {rows} slices cannot be shared by {self.size} ranks equally")
            return [rows // self.size] * self.size
        if len(sizes) != self.size or sum(sizes) != rows:
            raise CommunicationError(
                f"reduce_scatterv: sizes {sizes} do not share {rows} slices among {self.size} ranks"
            )
        return sizes

    @staticmethod
    def _reduction(operation: str, tensor: torch.Tensor) -> tuple[int, int]:
        dtype = _REDUCIBLE.get(tensor.dtype)
        if dtype is not None:
            return dtype, _SUM
        if tensor.dtype == torch.bool:
            return _BYTES, _MAX
        known = ", ".join(str(entry).removeprefix("torch.") for entry in _REDUCIBLE)
        raise CommunicationError(
            f"{operation} of {tensor.dtype}: FlagCX can add up {known}, and bool; convert the tensor, or gather it"
        )

    def _must_avoid(self, count: int, dtype: int, op: int) -> bool:
        """Whether FlagCX would take its kernels, at least on one rank, where the agreement or the threshold says no."""
        key = (count, dtype, op)
        avoid = self._decisions.get(key)
        if avoid is None:
            call = Call(count, DataType(dtype), Reduction(op))
            wanted = decide(call, self.site, self.thresholds).is_custom
            avoid = self._decisions[key] = not wanted and decide(call, _ABLE).is_custom
        return avoid

    def _in_two_steps(self, source: torch.Tensor, count: int, dtype: int, op: int) -> torch.Tensor:
        """All-reduce as reduce-scatter and all-gather, which never enter FlagCX's kernels."""
        share = -(-count // self.size)
        flat = source.view(-1)
        if share * self.size != count:
            flat = torch.nn.functional.pad(flat, (0, share * self.size - count))
        part = torch.empty(share, dtype=source.dtype, device=source.device)
        whole = torch.empty(share * self.size, dtype=source.dtype, device=source.device)
        stream = self.stream()
        self.communicator.reduce_scatter(flat.data_ptr(), part.data_ptr(), share, dtype, op, stream)
        self.communicator.all_gather(part.data_ptr(), whole.data_ptr(), part.nbytes, _BYTES, stream)
        return whole[:count].view(source.shape)


def _dimension(operation: str, tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise CommunicationError(f"{operation}: there is no dimension {dim} in a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def _join(stacked: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor:
    """From (ranks, *shape) to `shape` with `dim` multiplied by the ranks."""
    joined = stacked.movedim(0, dim)
    return joined.reshape(*shape[:dim], stacked.shape[0] * shape[dim], *shape[dim + 1 :])
