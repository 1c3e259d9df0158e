"""Step 3: the registration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl

if TYPE_CHECKING:
    from torch import Tensor
    from vllm_fl.dispatch import OpRegistry


def _supports_silu_and_mul(x: Tensor) -> bool | str:
    from .impl.activation import supports_silu_and_mul

    return supports_silu_and_mul(x)


#: Methods of AcmeBackend that are registered, with further fields of their OpImpl: ``opaque=True`` for a kernel that
#: torch.compile must not trace, ``supported_dtypes``, ``supports`` for what it does not take, ``parameters`` to tune.
OPERATORS: dict[str, dict[str, Any]] = {
    "silu_and_mul": {"opaque": True, "supports": _supports_silu_and_mul},
    "rms_norm": {},
    "rotary_embedding": {},
    "attention_backend": {},
}


def _bind_is_available(fn: Callable[..., Any], is_available_fn: Callable[[], Any]) -> Callable[..., Any]:
    """A function that says for itself whether it can run."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._is_available = is_available_fn  # type: ignore[attr-defined]
    return wrapper


def register_builtins(registry: OpRegistry) -> None:
    """Register every operator of this distribution."""
    from .acme import AcmeBackend

    backend = AcmeBackend()
    available = {"silu_and_mul": backend.has_triton}
    registry.register_many(
        [
            OpImpl(
                op_name=op_name,
                impl_id="vendor.acme",
                kind=BackendImplKind.VENDOR,
                fn=_bind_is_available(getattr(backend, op_name), available.get(op_name, backend.is_available)),
                vendor="acme",
                priority=BackendPriority.VENDOR,
                **options,
            )
            for op_name, options in OPERATORS.items()
        ]
    )
