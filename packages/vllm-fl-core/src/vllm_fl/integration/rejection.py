"""Which drafted tokens of speculative decoding stay (Leviathan et al., 2023), in PyTorch.

What vLLM computes in Triton, or in compiled kernels on a CPU, for platforms that have neither. A request's tokens lie
one after another: those of request r end at `ends[r]`, the cumulative numbers of drafted tokens. All tensors of token
ids are int64. R requests, T drafted tokens of all together, at most S of one request, vocabulary V.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accept_at_random", "accept_greedily", "draw_recovered", "expand"]


def accept_greedily(
    output: Tensor, ends: Tensor, drafted: Tensor, likeliest: Tensor, bonus: Tensor, is_greedy: Tensor | None, _: int
) -> None:
    """Keep what the model would have said: drafts up to the first that is not its likeliest token, and that token.

    Args:
        output: [R, S + 1]; written from the left.
        ends: [R].
        drafted: [T].
        likeliest: [T], the model's choice in the place of each draft.
        bonus: [R], or [R, 1]: the token after the last draft, for requests whose drafts all stay.
        is_greedy: [R], bool: the requests to look at; None: all.
        _: S, which the shape of `output` says, too.
    """
    _write(output, ends, drafted == likeliest, likeliest, bonus, is_greedy)


def accept_at_random(
    output: Tensor, ends: Tensor, drafted: Tensor, draft_probs: Tensor | None, target_probs: Tensor, bonus: Tensor,
    recovered: Tensor, uniform: Tensor, is_greedy: Tensor, *_: int,
) -> None:  # fmt: skip
    """Keep a draft with the probability min(1, target / draft); in the place of the first that goes, one drawn anew.

    Args:
        output: [R, S + 1]; written from the left.
        ends: [R].
        drafted: [T]; a negative one is no token and goes.
        draft_probs: [T, V], what the draft was drawn from; None: it was certain.
        target_probs: [T, V], the model's distribution.
        bonus: [R], or [R, 1]: the token after the last draft, for requests whose drafts all stay.
        recovered: [T], tokens of :func:`draw_recovered`.
        uniform: [T], numbers in [0, 1).
        is_greedy: [R], bool: the requests to leave alone.
        _: S, V, and whether `draft_probs` is None.
    """
    column = drafted.clamp(min=0).unsqueeze(1)
    target = target_probs.gather(1, column).squeeze(1)
    proposed = torch.ones_like(target) if draft_probs is None else draft_probs.gather(1, column).squeeze(1)
    accepted = (drafted >= 0) & (proposed > 0) & (target >= uniform * proposed)
    _write(output, ends, accepted, torch.where(accepted, drafted, recovered), bonus, ~is_greedy)


def draw_recovered(
    output: Tensor, ends: Tensor, drafted: Tensor, draft_probs: Tensor | None, target_probs: Tensor, inverse: Tensor,
    *_: int,
) -> None:  # fmt: skip
    """Draw, for each draft, the token that takes its place if it goes: from what the target has more than the draft.

    Args:
        output: [T]; written.
        ends: [R].
        drafted: [T].
        draft_probs: [T, V], or None: the draft was certain.
        target_probs: [T, V].
        inverse: [R, V], inverses of exponentially distributed numbers; the largest product is a draw.
        _: V, and whether `draft_probs` is None.
    """
    if draft_probs is None:
        weights = target_probs.clone()
        row = (drafted >= 0).nonzero().squeeze(1)
        weights[row, drafted[row]] = 0
    else:
        weights = (target_probs - draft_probs).clamp_(min=0)
    output.copy_((weights * expand(inverse, ends)).argmax(-1))


def expand(values: Tensor, ends: Tensor) -> Tensor:
    """Each request's value, or row, once for each of its drafted tokens: [R, ...] becomes [T, ...]."""
    return values.repeat_interleave(torch.diff(ends, prepend=ends.new_zeros(1)), dim=0)


def _write(
    output: Tensor, ends: Tensor, accepted: Tensor, tokens: Tensor, bonus: Tensor, requests: Tensor | None
) -> None:
    """The tokens of each request up to the first that is not accepted, with it; all and the bonus if there is none."""
    start = 0
    for request, end in enumerate(ends.tolist()):
        if requests is None or requests[request]:
            leading = int(accepted[start:end].cumprod(0).sum())
            count = min(leading + 1, end - start)
            output[request, :count] = tokens[start : start + count]
            if leading == end - start:
                output[request, leading] = bonus.flatten()[request]
        start = end
