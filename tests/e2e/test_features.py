"""Sampling and the prefix cache on the CPU platform, each against transformers or the definition of what it does.

One process asks everything. A mark names the feature for docs/compatibility.md, which scripts/features.py writes.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import pytest
import sampling_rules
import torch
from e2e_support import NEW_TOKENS, PROMPTS, Fresh, TinyModel, ask, make_engine, tokens_of

pytestmark = pytest.mark.more

PROMPT, LONG_PROMPT = PROMPTS[1], PROMPTS[3]
BLOCK = 16
#: Tokens of the letters a to z in the tiny model's tokenizer.
LETTERS = range(69, 95)
PENALTIES = {
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.9},
    "presence": {"presence_penalty": 1.5},
    "all": {"repetition_penalty": 0.8, "frequency_penalty": 0.7, "presence_penalty": -0.4},
}
LIMITS = {
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.6},
    "min-p": {"min_p": 0.2},
    "all": {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
}
TEMPERATURE = 0.7
BIAS = {17: 4.0, 200: 3.5, 42: -100.0}
ALLOWED = [9, 33, 77, 140, 201]


def table(positions: Any) -> list[list[float]]:
    """[positions, vocabulary]"""
    return [[entries[token].logprob for token in range(len(entries))] for entries in positions]


def run(model: str) -> dict[str, Any]:
    """Everything that is asked; called in a process of its own."""
    from vllm.sampling_params import BeamSearchParams

    engine = make_engine(model, max_logprobs=-1)
    engine.collective_rpc("fl_count_calls")
    one = partial(ask, engine, [PROMPT])
    shared = LONG_PROMPT[:100] + PROMPT
    first, again = ask(engine, [LONG_PROMPT]), ask(engine, [LONG_PROMPT, shared])
    (explained,) = one(logprobs=-1, prompt_logprobs=-1)
    (plain,) = tokens_of([explained])
    in_letters = partial(one, allowed_token_ids=list(LETTERS), max_tokens=24)
    text = in_letters()[0].outputs[0].text
    ends = [
        in_letters(stop=["~", text[6:8]], include_stop_str_in_output=True),
        in_letters(stop=["~", text[6:8]]),
        one(stop_token_ids=[plain[5]]),
    ]
    beams = engine.beam_search([{"prompt_token_ids": PROMPT}], BeamSearchParams(beam_width=3, max_tokens=4))
    found = {
        "cached": [answer.num_cached_tokens for answer in (*first, *again)],
        "from cache": tokens_of(again),
        "shared": shared,
        "tokens": plain,
        "logprobs": table(explained.outputs[0].logprobs),
        "prompt logprobs": table(explained.prompt_logprobs[1:]),
        "together": tokens_of(one(n=4, seed=7, temperature=1.0)),
        "alone": [tokens_of(one(seed=7 + i, temperature=1.0))[0] for i in range(4)],
        "penalised": {name: tokens_of(one(**rule))[0] for name, rule in PENALTIES.items()},
        "biased": tokens_of(one(logit_bias=BIAS))[0],
        "allowed": tokens_of(one(allowed_token_ids=ALLOWED))[0],
        "text": text,
        "ends": [[o.text, list(o.token_ids), o.finish_reason, o.stop_reason] for (a,) in ends for o in a.outputs],
        "beams": [[beam.tokens[len(PROMPT) :], beam.cum_logprob] for beam in beams[0].sequences],
        "drawn": {
            name: tokens_of(one(n=400, seed=1, temperature=TEMPERATURE, max_tokens=1, **rule))
            for name, rule in LIMITS.items()
        },
        "calls": engine.collective_rpc("fl_call_counts")[0],
    }
    processed = make_engine(model, max_logprobs=-1, logprobs_mode="processed_logprobs")
    draw = partial(ask, processed, [PROMPT], temperature=TEMPERATURE, max_tokens=1, logprobs=-1)
    found["left"] = {name: table(draw(**rule)[0].outputs[0].logprobs)[0] for name, rule in LIMITS.items()}
    return found


@pytest.fixture(scope="module")
def found(fresh: Fresh, tiny_llama: TinyModel) -> Any:
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    return fresh(run, model=str(tiny_llama.path), env=env).value


@pytest.fixture
def next_logits(tiny_llama: TinyModel) -> sampling_rules.Model:
    return lambda tokens: tiny_llama.logits(tokens)[-1]


@pytest.mark.feature("Prefix caching")
def test_prefix_caching(found: Any, tiny_llama: TinyModel) -> None:
    """Tokens as transformers'; whole blocks of what was seen before come from the cache."""
    assert found["cached"] == [0, (len(LONG_PROMPT) - 1) // BLOCK * BLOCK, 100 // BLOCK * BLOCK]
    assert found["from cache"] == tiny_llama.greedy([LONG_PROMPT, found["shared"]], NEW_TOKENS)


@pytest.mark.feature("Log-probabilities")
def test_log_probabilities(found: Any, tiny_llama: TinyModel) -> None:
    """Of all tokens, for prompt and answer: the log-softmax of transformers' logits, within 1e-4."""
    assert [found["tokens"]] == tiny_llama.greedy([PROMPT], NEW_TOKENS)
    expected = tiny_llama.logits([*PROMPT, *found["tokens"]]).log_softmax(-1)[:-1]
    given = torch.tensor(found["prompt logprobs"] + found["logprobs"], dtype=torch.float64)
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)


