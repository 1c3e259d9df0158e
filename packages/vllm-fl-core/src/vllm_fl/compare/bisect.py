"""The smallest set of operators that makes a model's answers differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.dispatch.parameters import parse_variant
from vllm_fl.engines import Engine, Workload
from vllm_fl.policies import environment_of, to_plain

from .model import AT_START, Comparison, compare_model, comparing_engine
from .places import Filters

Answers = list[list[int]]


@dataclass(frozen=True)
class Bisection:
    """What came out of :func:`bisect_model`.

    Args:
        first, second: the policies, as the user named them.
        candidates: operators for which the policies choose different implementations.
        culprits: a smallest set of these: with the second policy's implementations of them, and the first one's of all
            others, the answers differ; with those of any part of the set they do not. Empty if nothing differs.
        others_agree: whether the answers are the same with the second policy's implementations of all candidates but
            the culprits; if not, there is another set.
        runs: number of times that the workload ran.
        comparison: the culprits inside the model, with layer and step; None without any.
    """

    first: str
    second: str
    candidates: tuple[str, ...]
    culprits: tuple[str, ...]
    others_agree: bool
    runs: int
    comparison: Comparison | None

    def as_dict(self) -> dict[str, Any]:
        """The bisection as plain data, ready for JSON."""
        return {**asdict(self), "comparison": self.comparison.as_dict() if self.comparison is not None else None}


def bisect_model(
    model: str,
    good: SelectionPolicy,
    bad: SelectionPolicy,
    *,
    names: tuple[str, str] = ("a", "b"),
    workload: Workload | None = None,
    arguments: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> Bisection:
    """Find the operators whose implementations under `bad` make the answers differ from those under `good`.

    Each operator is tried alone first; where none suffices, sets are halved until no member can be left out (the
    algorithm ddmin of Zeller and Hildebrandt, 2002). Then the culprits are compared inside the model.

    Args:
        model: name or directory of a model, as for ``vllm serve``.
        good, bad: the policies.
        names: how the user calls them.
        workload: what the model has to do.
        arguments: further arguments of vLLM's ``LLM``.
        progress: told what is being tried.

    Raises:
        CommandError: the engine does not start, or the workload does not fit it.
    """
    work = workload or Workload(2, 32, 16)
    given = {**(arguments or {}), "model": model}
    with _Runner(given, good, bad, work) as runner:
        expected = runner.answers(())
        candidates = runner.candidates

        def differs(operators: Sequence[str]) -> bool:
            progress(f"{len(operators)} of {len(candidates)}: {', '.join(operators)}")
            return runner.answers(operators) != expected

        culprits = smallest(candidates, differs) if candidates and differs(candidates) else ()
        rest = tuple(name for name in candidates if name not in culprits)
        others_agree = not culprits or not rest or not differs(rest)
        runs = runner.runs
    comparison = None
    if culprits:
        progress(f"compare {', '.join(culprits)} inside the model")
        filters = Filters(operators=frozenset(culprits))
        policy = runner.policy(culprits)
        comparison = compare_model(
            model, good, policy, names=names, workload=work, arguments=arguments, filters=filters
        )
    return Bisection(*names, candidates, culprits, others_agree, runs, comparison)


def smallest(candidates: Sequence[str], differs: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """A smallest part of `candidates` that differs; all of them together have to.

    One that differs alone is found at once. Else no member of the result can be left out, which need not make it the
    smallest of all.
    """
    if len(candidates) == 1:
        return tuple(candidates)
    for name in candidates:
        if differs((name,)):
            return (name,)
    present, parts = list(candidates), 2
    while len(present) > 1:
        size = -(-len(present) // parts)
        without = [present[:start] + present[start + size :] for start in range(0, len(present), size)]
        smaller = next((part for part in without if part and len(part) > 1 and differs(part)), None)
        if smaller is not None:
            present, parts = smaller, max(parts - 1, 2)
        elif parts >= len(present):
            break
        else:
            parts = min(2 * parts, len(present))
    return tuple(present)


class _Runner:
    """Runs the workload under mixtures of the two policies; starts another engine only where the attention changes."""

    def __init__(
        self, arguments: Mapping[str, Any], good: SelectionPolicy, bad: SelectionPolicy, work: Workload
    ) -> None:
        self._arguments, self._good, self._bad, self._work = arguments, good, bad, work
        self._stack = ExitStack()
        self._engine: Engine | None = None
        self._attention = ""
        self._accepted: tuple[dict[str, list[str]], ...] = ()
        self._known: dict[tuple[str, ...], Answers] = {}
        self.candidates: tuple[str, ...] = ()
        self.runs = 0

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def policy(self, operators: Sequence[str]) -> SelectionPolicy:
        """The good policy with the bad one's implementations of these operators, and their parameters.

        Orders name implementations: neither policy's restrictions may keep out what the other one chooses.
        """
        if not self._accepted:
            return self._good
        good, bad = self._accepted
        variants = {**good, **{name: bad[name] for name in operators}}
        orders = {name: tuple(f"impl:{parse_variant(v)[0]}" for v in found) for name, found in variants.items()}
        kept = [setting for setting in self._good.parameters if setting[0].operator not in operators]
        taken = [setting for setting in self._bad.parameters if setting[0].operator in operators]
        return SelectionPolicy(
            prefer=self._good.prefer, strict=self._good.strict, per_op_order=tuple(sorted(orders.items())),
            parameters=tuple(sorted(kept + taken)), origins=MappingProxyType({"": "bisect"}),
        )  # fmt: skip

    def answers(self, operators: Sequence[str]) -> Answers:
        """The answers with the bad policy's implementations of these operators; each mixture runs once."""
        key = tuple(sorted(operators))
        if key not in self._known:
            engine = self._engine_of(operators)
            engine.call("fl_use_policy", to_plain(self.policy(operators)))
            self.runs += 1
            self._known[key] = engine.generate(self._work.prompts(engine.vocabulary), self._work.output_tokens)
        return self._known[key]

    def _engine_of(self, operators: Sequence[str]) -> Engine:
        attention = "bad" if AT_START in operators else "good"
        if self._engine is None or attention != self._attention:
            self._stack.close()
            self._attention = attention
            self._stack.enter_context(environment_of(self.policy(operators)))
            self._engine = self._stack.enter_context(comparing_engine(self._arguments))
            if not self.candidates:
                self._look(self._engine)
        return self._engine

    def _look(self, engine: Engine) -> None:
        good, bad = (engine.call("fl_chosen_by", to_plain(policy))[0] for policy in (self._good, self._bad))
        self._accepted = good, bad
        self.candidates = tuple(name for name in sorted(good) if name in bad and good[name][0] != bad[name][0])
