"""The products with LoRA adapters (Hu et al., 2021) in PyTorch, for any mixture of requests with and without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

__all__ = ["GroupedLoRA"]

#: (adapter's place in the stacked weights, rows of the batch that it is for)
Groups = list[tuple[int, Tensor]]


class GroupedLoRA(PunicaWrapperCPU):
    """Multiplies the tokens of each adapter with its weights, and leaves tokens without an adapter alone.

    The class of vLLM that it extends takes the last adapter for these tokens where others of the batch have one, and
    copies the weights once for every token.

    Weights are stacked, [adapters, 1, outputs, inputs]; products are in float32.
    """

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Note which tokens of the next step, and which rows of its logits, belong to which adapter."""
        super().update_metadata(*args, **kwargs)
        self._tokens = _rows_by_adapter(self.token_lora_indices)
        self._samples = _rows_by_adapter(self.sampler_indices)

    def add_shrink(
        self, y: Sequence[Tensor] | Tensor, x: Tensor, lora_a_stacked: Sequence[Tensor], scale: float, **kwargs: Any
    ) -> None:
        """``y[i] = scale * x A_i^T``; y[i]: [tokens, rank], float32, and zero before."""
        x = x.view(-1, x.shape[-1])
        for output, weights in zip(y, lora_a_stacked, strict=True):
            _add_products(output, x, weights, self._tokens, scale)

    def add_expand(
        self,
        y: Tensor,
        x: Sequence[Tensor] | Tensor,
        lora_b_stacked: Sequence[Tensor],
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """``y += x[i] B_i^T`` in the i-th slice of y's columns. `add_inputs` is true in every call of vLLM's."""
        y = y.view(-1, y.shape[-1])
        for rows, weights, width in zip(x, lora_b_stacked, output_slices, strict=True):
            _add_products(y[:, offset_start : offset_start + width], rows, weights, self._tokens)
            offset_start += width

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """``y += x B^T``; x: the rows of A that the tokens have picked."""
        _add_products(y, x, lora_b_stacked, self._tokens)

    def add_lora_logits(
        self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
    ) -> None:
        """``y += scale * x A^T B^T`` for the rows that are sampled from."""
        x = x.view(-1, x.shape[-1])
        inner = x.new_zeros(len(x), lora_b_stacked.shape[-1], dtype=torch.float32)
        _add_products(inner, x, lora_a_stacked, self._samples, scale)
        _add_products(y.view(-1, y.shape[-1]), inner, lora_b_stacked, self._samples)


def _rows_by_adapter(indices: Tensor) -> Groups:
    return [(place, (indices == place).nonzero().squeeze(1)) for place in indices.unique().tolist() if place >= 0]


def _add_products(y: Tensor, x: Tensor, stacked: Tensor, groups: Groups, scale: float = 1.0) -> None:
    """Add ``scale * x W^T`` to the rows of each group; W may have fewer outputs than y has columns, or more."""
    width = min(y.shape[-1], stacked.shape[-2])
    for place, rows in groups:
        weight = stacked[place].view(stacked.shape[-2:])[:width]
        product = torch.nn.functional.linear(x[rows].float(), weight.float())
        y[:, :width].index_add_(0, rows, product.to(y.dtype), alpha=scale)
