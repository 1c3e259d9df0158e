"""Step 1: the backend, one method for each operator that it has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm_fl.dispatch import Availability
from vllm_fl.dispatch.backends.base import Backend
from vllm_fl.testing import reference_based

if TYPE_CHECKING:
    from torch import Tensor


class AcmeBackend(Backend):
    """Methods have the names and the signatures of the catalogue's operators, and import what they need."""

    @property
    def name(self) -> str:
        return "acme"

    @property
    def vendor(self) -> str:
        return "acme"

    def is_available(self) -> bool:
        """Whether this process can run the operators. Once they need your library, ask for it here."""
        return True

    def has_triton(self) -> bool | Availability:
        """Whether kernels in Triton can run: there is a driver that finds a device, or the interpreter is asked for."""
        from importlib.util import find_spec

        if find_spec("triton") is None:
            return Availability(False, "Triton is not installed; pip install triton")
        from triton.backends import backends

        if os.environ.get("TRITON_INTERPRET") == "1" or any(b.driver.is_active() for b in backends.values()):
            return True
        return Availability(False, "no Triton driver finds a device (TRITON_INTERPRET=1 runs the kernels without one)")

    def silu_and_mul(self, x: Tensor) -> Tensor:
        from .impl.activation import silu_and_mul_acme

        return silu_and_mul_acme(x)

    @reference_based
    def rms_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        from .impl.normalization import rms_norm_acme

        return rms_norm_acme(x, residual, weight, epsilon)

    @reference_based
    def rotary_embedding(
        self, query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
    ) -> tuple[Tensor, Tensor] | Tensor:
        from .impl.rotary import rotary_embedding_acme

        return rotary_embedding_acme(query, key, cos, sin, position_ids, is_neox_style)

    @reference_based
    def attention_backend(self) -> str:
        return "vllm_fl_acme.impl.attention:AcmeAttentionBackend"
