"""The argument of type ``flagcxStream_t``: a pointer to a struct that holds nothing but the vendor's stream."""

from __future__ import annotations

import ctypes

# One box for each stream for as long as the process lives: FlagCX keeps no copy, and there are few streams.
_boxes: dict[int, ctypes.c_void_p] = {}
_addresses: dict[int, int] = {}


def stream_box(raw_stream: int) -> int:
    """Address of the box of a raw stream (0: the default stream); the same at every call."""
    address = _addresses.get(raw_stream)
    if address is None:
        box = _boxes.setdefault(raw_stream, ctypes.c_void_p(raw_stream))
        address = _addresses[raw_stream] = ctypes.addressof(box)
    return address
