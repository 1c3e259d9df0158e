"""ctypes binding of FlagCX's C interface. Nothing is loaded before :func:`load`."""

from __future__ import annotations

from .abi import ITEM_BYTES, RESULTS, DataType, Reduction
from .communicator import Communicator, open_communicators
from .library import FILE_NAME, PATH_ENV, Features, Library, find, forget, load

__all__ = [
    "FILE_NAME",
    "ITEM_BYTES",
    "PATH_ENV",
    "RESULTS",
    "Communicator",
    "DataType",
    "Features",
    "Library",
    "Reduction",
    "find",
    "forget",
    "load",
    "open_communicators",
]
