"""The vocabulary of dispatch: kinds, priorities, implementations, tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from vllm_fl.errors import ConfigError, did_you_mean, nearest

from .parameters import Bucket, Parameter, check_declaration


class BackendImplKind(str, Enum):
    """Who provides an implementation."""

    DEFAULT = "flagos"  #: FlagGems and this project's own Triton kernels
    VENDOR = "vendor"  #: the chip maker's
    REFERENCE = "reference"  #: PyTorch, on any device

    def __str__(self) -> str:
        return self.value


class BackendPriority:
    """Default priority of each kind; higher wins where the policy names no order."""

    DEFAULT = 150
    VENDOR = 100
    REFERENCE = 50


@dataclass(frozen=True)
class Availability:
    """Whether this process can run an implementation at all, and if not, why."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


AVAILABLE = Availability(True)


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one operator.

    Args:
        op_name: the operator, e.g. ``rms_norm``.
        impl_id: unique among the operator's implementations, e.g. ``vendor.acme``.
        kind: who provides it.
        fn: the callable; its signature is the operator's (see :mod:`vllm_fl.catalog`). An attribute
            ``fn._is_available`` (no arguments, returns a bool or an :class:`Availability`), or the method
            ``is_available`` of the object that `fn` is bound to, says whether this process can run it; it is
            asked once per registry generation, never per call.
        vendor: the vendor's name; required for kind VENDOR.
        priority: higher is tried first among implementations that the same token matches.
        supported_dtypes: dtypes of the first tensor argument that it accepts, as torch dtypes or their
            names (``"bfloat16"``); None accepts all.
        min_arch: smallest device capability as ``major * 10 + minor`` (90 for Hopper); None accepts all.
        supports: called with the operator's arguments: True, or False or a reason (str) why they do not fit. The
            answer is remembered for those conditions: dtypes, devices, shapes and strides of the tensors, values
            of the other arguments. It must depend on nothing else and write nothing.
        opaque: torch.compile must not trace ``fn``; it is put behind a ``torch.library`` operator.
        parameters: tunable keyword arguments of ``fn`` beyond the operator's, with their allowed values.
        buckets: ranges of the number of tokens (the first dimension of the first tensor argument) in which the
            parameters may have different values; for opaque implementations only.

    Raises:
        ValueError: a vendor implementation without a vendor, an empty name, or parameters or buckets that contradict
            themselves.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any]
    vendor: str | None = None
    priority: int = 0
    supported_dtypes: frozenset[Any] | None = None
    min_arch: int | None = None
    supports: Callable[..., bool | str] | None = None
    opaque: bool = False
    parameters: tuple[Parameter, ...] = ()
    buckets: tuple[Bucket, ...] = ()

    def __post_init__(self) -> None:
        if not self.op_name or not self.impl_id:
            raise ValueError(f"OpImpl needs an op_name and an impl_id, got {self.op_name!r} and {self.impl_id!r}")
        if self.kind is BackendImplKind.VENDOR and not self.vendor:
            raise ValueError(f"{self.op_name}: implementation {self.impl_id!r} is of kind vendor but names no vendor")
        if self.supported_dtypes is not None:
            object.__setattr__(self, "supported_dtypes", frozenset(self.supported_dtypes))
        object.__setattr__(self, "parameters", tuple(self.parameters))
        object.__setattr__(self, "buckets", tuple(self.buckets))
        try:
            check_declaration(self.parameters, self.buckets, self.opaque)
        except ValueError as error:
            raise ValueError(f"{self.op_name}: implementation {self.impl_id!r}: {error}") from None

    def availability(self) -> Availability:
        """Ask :attr:`probe`; an exception means no, with the exception as the reason."""
        probe = self.probe
        if probe is None:
            return AVAILABLE
        try:
            answer = probe()
        except Exception as error:  # a vendor's probe may fail in any way; the reason is kept
            return Availability(False, f"availability check raised {type(error).__name__}: {error}")
        if isinstance(answer, Availability):
            return answer
        return AVAILABLE if answer else Availability(False, "its availability check says no")

    @property
    def probe(self) -> Callable[[], Any] | None:
        """``fn._is_available``; of a backend's bound method that has none, the backend's ``is_available``."""
        probe: Callable[[], Any] | None = getattr(self.fn, "_is_available", None)
        return probe or getattr(getattr(self.fn, "__self__", None), "is_available", None)

    def is_available(self) -> bool:
        return self.availability().ok


def dtype_name(dtype: Any) -> str:
    """``"bfloat16"`` for ``torch.bfloat16`` and for ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


class Token(NamedTuple):
    """One entry of a token order: a kind, a vendor or an implementation."""

    kind: str  #: "flagos", "reference", "vendor" or "impl"
    name: str | None = None  #: the vendor's name or the impl_id

    def __str__(self) -> str:
        return self.kind if self.name is None else f"{self.kind}:{self.name}"

    def matches(self, impl: OpImpl) -> bool:
        if self.kind == "impl":
            return impl.impl_id == self.name
        return impl.kind.value == self.kind and self.name in (None, impl.vendor)


#: What a token may be, for messages.
TOKEN_FORMS = "flagos, reference, vendor, vendor:NAME, impl:ID"
_KINDS = ("flagos", "reference", "vendor")
_PREFIXES = ("vendor", "impl")


def parse_token(token: str) -> Token:
    """The :class:`Token` of ``flagos``, ``reference``, ``vendor``, ``vendor:NAME`` or ``impl:ID``.

    Raises:
        ConfigError: `token` has none of these forms; the message names the nearest. Whether the vendor or the
            implementation exists is not asked.
    """
    prefix, colon, name = token.partition(":") if isinstance(token, str) else ("", "", "")
    if not colon and prefix in _KINDS:
        return Token(prefix)
    if prefix in _PREFIXES and name:
        return Token(prefix, name)
    hint = ""
    if not colon:
        hint = did_you_mean(prefix, _KINDS)
    elif name and (near := nearest(prefix, _PREFIXES)):
        hint = f"; did you mean {f'{near}:{name}'!r}?"
    raise ConfigError(f"{token!r} is not a token ({TOKEN_FORMS}){hint}")


def match_token(impl: OpImpl, token: str) -> bool:
    """Whether `token` names `impl`.

    Raises:
        ConfigError: `token` is not a token.
    """
    return parse_token(token).matches(impl)
