"""A small backend that conforms, and twelve ways in which one may not, each a function as a vendor would write it.

They are written against the operators' documentation, not against the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def silu_and_mul(x: Tensor) -> Tensor:
    d = x.shape[-1] // 2
    gate = x[..., :d].float()
    return (gate * torch.sigmoid(gate) * x[..., d:].float()).to(x.dtype).contiguous()


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    total = x.float() if residual is None else x.float() + residual.float()
    out = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        out = out * weight.float()
    out = out.to(x.dtype).contiguous()
    return out if residual is None else (out, total.to(residual.dtype).contiguous())


def rotary_embedding(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> Any:
    c, s = cos[position_ids].unsqueeze(1).float(), sin[position_ids].unsqueeze(1).float()
    results = [_rotate(x, c, s, is_neox_style) for x in (query, key) if x is not None]
    return tuple(results) if key is not None else results[0]


def _rotate(x: Tensor, c: Tensor, s: Tensor, is_neox_style: bool, sign: float = 1.0) -> Tensor:
    half = c.shape[-1]
    out = x.float().clone(memory_format=torch.contiguous_format)
    pair = (slice(0, half), slice(half, 2 * half)) if is_neox_style else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    a, b = out[..., pair[0]].clone(), out[..., pair[1]].clone()
    out[..., pair[0]], out[..., pair[1]] = a * c - sign * b * s, b * c + sign * a * s
    return out.to(x.dtype)


def apply_repetition_penalties(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    penalties = repetition_penalties.unsqueeze(1)
    scaled = torch.where(logits > 0, logits / penalties, logits * penalties)
    logits.copy_(torch.where(prompt_mask | output_mask, scaled, logits))


SOUND: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (silu_and_mul, rms_norm, rotary_embedding, apply_repetition_penalties)
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: what is wrong.
        operator: the operator.
        fn: the implementation.
        check: the check that must find it.
        words: what that check must say.
        also: checks that cannot but fail with it.
    """

    name: str
    operator: str
    fn: Callable[..., Any]
    check: str
    words: tuple[str, ...]
    also: frozenset[str]


FAULTS: list[Fault] = []


def fault(name: str, operator: str, check: str, *words: str, also: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Decorator that adds a fault."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(name, operator, fn, check, words, frozenset(also)))
        return fn

    return add


@fault("wrong epsilon", "rms_norm", "accuracy", "as if epsilon were 1e-05", "small values")
def wrong_epsilon(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    return rms_norm(x, residual, weight, 1e-5)


@fault("writes to an input", "rms_norm", "in-place", "argument 'residual' was written")
def writes_to_an_input(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    results = rms_norm(x, residual, weight, epsilon)
    if residual is not None:
        residual.add_(x)
    return results


@fault(
    "wrong dtype out",
    "silu_and_mul",
    "results",
    "has dtype torch.float32, the operator's is torch.float16",
    also=("fake",),
)
def wrong_dtype_out(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).contiguous()


@fault("fails on non-contiguous", "silu_and_mul", "strides", "raised RuntimeError", "view", also=("fake",))
def fails_on_non_contiguous(x: Tensor) -> Tensor:
    if not x.numel():
        return silu_and_mul(x)
    return silu_and_mul(x.view(-1)[None].view(x.shape))


@fault("fp16 overflow in squares", "rms_norm", "overflow", "float16, large values")
def overflow_in_squares(x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float) -> Any:
    exact = rms_norm(x, residual, weight, epsilon)
    out, total = (exact, x) if residual is None else exact
    overflow = torch.isinf(total.square()).any(-1, keepdim=True)
    out = torch.where(overflow, torch.zeros_like(out), out)  # 1 / sqrt(infinity)
    return out if residual is None else (out, total)


@fault("interleaved rotary wrong", "rotary_embedding", "accuracy", "only where is_neox_style is False")
def interleaved_rotary_wrong(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> Any:
    return rotary_embedding(query, key, cos, sin if is_neox_style else -sin, position_ids, is_neox_style)


@fault("ignores is_neox_style", "rotary_embedding", "accuracy", "as if is_neox_style were True")
def ignores_is_neox_style(
    query: Tensor, key: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor, is_neox_style: bool
) -> Any:
    return rotary_embedding(query, key, cos, sin, position_ids, True)


@fault("off by one on odd sizes", "silu_and_mul", "accuracy", "only where the last dimension is odd")
def off_by_one_on_odd_sizes(x: Tensor) -> Tensor:
    out = silu_and_mul(x)
    even = out.shape[-1] // 2 * 2
    return torch.cat((out[..., :even], torch.zeros_like(out[..., even:])), -1)


_calls = [0]


@fault("nondeterministic", "silu_and_mul", "determinism", "differs between calls")
def nondeterministic(x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return silu_and_mul(x)
    _calls[0] += 1
    return silu_and_mul(x) * (1.0 + _calls[0] % 2 * 2.0**-10)  # a rounding more or less


@fault("breaks fullgraph", "silu_and_mul", "compile", "mark it OpImpl(opaque=True)")
def breaks_fullgraph(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return silu_and_mul(x)


@torch.library.custom_op("vllm_fl_planted_faults::swiglu", mutates_args=())
def _swiglu(x: Tensor) -> Tensor:
    return silu_and_mul(x)


@_swiglu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@fault(
    "wrong fake shape", "silu_and_mul", "fake", "without data result 0 has shape [7, 128], the operator's is [7, 64]"
)
def wrong_fake_shape(x: Tensor) -> Tensor:
    return _swiglu(x)  # type: ignore[no-any-return]


@fault(
    "raises after writing",
    "apply_repetition_penalties",
    "refusal",
    "raised NotImplementedError: more than 4,000 logits after argument 'logits' was written",
)
def raises_after_writing(
    logits: Tensor, prompt_mask: Tensor, output_mask: Tensor, repetition_penalties: Tensor
) -> None:
    apply_repetition_penalties(logits, prompt_mask, output_mask, repetition_penalties)
    if logits.numel() > 4000:
        raise NotImplementedError("more than 4,000 logits")
