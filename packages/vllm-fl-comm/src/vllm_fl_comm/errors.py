"""Exceptions of the communication over FlagCX."""

from __future__ import annotations

from vllm_fl.errors import FLError

__all__ = ["CommunicationError", "FlagCXLoadError", "FlagCXStatusError", "PeerLostError"]


class CommunicationError(FLError, RuntimeError):
    """Communication cannot be set up, or was used in a way that it does not allow."""


class FlagCXLoadError(CommunicationError):
    """The FlagCX library is not there, cannot be loaded, or lacks something; the message says how to repair it."""


class FlagCXStatusError(CommunicationError):
    """A function of FlagCX returned an error.

    Args:
        message: function, group, rank, code, library and remedy.
        function: name of the C function.
        code: its ``flagcxResult_t``.
    """

    def __init__(self, message: str, function: str, code: int) -> None:
        super().__init__(message)
        self.function, self.code = function, code

    def __reduce__(self) -> tuple[type[FlagCXStatusError], tuple[str, str, int]]:
        return FlagCXStatusError, (str(self), self.function, self.code)


class PeerLostError(CommunicationError):
    """A collective did not end within the time that is allowed, or another rank's process has ended."""
