"""What flagos_moe_attention measures: inputs, each provider's call, and the right answer in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from vllm_fl.flagos.kernels import fused_moe, moe_routing, moe_sum, paged_attention

TOKENS = (1, 64, 256, 1024, 8192)
#: model -> query heads, KV heads, head size
ATTENTION = {"Qwen3-4B": (32, 8, 128), "Qwen3-Next": (16, 2, 256)}
#: requests, tokens of each in the cache
DECODES, PREFILLS = ((256, 576), (1, 700), (16, 600), (128, 4096)), ((32, 512), (4, 4096))
#: model -> experts, choices, hidden and inner size
EXPERTS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Qwen3-Next": (512, 10, 2048, 512)}
PAGE = 16
DEVICE, DTYPE = "cuda", torch.bfloat16

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is measured.

    Args:
        title: for the line.
        make: makes inputs; gives (provider -> what makes its call) and (rows of the result to check, their values).
    """

    title: str
    make: Callable[[], tuple[dict[str, Callable[[], Call]], torch.Tensor, torch.Tensor]]


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE, dtype=torch.float32) * scale).to(DTYPE)


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, device=DEVICE).to(torch.int32)


# Attention


def attention(model: str, requests: int, length: int, query_len: int) -> Case:
    heads, kv_heads, size = ATTENTION[model]

    def make() -> tuple[dict[str, Callable[[], Call]], torch.Tensor, torch.Tensor]:
        pages = -(-length // PAGE)
        cache = normal(requests * pages + 1, PAGE, kv_heads, 2 * size).transpose(1, 2)
        table = (int32(torch.randperm(requests * pages)) + 1).view(requests, pages)
        query = normal(requests * query_len, heads, size)
        common = (query, cache, table, int32([length] * requests), int32(range(0, len(query) + 1, query_len)))
        providers = {
            "flagos": lambda: our_attention(*common, query_len),
            "vllm triton": lambda: vllm_triton_attention(*common, query_len, length),
            "flash-attn 3": lambda: flash_attention(*common, query_len, length, 3),
            "flash-attn 2": lambda: flash_attention(*common, query_len, length, 2),
        }
        if query_len > 1 and size <= 128:
            providers["flagos, one loop"] = lambda: with_one_loop(our_attention(*common, query_len))
        rows = torch.arange(len(query) - query_len, len(query), device=DEVICE)
        return providers, rows, expected_attention(query[rows], cache[table[-1].long()], length)

    kind = "decode" if query_len == 1 else "prefill"
    return Case(f"attention {model} {kind} {requests}x{length}", make)


def expected_attention(query: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """Causal attention of the last request [tokens, H, D] in float64, one KV head at a time."""
    rows = blocks.transpose(1, 2).flatten(0, 1)[:length].double()  # [tokens, Hkv, 2 D]
    size = query.shape[-1]
    group = query.shape[1] // rows.shape[1]
    positions = torch.arange(length, device=DEVICE)
    hidden = positions[None] > positions[length - len(query) :, None]
    out = torch.empty(query.shape, dtype=torch.float64, device=DEVICE)
    for head in range(query.shape[1]):
        key, value = rows[:, head // group].split(size, -1)
        scores = (query[:, head].double() @ key.T * size**-0.5).masked_fill_(hidden, -torch.inf)
        out[:, head] = scores.softmax(-1) @ value
    return out


def our_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    query_len: int,
) -> Call:
    size, output = query.shape[-1], torch.empty_like(query)
    decodes = len(lengths) if query_len == 1 else 0
    caches = cache.split(size, -1)

    def call() -> torch.Tensor:
        paged_attention.paged_attention(query, *caches, table, lengths, starts, output, size**-0.5, query_len, decodes)
        return output

    return call


def with_one_loop(attend: Call) -> Call:
    """The same without a loop of its own for keys that all tokens see."""

    def call() -> torch.Tensor:
        with mock.patch.object(paged_attention, "_TWO_LOOPS", False):
            return attend()

    return call


def vllm_triton_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    query_len: int,
    length: int,
) -> Call:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    size, output = query.shape[-1], torch.empty_like(query)
    key, value = cache.transpose(1, 2).split(size, -1)
    few = 128 // key.shape[2]  # as vLLM's metadata builder sizes them
    shape = (few, query.shape[1], 16)
    arguments = {
        "q": query, "k": key, "v": value, "out": output, "cu_seqlens_q": starts, "max_seqlen_q": query_len,
        "seqused_k": lengths, "max_seqlen_k": length, "softmax_scale": size**-0.5, "causal": True,
        "window_size": (-1, -1), "block_table": table, "softcap": 0, "q_descale": None,
        "k_descale": torch.ones((), device=DEVICE).expand(len(lengths), key.shape[2]),
        "v_descale": torch.ones((), device=DEVICE).expand(len(lengths), key.shape[2]),
        "seq_threshold_3D": few, "num_par_softmax_segments": 16,
        "softmax_segm_output": torch.empty(*shape, size, device=DEVICE),
        "softmax_segm_max": torch.empty(shape, device=DEVICE),
        "softmax_segm_expsum": torch.empty(shape, device=DEVICE),
    }  # fmt: skip

    def call() -> torch.Tensor:
        unified_attention(**arguments)
        return output

    return call


def flash_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    query_len: int,
    length: int,
    version: int,
) -> Call:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    size, output = query.shape[-1], torch.empty_like(query)
    key, value = cache.transpose(1, 2).split(size, -1)

    def call() -> torch.Tensor:
        flash_attn_varlen_func(
            q=query, k=key, v=value, out=output, cu_seqlens_q=starts, max_seqlen_q=query_len, seqused_k=lengths,
            max_seqlen_k=length, softmax_scale=size**-0.5, causal=True, block_table=table, fa_version=version,
        )  # fmt: skip
        return output

    return call


