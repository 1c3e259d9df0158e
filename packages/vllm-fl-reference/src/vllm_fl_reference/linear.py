"""Linear layers whose weights are kept in oneDNN's blocked layout.

``torch.nn.functional.linear`` brings a bfloat16 weight into that layout at each call. A decode step multiplies few
tokens with every weight of the model, so doing it once, when the weights are loaded, saves a third of the step.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

__all__ = ["pack_linear_layers"]

#: Dtypes for which packing pays; float32 stays with PyTorch's own product, to the last bit what it is elsewhere.
_PACKED_DTYPES = frozenset({torch.bfloat16})

#: Packed weights of this process, by handle; each as long as its layer's method lives.
_packed: dict[int, Tensor] = {}
_numbers = count()


def can_pack() -> bool:
    """Whether this build of PyTorch and this processor multiply bfloat16 matrices through oneDNN."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linear_layers(model: nn.Module) -> int:
    """Pack the weights of the unquantised linear layers and of the output head, in place of the plain ones.

    Called once the weights are loaded and processed. ``weight`` of a packed linear layer becomes its handle, a tensor
    of one integer, so that code which reads it fails instead of computing with something else.

    Returns:
        Bytes of the weights that were packed.
    """
    if not can_pack():
        return 0
    size = 0
    for module in model.modules():
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod and _fits(module):
            size += _bytes(module.weight)
            module.quant_method = method = PackedLinearMethod(module.weight.shape[0])
            module.weight = nn.Parameter(_pack(module.weight, method), requires_grad=False)
        head: Any = getattr(module, "lm_head", None)
        if type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod and _fits(head):
            size += _bytes(head.weight)
            head.quant_method = PackedHeadMethod()
            head.quant_method.handle = _pack(head.weight, head.quant_method)
    return size


def _fits(module: Any) -> bool:
    weight = module.weight
    return weight.dim() == 2 and weight.dtype in _PACKED_DTYPES and weight.device.type == "cpu" and weight.numel() > 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _pack(weight: Tensor, method: object) -> Tensor:
    """The handle of the packed weight, which is kept as long as `method` lives."""
    number = next(_numbers)
    _packed[number] = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
    weakref.finalize(method, _packed.pop, number)
    return torch.tensor([number])


def _product(x: Tensor, handle: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, _packed[handle.item()], bias, "none", [], "")
    return product


@torch.library.custom_op("vllm_fl_reference::packed_linear", mutates_args=())
def packed_linear(x: Tensor, handle: Tensor, bias: Tensor | None, width: int) -> Tensor:
    """``x W^T + bias``, for compiled graphs, which would otherwise hold the packed weight.

    Args:
        x: [..., K], bfloat16.
        handle: [1], int64: which packed weight. A tensor and not a number, so that the graphs of all layers are alike.
        bias: [width], or None.
        width: rows of the weight.
    """
    return _product(x, handle, bias)


@packed_linear.register_fake
def _(x: Tensor, handle: Tensor, bias: Tensor | None, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


class PackedLinearMethod(UnquantizedLinearMethod):
    """Stands in for vLLM's method of a layer whose ``weight`` is a handle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.compiler.is_compiling():
            product: Tensor = packed_linear(x, layer.weight, bias, self.width)
            return product
        return _product(x, layer.weight, bias)


class PackedHeadMethod(UnquantizedEmbeddingMethod):
    """The same for the output head, which keeps its plain weight: it may be the input embedding as well."""

    handle: Tensor

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _product(x, self.handle, bias)
