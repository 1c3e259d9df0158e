"""Finds ``libflagcx.so``, loads it once a process, and binds its functions."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vllm_fl.errors import did_you_mean
from vllm_fl_comm.errors import FlagCXLoadError, FlagCXStatusError

from .abi import PROTOTYPES, RESULTS, SUCCESS, UNIQUE_ID_BYTES, UniqueId

PATH_ENV = "FLAGCX_PATH"
FILE_NAME = "libflagcx.so"

_NAME_IT = "name the folder that FlagCX was built in"
_BELOW = ("", "lib", "build/lib")
_cache: dict[str, Library | FlagCXLoadError] = {}


@dataclass(frozen=True)
class Features:
    """What a library has, told by its symbols.

    Args:
        fills_unique_id: ``flagcxGetUniqueId`` fills a struct of the caller (since 0.13); before, it allocated one.
        custom_all_reduce: FlagCX's own all-reduce kernels were built (``COMPILE_KERNEL=1``).
        abort: a communicator can be ended while one of its operations waits for a peer.
        device_communicator: what the kernels need can be asked for (``flagcxDevCommCreate``).
    """

    fills_unique_id: bool
    custom_all_reduce: bool
    abort: bool
    device_communicator: bool


class Library:
    """One loaded FlagCX.

    Args:
        path: the file; a name without a slash is looked for by the loader.

    Raises:
        FlagCXLoadError: it cannot be loaded, or is no FlagCX.
    """

    def __init__(self, path: str) -> None:
        try:
            self._dll = ctypes.CDLL(path)
        except OSError as error:
            remedy = f"rebuild FlagCX for this machine; 'ldd {path}' shows which library it lacks"
            if path == FILE_NAME:
                remedy = f"let {PATH_ENV} name the folder that FlagCX was built in"
            raise FlagCXLoadError(f"FlagCX cannot be loaded from {path}: {error}; remedy: {remedy}") from None
        self.path = path
        self.functions: dict[str, Callable[..., int]] = {}
        self._bind()
        self.features = Features(
            fills_unique_id="flagcxDeviceHandleInit" in self.functions,
            custom_all_reduce=hasattr(self._dll, "flagcxCustomAllReduceImpl"),
            abort="flagcxCommAbort" in self.functions,
            device_communicator={"flagcxDevCommCreate", "flagcxDevCommDestroy"} <= set(self.functions),
        )

    def _bind(self) -> None:
        missing = []
        for name, prototype in PROTOTYPES.items():
            function = getattr(self._dll, name, None)
            if function is None:
                missing += [] if prototype.optional else [name]
                continue
            function.argtypes, function.restype = prototype.arguments, ctypes.c_int
            self.functions[name] = function
        if missing:
            raise FlagCXLoadError(
                f"{self.path} lacks {', '.join(missing)}: it is not FlagCX, or a release that is not supported"
                f" (supported: 0.9 and later); remedy: build FlagCX 0.12 or later and let {PATH_ENV} name it"
            )

    def unique_id(self) -> bytes:
        """A new id, for the other ranks to join by.

        Raises:
            FlagCXStatusError: FlagCX could not make one.
        """
        get = self.functions["flagcxGetUniqueId"]
        if self.features.fills_unique_id:
            own = UniqueId()
            self.check(get(ctypes.addressof(own)), "flagcxGetUniqueId")
            return bytes(own)
        # Up to 0.12 the argument is a pointer to a pointer, and FlagCX allocates; it has no function to free the id.
        made = ctypes.c_void_p()
        self.check(get(ctypes.addressof(made)), "flagcxGetUniqueId")
        if not made.value:
            self.fail(4, "flagcxGetUniqueId", "it set no id")
        return ctypes.string_at(made.value, UNIQUE_ID_BYTES)

    def check(self, code: int, function: str, where: str = "") -> None:
        """Raise FlagCXStatusError unless `code` is success; `where` names group, rank and peer."""
        if code != SUCCESS:
            self.fail(code, function, where)

    def fail(self, code: int, function: str, where: str = "") -> NoReturn:
        meaning = RESULTS.get(code, "a code that FlagCX does not document")
        place = f" ({where})" if where else ""
        raise FlagCXStatusError(
            f"{function}{place} returned {code}: {meaning}; library {self.path}; FLAGCX_DEBUG=INFO makes it say more",
            function,
            code,
        )


def find(environ_path: str | None) -> str:
    """The library that FLAGCX_PATH names (a file, or a folder that has it in ``lib`` or ``build/lib``), or else the
    loader's.

    Raises:
        FlagCXLoadError: there is none; the message lists where it was looked for.
    """
    if environ_path is None:
        return FILE_NAME
    place = f"environment variable {PATH_ENV}"
    if not environ_path.strip():
        raise FlagCXLoadError(f"{place}: {environ_path!r} is empty; {_NAME_IT}, or unset it")
    root = Path(environ_path).expanduser()
    if root.is_file():
        return str(root)
    if not root.exists():
        near = did_you_mean(root.name, [entry.name for entry in root.parent.iterdir()] if root.parent.is_dir() else [])
        raise FlagCXLoadError(f"{place}: {environ_path!r} does not exist{near}; {_NAME_IT}")
    candidates = [root / below / FILE_NAME for below in _BELOW]
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    raise FlagCXLoadError(
        f"{place}: {environ_path!r} holds no {FILE_NAME} (looked for {', '.join(map(str, candidates))}); build FlagCX"
        " there (make USE_NVIDIA=1, or the flag of your vendor), or name another folder"
    )


def load() -> Library:
    """The FlagCX of this process, loaded at the first call.

    Raises:
        FlagCXLoadError: there is none, or it cannot be used. The reason is remembered and raised again.
    """
    key = os.environ.get(PATH_ENV)
    found = _cache.get(str(key))
    if found is None:
        try:
            found = Library(find(key))
        except FlagCXLoadError as error:
            found = error
        found = _cache.setdefault(str(key), found)
    if isinstance(found, FlagCXLoadError):
        raise found.with_traceback(None)
    return found


def forget() -> None:
    """Forget what was loaded, or why it was not; for tests."""
    _cache.clear()