@pytest.mark.feature("Several answers (`n`)")
def test_several_answers(found: Any) -> None:
    """Four answers with a seed are those of four requests with the seeds that follow, all different."""
    assert found["together"] == found["alone"]
    assert len({tuple(tokens) for tokens in found["together"]}) == 4


@pytest.mark.feature("Penalties")
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties(name: str, found: Any, next_logits: sampling_rules.Model) -> None:
    """Repetition, frequency, presence: greedy tokens are those of the definition in float64."""
    rule = PENALTIES[name]
    expected = sampling_rules.greedy(
        next_logits, PROMPT, NEW_TOKENS, lambda x, output: sampling_rules.penalised(x, PROMPT, output, **rule)
    )
    assert found["penalised"][name] == expected != found["tokens"]


@pytest.mark.feature("Top-k, top-p, min-p")
@pytest.mark.parametrize("name", LIMITS)
def test_limits(name: str, found: Any, next_logits: sampling_rules.Model) -> None:
    """What is left, and its probabilities, are those of the definition in float64; 400 draws stay in it, and differ."""
    logits = next_logits(PROMPT) / TEMPERATURE
    kept = sampling_rules.kept(logits, **LIMITS[name])
    assert 1 < len(kept) < len(logits)
    left = torch.tensor(found["left"][name], dtype=torch.float64)
    assert set(left.isfinite().nonzero().flatten().tolist()) == kept
    gone = torch.tensor([token not in kept for token in range(len(logits))])
    torch.testing.assert_close(left, logits.masked_fill(gone, -math.inf).log_softmax(-1), atol=1e-4, rtol=0)
    drawn = Counter(token for (token,) in found["drawn"][name])
    assert set(drawn) <= kept
    shares = torch.tensor([drawn[token] / 400 for token in range(len(logits))])
    assert float((shares - left.exp()).abs().sum()) / 2 < 0.15  # total variation


@pytest.mark.feature("Top-k, top-p, min-p")
def test_limits_go_through_dispatch(found: Any) -> None:
    """The sampler calls `apply_top_k_top_p` and `apply_repetition_penalties` of the catalogue."""
    for operator in ("apply_top_k_top_p", "apply_repetition_penalties"):
        assert found["calls"][operator].keys() == {"reference.torch"}


@pytest.mark.feature("Logit bias, allowed tokens")
def test_bias_and_allowed_tokens(found: Any, next_logits: sampling_rules.Model) -> None:
    """Greedy tokens are those of the definition in float64."""
    bias = torch.zeros(288, dtype=torch.float64)
    bias[list(BIAS)] = torch.tensor(list(BIAS.values()), dtype=torch.float64)
    others = torch.tensor([token not in ALLOWED for token in range(288)])
    greedy = partial(sampling_rules.greedy, next_logits, PROMPT, NEW_TOKENS)
    assert found["biased"] == greedy(lambda logits, _: logits + bias) != found["tokens"]
    assert found["allowed"] == greedy(lambda logits, _: logits.masked_fill(others, -math.inf))


@pytest.mark.feature("Stop strings")
def test_stop_strings(found: Any) -> None:
    """The answer ends before the first of them, or with it if so asked, and says which; a stop token is kept."""
    text = found["text"]
    assert len(text) == 24
    stop = text[6:8]
    place = text.index(stop)
    (with_stop, _, *why), (without, _, *why_too), (_, tokens, *why_token) = found["ends"]
    assert (with_stop, without) == (text[: place + 2], text[:place])
    assert why == why_too == ["stop", stop]
    token = found["tokens"][5]
    assert tokens == found["tokens"][: found["tokens"].index(token) + 1]
    assert why_token == ["stop", token]


@pytest.mark.feature("Beam search")
def test_beam_search(found: Any, next_logits: sampling_rules.Model) -> None:
    """Three beams: sequences and sums are those of a beam search over transformers' logits in float64."""
    expected = sampling_rules.beams(next_logits, PROMPT, width=3, count=4)
    assert [tokens for tokens, _ in found["beams"]] == [tokens for tokens, _ in expected]
    for (_, score), (_, sum_of_logprobs) in zip(found["beams"], expected, strict=True):
        assert score == pytest.approx(sum_of_logprobs, abs=1e-3)
