"""What sampling does to logits, in float64, written from the definitions. [V] is the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

#: Logits [V], float64, of the token after a sequence.
Model = Callable[[Sequence[int]], Tensor]


def penalised(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
) -> Tensor:
    """Divide what occurred if it is positive, else multiply it; then subtract for each, and for any, use so far."""
    result = logits.clone()
    for token in set(prompt) | set(output):
        factor = 1 / repetition_penalty if result[token] > 0 else repetition_penalty
        result[token] *= factor
    for token in set(output):
        result[token] -= frequency_penalty * output.count(token) + presence_penalty
    return result


def kept(logits: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The tokens that remain: `min_p` times the likeliest at least, then the first k, then the nucleus of these."""
    probabilities = logits.softmax(-1)
    order = [t for t in logits.argsort(descending=True).tolist() if probabilities[t] >= min_p * probabilities.max()]
    order = order[: top_k or None]
    mass, total, nucleus = 0.0, float(probabilities[order].sum()), set()
    for token in order:
        if mass < top_p * total:
            nucleus.add(token)
        mass += float(probabilities[token])
    return nucleus


def greedy(model: Model, prompt: Sequence[int], count: int, rule: Callable[[Tensor, list[int]], Tensor]) -> list[int]:
    """The likeliest token after `rule(logits, output so far)`, `count` times."""
    output: list[int] = []
    for _ in range(count):
        output.append(int(rule(model([*prompt, *output]), output).argmax()))
    return output


def beams(model: Model, prompt: Sequence[int], width: int, count: int) -> list[tuple[list[int], float]]:
    """(continuation, its log-probability) of the `width` best that a beam search of `count` steps finds."""
    found: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(count):
        longer = [
            ([*tokens, token], score + float(logprob))
            for tokens, score in found
            for token, logprob in enumerate(model([*prompt, *tokens]).log_softmax(-1))
        ]
        found = sorted(longer, key=lambda beam: -beam[1])[:width]
    return found
