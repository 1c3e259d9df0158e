"""The short causal convolution of gated delta networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ._dtypes import compute_dtype

#: Elsewhere PyTorch convolves bfloat16 by other means, which may add in bfloat16.
_BFLOAT16_CONVOLUTION = torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
    past the last sequence give zeros. Nothing waits for the device.
    """
    _check_activation(activation)
    (tokens, channels), past, sequences = x.shape, weight.shape[1] - 1, cache_indices.shape[0]
    if tokens == 0 or sequences == 0:
        return x.new_zeros(x.shape)
    padding = cache_indices <= 0
    slots = cache_indices.clamp(min=0).to(torch.int64)
    states = conv_states.transpose(1, 2)[:, :past]
    old = states.index_select(0, slots)  # [N, W - 1, C]

    starts = query_start_loc.to(torch.int64)
    token = torch.arange(tokens, device=x.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), token, right=True)  # `sequences` past the last one
    first = starts + torch.arange(sequences + 1, device=x.device) * past  # row of each sequence's earlier inputs
    window = torch.arange(past, device=x.device)
    rows = x.new_empty((tokens + (sequences + 1) * past, channels))
    initial = _initial_inputs(old, has_initial_state).to(x.dtype)
    rows.index_copy_(0, (first[:-1, None] + window).flatten(), initial.flatten(0, 1))
    rows.index_copy_(0, token + (sequence + 1) * past, x)

    out = _depthwise(rows, weight, bias)
    out = _activate(out.index_select(0, token + sequence * past) if sequences > 1 else out[:tokens], activation)
    dropped = functional.pad(padding, (0, 1), value=True)[sequence]
    if torch.compiler.is_compiling() or x.device.type != "cpu" or bool(dropped.any()):
        out.masked_fill_(dropped.unsqueeze(1), 0)

    new = rows[first[1:, None] - past + window].to(old.dtype)
    kept = padding | (starts[1:] == starts[:-1])
    states.index_copy_(0, slots, torch.where(kept[:, None, None], old, new))
    return out.to(x.dtype).contiguous()


def _initial_inputs(old: Tensor, has_initial_state: Tensor | None) -> Tensor:
    if has_initial_state is None:
        return torch.zeros_like(old)
    return old.masked_fill(~has_initial_state[:, None, None], 0)


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
    slots = cache_indices.clamp(min=0).to(torch.int64)
    states = conv_states.transpose(1, 2)[:, : weight.shape[1] - 1]
    old = states.index_select(0, slots)
    inputs = torch.cat((old.to(x.dtype), x.unsqueeze(1)), 1)  # [N, W, C]
    out = _activate(_sum_of_taps(inputs.unbind(1), weight, bias), activation)
    new = inputs[:, 1:].to(old.dtype)
    if torch.compiler.is_compiling() or x.device.type != "cpu" or int(cache_indices.min()) <= 0:
        # A padded row writes what its slot holds already, so that no row has to be dropped.
        padding = (cache_indices <= 0).unsqueeze(1)
        out.masked_fill_(padding, 0)
        new = torch.where(padding.unsqueeze(2), old, new)
    states.index_copy_(0, slots, new)
    return out.to(x.dtype)


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[L, C] to [L - W + 1, C], in a dtype at least as wide as that of `x`; sums are float32 or wider."""
    return (_depthwise_as_image if x.device.type == "cpu" else _depthwise_by_taps)(x, weight, bias)


def _depthwise_as_image(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As a convolution of an image of height 1 whose channels are innermost: oneDNN's fast layout, and that of `x`."""
    dtype = x.dtype if x.dtype == torch.bfloat16 and _BFLOAT16_CONVOLUTION else compute_dtype(x.dtype)
    length, channels = x.shape
    image = x.to(dtype).view(1, 1, length, channels).permute(0, 3, 1, 2)
    kernel = weight.to(dtype).reshape(channels, 1, 1, -1)
    out = functional.conv2d(image, kernel, None if bias is None else bias.to(dtype), groups=channels)
    return out[0, :, 0].t()


def _depthwise_by_taps(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    width = weight.shape[1]
    return _sum_of_taps([x[tap : x.shape[0] - width + 1 + tap] for tap in range(width)], weight, bias)


def _sum_of_taps(inputs: Sequence[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """``sum_w inputs[w] * weight[:, w] + bias``, for inputs of [..., C], in float32 or wider."""
    taps = weight.t().to(compute_dtype(inputs[0].dtype))
    out = inputs[0] * taps[0]
    for x, tap in zip(inputs[1:], taps[1:], strict=True):
        out.addcmul_(x, tap)
    return out if bias is None else out.add_(bias)


def _activate(x: Tensor, activation: str | None) -> Tensor:
    return x if activation is None else functional.silu(x, inplace=True)


def _check_activation(activation: str | None) -> None:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(
            f"causal_conv1d: activation {activation!r} is not implemented; it must be 'silu', 'swish' or None"
        )
