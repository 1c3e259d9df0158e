"""The operator catalogue: every hardware-dependent operator that vLLM's models need, as an :class:`OpSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from . import activation, attention, gdn, moe, normalization, quantization, rotary, sampling
from .spec import DEFAULT_TOLERANCES, Case, InputMaker, OpSpec, operator

_MODULES = (activation, normalization, rotary, attention, moe, gdn, sampling, quantization)

#: name -> specification, in the order of the documentation.
CATALOG: Mapping[str, OpSpec] = MappingProxyType(
    {value.name: value for module in _MODULES for value in vars(module).values() if isinstance(value, OpSpec)}
)

__all__ = ["CATALOG", "DEFAULT_TOLERANCES", "Case", "InputMaker", "OpSpec", "operator"]
