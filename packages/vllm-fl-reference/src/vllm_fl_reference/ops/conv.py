"""The short causal convolution of gated delta networks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._dtypes import compute_dtype


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor | None,
    activation: str | None = "silu",
) -> Tensor:
    """Causal depthwise convolution over the tokens of each sequence of a packed batch.

    Each sequence is laid out behind its W - 1 earlier inputs, one sequence after another, and convolved in one go;
    outputs whose window touches two sequences are dropped. A sequence without tokens leaves its state alone. Tokens
    past the last sequence give zeros.
    """
    _check_activation(activation)
    (tokens, channels), past, sequences = x.shape, weight.shape[1] - 1, cache_indices.shape[0]
    if tokens == 0 or sequences == 0:
        return x.new_zeros(x.shape)
    slots = cache_indices.to(torch.int64)
    padding = slots <= 0
    slots = slots.clamp(min=0)
    starts = query_start_loc.to(torch.int64)
    token = torch.arange(tokens, device=x.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True)  # `sequences` past the last one

    states = conv_states.transpose(1, 2)[:, :past]
    old = states.index_select(0, slots)  # [N, W - 1, C]
    initial = (
        torch.zeros_like(old) if has_initial_state is None else old.masked_fill(~has_initial_state[:, None, None], 0)
    )
    padded = x.new_empty((tokens + (sequences + 1) * past, channels))
    number = torch.arange(sequences, device=x.device)
    window = torch.arange(past, device=x.device)
    padded.index_copy_(
        0, ((starts[:-1] + number * past)[:, None] + window).flatten(), initial.to(x.dtype).flatten(0, 1)
    )
    padded.index_copy_(0, token + (sequence + 1) * past, x)

    out = _depthwise(padded, weight, bias)
    out = out.index_select(0, token + sequence * past) if sequences > 1 else out[:tokens]
    out = _activate(out, activation)
    dropped = functional.pad(padding, (0, 1), value=True)[sequence]
    if torch.compiler.is_compiling() or x.device.type != "cpu" or bool(dropped.any()):
        out = out.masked_fill_(dropped.unsqueeze(1), 0)

    new = padded[(starts[1:] + number * past)[:, None] + window]
    kept = padding | (starts[1:] == starts[:-1])
    states.index_copy_(0, slots, torch.where(kept[:, None, None], old, new.to(old.dtype)))
    return out.contiguous()


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    cache_indices: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """One decode step of :func:`causal_conv1d_fn`: one token a sequence, each with a state."""
    _check_activation(activation)
    if x.shape[0] == 0:
        return x.new_zeros(x.shape)
    dtype = compute_dtype(x.dtype)
    slots = cache_indices.clamp(min=0).to(torch.int64)
    states = conv_states.transpose(1, 2)[:, : weight.shape[1] - 1]
    old = states.index_select(0, slots)
    inputs = torch.cat((old.to(x.dtype), x.unsqueeze(1)), 1)  # [N, W, C]
    taps = weight.t().to(dtype)
    out = inputs[:, 0] * taps[0]
    for tap in range(1, weight.shape[1]):
        out.addcmul_(inputs[:, tap], taps[tap])
    if bias is not None:
        out.add_(bias)
    out = _activate(out, activation)
    new = inputs[:, 1:].to(old.dtype)
    if torch.compiler.is_compiling() or x.device.type != "cpu" or int(cache_indices.min()) <= 0:
        # A padded row writes what its slot holds already, so that no row has to be dropped.
        padding = (cache_indices <= 0).unsqueeze(1)
        out.masked_fill_(padding, 0)
        new = torch.where(padding.unsqueeze(2), old, new)
    states.index_copy_(0, slots, new)
    return out.to(x.dtype)


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[L, C] to [L - W + 1, C], as a convolution of an image of height 1 whose channels are innermost: oneDNN's and
    cuDNN's fast layout, which is that of `x`."""
    length, channels = x.shape
    image = x.view(1, 1, length, channels).permute(0, 3, 1, 2)
    kernel = weight.to(x.dtype).reshape(channels, 1, 1, -1)
    out = functional.conv2d(image, kernel, None if bias is None else bias.to(x.dtype), groups=channels)
    return out[0, :, 0].t()


def _activate(x: Tensor, activation: str | None) -> Tensor:
    return x if activation is None else functional.silu(x, inplace=True)


def _check_activation(activation: str | None) -> None:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(
            f"causal_conv1d: activation {activation!r} is not implemented; it must be 'silu', 'swish' or None"
        )