# Routing


def routing(tokens: int, experts: int, topk: int) -> Case:
    def make() -> tuple[dict[str, Callable[[], Call]], torch.Tensor, torch.Tensor]:
        logits = normal(tokens, experts)

        def call(kernel: Callable[..., Any]) -> Call:
            weights = torch.empty(tokens, topk, device=DEVICE)
            ids = torch.empty(tokens, topk, device=DEVICE, dtype=torch.int32)
            order = torch.empty_like(ids)

            def run() -> torch.Tensor:
                kernel(weights, ids, order, logits, True)
                return weights

            return run

        scores = logits.double().softmax(-1).topk(topk).values
        providers = {"flagos": lambda: call(moe_routing.topk_softmax), "vllm": lambda: call(custom_op("topk_softmax"))}
        return providers, torch.arange(tokens, device=DEVICE), scores / scores.sum(-1, keepdim=True)

    return Case(f"routing softmax E={experts} k={topk} T={tokens}", make)


def grouped_routing(tokens: int) -> Case:
    groups, kept, topk, experts, factor = 8, 4, 8, 256, 2.5

    def make() -> tuple[dict[str, Callable[[], Call]], torch.Tensor, torch.Tensor]:
        logits, bias = torch.randn(tokens, experts, device=DEVICE), torch.randn(experts, device=DEVICE) * 0.1
        options = (groups, kept, topk, True, factor, bias, 1)
        providers = {
            "flagos": lambda: lambda: moe_routing.grouped_topk(logits, *options)[0],
            "vllm": lambda: partial(first_of, custom_op("grouped_topk"), logits, *options),
        }
        scores = logits.double().sigmoid()
        choice = (scores + bias).unflatten(-1, (groups, -1))
        best = choice.topk(2).values.sum(-1).topk(kept).indices
        mask = torch.ones(tokens, groups, dtype=torch.bool, device=DEVICE).scatter_(1, best, False)
        ids = choice.masked_fill(mask[..., None], -torch.inf).flatten(1).topk(topk).indices
        weights = scores.gather(1, ids)
        rows = torch.arange(tokens, device=DEVICE)
        return providers, rows, factor * weights / weights.sum(-1, keepdim=True)

    return Case(f"routing grouped E={experts} k={topk} T={tokens}", make)


