"""What this distribution declares to vllm-fl under the entry-point group ``vllm_fl.backends``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.dispatch.parameters import Parameter
from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl
from vllm_fl.plugins import BackendPlugin

if TYPE_CHECKING:
    from vllm_fl.dispatch import OpRegistry

PLUGIN = BackendPlugin(
    name="reference",
    kind=BackendImplKind.REFERENCE,
    device_type="cpu",
    register="vllm_fl_reference.plugin:register",
    platform="vllm_fl_reference.platform.ReferencePlatform",
    fallback=True,
)
#: What suits the caches of a CPU.
_PARAMETERS = {"chunk_gated_delta_rule": (Parameter("chunk", (8, 16, 32, 64, 128), 32),)}


def register(registry: OpRegistry) -> None:
    """Register an implementation of every operator of the catalogue. Imports torch."""
    from vllm_fl.catalog import CATALOG

    from . import ops

    registry.register_many(
        [
            OpImpl(
                op_name=name,
                impl_id="reference.torch",
                kind=BackendImplKind.REFERENCE,
                fn=getattr(ops, name),
                priority=BackendPriority.REFERENCE,
                parameters=_PARAMETERS.get(name, ()),
            )
            for name in CATALOG
        ]
    )
