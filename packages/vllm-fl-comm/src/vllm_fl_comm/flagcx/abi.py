"""The C interface of FlagCX 0.9 to 0.13 and its main branch, as far as it is used here.

Written from FlagCX's public headers: enumeration values, the 256-byte id and the homogeneous collectives are the same
in all of these releases; what differs is told apart by symbol (:class:`vllm_fl_comm.flagcx.library.Features`). The
library's version is no help, ``flagcxGetVersion`` answers 10000 in every release.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

UNIQUE_ID_BYTES = 256


class DataType(IntEnum):
    """``flagcxDataType_t``. There is no bool and no 8-bit float: they travel as UINT8 and are never reduced."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9


#: Bytes of one element.
ITEM_BYTES: Mapping[DataType, int] = MappingProxyType(
    {
        DataType.INT8: 1,
        DataType.UINT8: 1,
        DataType.INT32: 4,
        DataType.UINT32: 4,
        DataType.INT64: 8,
        DataType.UINT64: 8,
        DataType.FLOAT16: 2,
        DataType.FLOAT32: 4,
        DataType.FLOAT64: 8,
        DataType.BFLOAT16: 2,
    }
)


class Reduction(IntEnum):
    """``flagcxRedOp_t``."""

    SUM = 0
    PRODUCT = 1
    MAX = 2
    MIN = 3
    AVERAGE = 4


#: ``flagcxResult_t``: what each code means. The library's own flagcxGetErrorString knows no code.
RESULTS: Mapping[int, str] = MappingProxyType(
    {
        0: "success",
        1: "unhandled device error",
        2: "system error",
        3: "internal error",
        4: "invalid argument",
        5: "invalid usage",
        6: "remote error: a peer has failed or ended",
        7: "in progress",
        8: "unhandled error of the vendor's library",
        9: "not supported",
    }
)

SUCCESS, IN_PROGRESS = 0, 7


class UniqueId(ctypes.Structure):
    """``flagcxUniqueId``: what the ranks of one communicator have in common."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class DeviceCommRequirements(ctypes.Structure):
    """``flagcxDevCommRequirements``, 40 bytes."""

    _fields_ = (
        ("intra_multicast", ctypes.c_bool),
        ("barrier_count", ctypes.c_int),
        ("intra_barrier_count", ctypes.c_int),
        ("inter_barrier_count", ctypes.c_int),
        ("intra_lla2a_block_count", ctypes.c_int),
        ("intra_lla2a_slot_count", ctypes.c_int),
        ("inter_force_enable", ctypes.c_bool),
        ("inter_context_count", ctypes.c_int),
        ("inter_signal_count", ctypes.c_int),
        ("inter_counter_count", ctypes.c_int),
    )


class Prototype(NamedTuple):
    """Argument types of a function that returns ``flagcxResult_t``; optional ones may be missing from a library."""

    arguments: tuple[type, ...]
    optional: bool = False


_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_OUT, _INT_OUT = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)

# Pointers to tensors, communicators and streams are passed as plain addresses: the cheapest for ctypes to convert.
PROTOTYPES: Mapping[str, Prototype] = MappingProxyType(
    {
        # Both forms take one pointer; Library.unique_id knows what it points to.
        "flagcxGetUniqueId": Prototype((_P,)),
        "flagcxCommInitRank": Prototype((_OUT, _I, ctypes.POINTER(UniqueId), _I)),
        "flagcxCommDestroy": Prototype((_P,)),
        "flagcxCommAbort": Prototype((_P,), optional=True),
        "flagcxCommCount": Prototype((_P, _INT_OUT)),
        "flagcxCommUserRank": Prototype((_P, _INT_OUT)),
        "flagcxIsHomoComm": Prototype((_P, _INT_OUT), optional=True),
        "flagcxCommGetAsyncError": Prototype((_P, _INT_OUT), optional=True),
        "flagcxAllReduce": Prototype((_P, _P, _N, _I, _I, _P, _P)),
        "flagcxReduce": Prototype((_P, _P, _N, _I, _I, _I, _P, _P)),
        "flagcxReduceScatter": Prototype((_P, _P, _N, _I, _I, _P, _P)),
        "flagcxAllGather": Prototype((_P, _P, _N, _I, _P, _P)),
        "flagcxBroadcast": Prototype((_P, _P, _N, _I, _I, _P, _P)),
        "flagcxGather": Prototype((_P, _P, _N, _I, _I, _P, _P)),
        "flagcxSend": Prototype((_P, _N, _I, _I, _P, _P)),
        "flagcxRecv": Prototype((_P, _N, _I, _I, _P, _P)),
        "flagcxGroupStart": Prototype((_P,)),
        "flagcxGroupEnd": Prototype((_P,)),
        "flagcxDeviceHandleInit": Prototype((_OUT,), optional=True),
        "flagcxDevCommCreate": Prototype((_P, ctypes.POINTER(DeviceCommRequirements), _OUT), optional=True),
        "flagcxDevCommDestroy": Prototype((_P, _P), optional=True),
    }
)