def first_of(kernel: Callable[..., Any], *args: Any) -> torch.Tensor:
    return kernel(*args)[0]


def custom_op(name: str) -> Callable[..., Any]:
    """vLLM's compiled kernel."""
    import vllm._custom_ops

    return getattr(vllm._custom_ops, name)


def choice_sum(tokens: int, topk: int, hidden: int) -> Case:
    def make() -> tuple[dict[str, Callable[[], Call]], torch.Tensor, torch.Tensor]:
        x = normal(tokens, topk, hidden)

        def call(kernel: Callable[..., Any]) -> Call:
            out = x.new_empty(tokens, hidden)

            def run() -> torch.Tensor:
                kernel(x, out)
                return out

            return run

        rows = torch.arange(min(tokens, 64), device=DEVICE)
        providers = {"flagos": lambda: call(moe_sum.moe_sum), "vllm": lambda: call(custom_op("moe_sum"))}
        return providers, rows, x[rows].double().sum(1)

    return Case(f"moe_sum k={topk} H={hidden} T={tokens}", make)


# Experts

_weights: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}


def weights_of(model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """One model's at a time: they take gigabytes."""
    if model not in _weights:
        _weights.clear()
        experts, _, hidden, inner = EXPERTS[model]
        w1 = torch.empty(experts, 2 * inner, hidden, device=DEVICE, dtype=DTYPE).normal_(std=hidden**-0.5)
        w2 = torch.empty(experts, hidden, inner, device=DEVICE, dtype=DTYPE).normal_(std=inner**-0.5)
        _weights[model] = w1, w2
    return _weights[model]


def expert_inputs(model: str, tokens: int) -> tuple[torch.Tensor, ...]:
    """Arguments of fused_experts; every expert is as likely as any other."""
    experts, topk, hidden, _ = EXPERTS[model]
    weights, ids = torch.rand(tokens, experts, device=DEVICE).topk(topk)
    return normal(tokens, hidden), *weights_of(model), weights / weights.sum(-1, keepdim=True), int32(ids)


def experts_case(model: str, tokens: int) -> Case:
    def make() -> tuple[dict[str, Callable[[], Call]], torch.Tensor, torch.Tensor]:
        inputs = expert_inputs(model, tokens)

        def native() -> Call:
            from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

            return lambda: fused_experts(*inputs)

        rows = torch.linspace(0, tokens - 1, min(tokens, 8), device=DEVICE).long()
        providers = {"flagos": lambda: lambda: fused_moe.fused_experts(*inputs), "vllm": native}
        return providers, rows, torch.stack([expected_experts(*inputs, row) for row in rows.tolist()])

    return Case(f"experts {model} T={tokens}", make)


def expected_experts(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, row: int
) -> torch.Tensor:
    """One token's, in float64."""
    total = torch.zeros(x.shape[1], dtype=torch.float64, device=DEVICE)
    for weight, expert in zip(weights[row].double(), ids[row].tolist(), strict=True):
        gate, up = (w1[expert].double() @ x[row].double()).chunk(2)
        total += weight * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return total


def cases() -> Iterator[Case]:
    for model in ATTENTION:
        yield from (attention(model, requests, length, 1) for requests, length in DECODES)
        yield from (attention(model, requests, length, length) for requests, length in PREFILLS)
    for tokens in TOKENS:
        yield from (routing(tokens, experts, topk) for experts, topk, _, _ in EXPERTS.values())
        yield grouped_routing(tokens)
        yield choice_sum(tokens, 8, 2048)
    yield from (experts_case(model, tokens) for model in EXPERTS for tokens in TOKENS)
