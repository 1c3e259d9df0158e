"""Rotary embeddings: every class of vLLM that rotates by a plain table of cosines and sines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import rotary_embedding as vllm_rotary
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding

from vllm_fl.dispatch import bind

from . import replace

_rotary_embedding = bind("rotary_embedding")


class _DispatchedRotary:
    """Mixed in before a rotary class of vLLM whose forward is a lookup in ``cos_sin_cache`` and a rotation."""

    forward_native: Any
    head_size: int
    is_neox_style: bool
    _match_cos_sin_cache_dtype: Any
    #: (table, its cosines, its sines): the halves are split once, not at each call.
    _halves: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> Any:
        if offsets is not None:
            positions = positions + offsets
        return self._rotate(positions.flatten(), query, key)

    forward_cuda = forward_oot

    def _rotate(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None) -> Any:
        cos, sin = self._cos_sin(query)
        tokens = positions.shape[0]
        q = _by_head(query, tokens, self.head_size)
        if key is None:
            out = _rotary_embedding.fn(q, None, cos, sin, positions, self.is_neox_style)
            return out.reshape(query.shape), None
        k = _by_head(key, tokens, self.head_size)
        q_out, k_out = _rotary_embedding.fn(q, k, cos, sin, positions, self.is_neox_style)
        return q_out.reshape(query.shape), k_out.reshape(key.shape)

    def _cos_sin(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._match_cos_sin_cache_dtype(query)
        if torch.compiler.is_compiling():
            cos, sin = table.chunk(2, dim=-1)
            return cos, sin
        held = self._halves
        if held is None or held[0] is not table:
            cos, sin = table.chunk(2, dim=-1)
            held = self._halves = (table, cos, sin)
        return held[1], held[2]


class _TextOnlyRotary(_DispatchedRotary):
    """For M-RoPE: 1-D positions are plain text and ours; 3-D sections stay with vLLM."""

    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> Any:
        if positions.ndim != 1 or key is None:
            return self.forward_native(positions, query, key, offsets)
        return self._rotate(positions, query, key)

    forward_cuda = forward_oot


def _by_head(x: torch.Tensor, tokens: int, head_size: int) -> torch.Tensor:
    return x if x.dim() == 3 and x.shape[0] == tokens else x.view(tokens, -1, head_size)


def plain_classes() -> Iterator[tuple[type, type]]:
    """The (vLLM class, our mixin) pairs: every loaded class that does nothing but look up and rotate.

    Found by where ``forward_native`` comes from, so that a new scaling rule of a new vLLM, which changes the table
    only, is taken along, and a class with arithmetic of its own is not.
    """
    mixins = {
        RotaryEmbedding.forward_native: _DispatchedRotary,
        DeepseekScalingRotaryEmbedding.forward_native: _DispatchedRotary,
        MRotaryEmbedding.forward_native: _TextOnlyRotary,
    }
    pending = [RotaryEmbeddingBase]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        mixin = mixins.get(cls.forward_native)
        ours = issubclass(cls, _DispatchedRotary)
        if mixin and not ours and cls.forward is CustomOp.forward and cls.__module__.startswith(vllm_rotary.__name__):
            yield cls, mixin


def register_rotary_embedding() -> None:
    for cls, mixin in plain_classes():
        replace(cls, type(f"FL{cls.__name__}", (mixin, cls), {"__doc__": cls.__doc__}), "rotary_embedding")
