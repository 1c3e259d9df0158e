"""Which algorithm serves an all-reduce: FlagCX's custom kernels or the plain collective. A pure function.

FlagCX (0.12 and later) has kernels of its own for all-reduce. The rules are those of its source: what a call must
satisfy, up to 8 MiB, and which kernel then runs. FlagCX applies them on every rank for itself, and ranks that come to
different answers wait for one another for ever; so they are stated here once, decided from what all ranks have in
common, and what FlagCX would not do alike on every rank never reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .flagcx.abi import ITEM_BYTES, DataType, Reduction

__all__ = ["CUSTOM_BYTES_LIMIT", "Algorithm", "Call", "Decision", "Site", "Thresholds", "decide", "site_refusal"]

KIB, MIB = 1 << 10, 1 << 20

#: FlagCX's staging buffer: no larger message goes through its kernels.
CUSTOM_BYTES_LIMIT = 8 * MIB
#: Compute capability from which FlagCX's multicast kernels have a body; below they would do nothing.
MULTICAST_CAPABILITY = (9, 0)

NOT_CAPTURABLE = (
    "an operation between devices of several vendors waits on the host and cannot be captured into a graph; remedy:"
    " --enforce-eager"
)

_SMALL = (DataType.FLOAT16, DataType.BFLOAT16)
_FLOATS = (*_SMALL, DataType.FLOAT32, DataType.FLOAT64)


class Algorithm(str, Enum):
    """How an all-reduce is done."""

    LOCAL_MULTIMEM = "local multimem"  #: each rank reduces everything through multicast loads
    INTERLEAVED_MULTIMEM = "interleaved multimem"  #: each rank reduces its share and stores it through multicast
    LSA = "LSA"  #: each rank loads from every peer
    PLAIN = "plain"  #: the vendor's library

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Thresholds:
    """Message sizes in bytes.

    Args:
        custom: largest message for the custom kernels; at most :data:`CUSTOM_BYTES_LIMIT`. To be tuned.
        local_up_to_4: below it the local kernel runs on up to 4 ranks; compiled into FlagCX.
        local_up_to_8: the same on 5 to 8 ranks.
    """

    custom: int = CUSTOM_BYTES_LIMIT
    local_up_to_4: int = 512 * KIB
    local_up_to_8: int = 256 * KIB

    def __post_init__(self) -> None:
        if not 0 <= self.custom <= CUSTOM_BYTES_LIMIT:
            raise ValueError(f"Thresholds: custom {self.custom} is not between 0 and {CUSTOM_BYTES_LIMIT} bytes")


@dataclass(frozen=True)
class Site:
    """What all ranks of a group have in common, agreed when the group is made.

    Args:
        ranks: in the group.
        refusal: why no rank uses the custom kernels; None if all can.
        multicast: the devices have NVLink multicast.
        multicast_allowed: it may be used (``NCCL_NVLS_ENABLE`` is not 0).
        capability: the least compute capability of the devices; None if unknown.
        homogeneous: all devices are of one vendor.
    """

    ranks: int
    refusal: str | None = None
    multicast: bool = False
    multicast_allowed: bool = True
    capability: tuple[int, int] | None = None
    homogeneous: bool = True


@dataclass(frozen=True)
class Call:
    """One all-reduce.

    Args:
        count: elements.
        dtype: of an element.
        op: the reduction.
        alignment: largest power of two that divides the address of the output.
        capturing: it is being captured into a graph.
    """

    count: int
    dtype: DataType
    op: Reduction = Reduction.SUM
    alignment: int = 16
    capturing: bool = False

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Decision:
    """The algorithm, and why that one."""

    algorithm: Algorithm
    reason: str

    @property
    def is_custom(self) -> bool:
        return self.algorithm is not Algorithm.PLAIN


def decide(call: Call, site: Site, thresholds: Thresholds | None = None) -> Decision:
    """The algorithm that serves `call` on every rank of `site`.

    Raises:
        ValueError: the call cannot be made at all: capture into a graph between devices of several vendors.
    """
    limits = thresholds or Thresholds()
    if call.capturing and not site.homogeneous:
        raise ValueError(NOT_CAPTURABLE)
    refusal = site_refusal(site) or _call_refusal(call, limits)
    if refusal is not None:
        return Decision(Algorithm.PLAIN, refusal)
    if not site.multicast:
        return Decision(Algorithm.LSA, "no multicast between the devices")
    below = _local_below(site.ranks, limits)
    if call.nbytes < below:
        return Decision(Algorithm.LOCAL_MULTIMEM, f"less than {below} bytes on {site.ranks} ranks")
    return Decision(Algorithm.INTERLEAVED_MULTIMEM, f"at least {below} bytes on {site.ranks} ranks")


def _local_below(ranks: int, limits: Thresholds) -> int:
    if ranks <= 4:
        return limits.local_up_to_4
    return limits.local_up_to_8 if ranks <= 8 else 0


def site_refusal(site: Site) -> str | None:
    """Why no call on `site` takes the custom kernels; None if one may."""
    if site.refusal is not None:
        return site.refusal
    if site.ranks < 2:
        return "one rank has nothing to reduce"
    if not site.homogeneous:
        return "the devices are of several vendors"
    if site.multicast and not site.multicast_allowed:
        return "NCCL_NVLS_ENABLE=0 forbids NVLink multicast, which FlagCX's kernels use wherever the devices have it"
    if site.multicast and site.capability is not None and site.capability < MULTICAST_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (site.capability, MULTICAST_CAPABILITY))
        return f"FlagCX's multicast kernels are empty below compute capability {need}, and the devices have {have}"
    return None


def _call_refusal(call: Call, limits: Thresholds) -> str | None:
    if call.dtype not in _FLOATS:
        return f"{call.dtype.name} is not a floating-point type"
    if call.op is not Reduction.SUM and not (call.op in (Reduction.MIN, Reduction.MAX) and call.dtype in _SMALL):
        return f"no kernel for {call.op.name} of {call.dtype.name}"
    if call.dtype in _SMALL and call.count % 2:
        return f"an odd number of elements of {call.dtype.name}"
    needed = 8 if call.dtype is DataType.FLOAT64 else 4
    if call.alignment < needed:
        return f"the output is aligned to {call.alignment} bytes, and {needed} are needed"
    if call.nbytes == 0:
        return "nothing to reduce"
    if call.nbytes > limits.custom:
        return f"more than {limits.custom} bytes"
    return None
