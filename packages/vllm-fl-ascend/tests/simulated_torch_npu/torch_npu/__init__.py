"""A simulated torch_npu: the schemas of the real one, computed by PyTorch on the CPU, for tests without an NPU.

What the documentation of torch_npu's operators does not allow is refused: dtypes, shapes, strides, values, missing
masks. Importing this brings the operators; `take_npu_for_cpu` also brings the device to the process.
"""

from __future__ import annotations

import sys
from typing import Any

from . import simulated_activation, simulated_attention, simulated_moe
from .simulated_device import npu, take_npu_for_cpu
from .simulated_registry import register

__version__ = "2.13.0+simulated"
__all__ = ["npu", "take_npu_for_cpu"]


def npu_fusion_attention(*args: Any, **kwargs: Any) -> Any:
    """Transformers imports it where there is a torch_npu."""
    raise RuntimeError("simulated torch_npu: npu_fusion_attention: it is not simulated")


# Only now do the implementations have names under torch.ops.
register(simulated_activation, simulated_attention, simulated_moe)
sys.modules[f"{__name__}.npu"] = npu
