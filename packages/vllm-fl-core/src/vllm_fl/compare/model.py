"""Two policies inside the running model: operator by operator, layer by layer, token by token."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.engines import Engine, Workload
from vllm_fl.policies import environment_of, to_plain

from .places import Filters

EXTENSION = "vllm_fl.compare.worker.CompareWorker"
#: What an engine decides when it builds the model, so that it has to be started anew to change it.
AT_START = "attention_backend"
#: Of the arguments of an engine that runs for a comparison: a graph would hide the calls, a cache the first steps.
ARGUMENTS: Mapping[str, Any] = {"enforce_eager": True, "enable_prefix_caching": False}


@dataclass(frozen=True)
class OperatorDifference:
    """What one operator's two implementations gave on the same inputs.

    Args:
        operator: the operator.
        first, second: the implementations.
        calls: number of calls that were compared.
        outside: number of these with an entry outside of the operator's tolerance.
        max_abs, max_ulp: the largest difference, and in units of the last place.
        failed: what `second` raised first; empty if it did not fail.
        order: the place of the first difference among all; None without any.
        step, module, rank: where it was.
        text: what it was.
        dump: file with its inputs.
    """

    operator: str
    first: str
    second: str
    calls: int
    outside: int
    max_abs: float
    max_ulp: float
    failed: str
    order: int | None = None
    step: int | None = None
    module: str = ""
    rank: int = 0
    text: str = ""
    dump: str | None = None

    @property
    def differs(self) -> bool:
        """Whether the two implementations do not agree within the operator's tolerance."""
        return self.outside > 0 or bool(self.failed)


@dataclass(frozen=True)
class LayerDifference:
    """The first step at which a layer's output is outside of the tolerance, and the largest difference at that step."""

    module: str
    rank: int
    step: int
    max_abs: float
    outside: int
    entries: int


@dataclass(frozen=True)
class TokenDifference:
    """The first token, counted from 0, that one request's two answers do not share."""

    request: int
    position: int
    first: int
    second: int


@dataclass(frozen=True)
class Comparison:
    """What came out of :func:`compare_model`.

    Args:
        first, second: the policies, as the user named them.
        steps: number of forwards of the model.
        operators: by the order of their first difference, those without one last.
        layers: those that differ, by step and then from the first to the last layer.
        tokens: requests whose answers differ.
        requests: number of requests.
        all_layers: whether every layer of every step was compared; False if their outputs were more than a rank keeps.
        at_start: (first, second) implementation of the attention, where they are not the same: compared by layers and
            tokens alone.
    """

    first: str
    second: str
    steps: int
    operators: tuple[OperatorDifference, ...]
    layers: tuple[LayerDifference, ...]
    tokens: tuple[TokenDifference, ...]
    requests: int
    all_layers: bool = True
    at_start: tuple[str, str] | None = None

    @property
    def differs(self) -> bool:
        """Whether an operator is outside of its tolerance, or a token is another."""
        return any(operator.differs for operator in self.operators) or bool(self.tokens)

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to compare: the policies choose the same of all that was called and asked for."""
        return self.at_start is None and not any(operator.calls or operator.failed for operator in self.operators)

    @property
    def culprit(self) -> OperatorDifference | None:
        """The operator with the first difference; None without any."""
        return next((operator for operator in self.operators if operator.differs), None)

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain data, ready for JSON."""
        culprit = self.culprit.operator if self.culprit else None
        return {**asdict(self), "differs": self.differs, "is_empty": self.is_empty, "culprit": culprit}


def comparing_engine(arguments: Mapping[str, Any]) -> Engine:
    """An engine whose calls can be compared: eager, in this process, every layer through dispatch."""
    return Engine({**arguments, **ARGUMENTS}, EXTENSION, in_process=True, all_layers=True)


def compare_model(
    model: str,
    first: SelectionPolicy,
    second: SelectionPolicy,
    *,
    names: tuple[str, str] = ("a", "b"),
    workload: Workload | None = None,
    arguments: Mapping[str, Any] | None = None,
    filters: Filters | None = None,
    dumps: Path | None = None,
) -> Comparison:
    """Run a model under two policies and say where they part.

    In a first run the model computes by `first`, and each call is computed again by `second` on the same inputs: a
    difference is the operator's own, not one that it inherited. A second run computes by `second` alone and is
    compared layer by layer and token by token. The engine is eager and in this process, so that both runs have the
    same steps.

    Args:
        model: name or directory of a model, as for ``vllm serve``.
        first, second: the policies.
        names: how the user calls them.
        workload: what the model has to do.
        arguments: further arguments of vLLM's ``LLM``.
        filters: which calls are compared.
        dumps: directory for the inputs of each operator's first difference; None keeps none.

    Raises:
        CommandError: the engine does not start, or the workload does not fit it.
    """
    work, wanted = workload or Workload(2, 32, 16), (filters or Filters()).as_plain()
    given = {**(arguments or {}), "model": model}
    with tempfile.TemporaryDirectory(prefix="vllm-fl-compare-") as states, environment_of(first):
        with comparing_engine(given) as engine:
            prompts = work.prompts(engine.vocabulary)
            engine.call("fl_use_policy", to_plain(first))
            accepted = [engine.call("fl_chosen_by", to_plain(policy))[0] for policy in (first, second)]
            engine.call("fl_shadow_start", to_plain(second), wanted, str(dumps) if dumps else None, states)
            answers = engine.generate(prompts, work.output_tokens)
            shadows = engine.call("fl_shadow_stop")
            at_start = _chosen_at_start(*accepted)
            if at_start is None:
                others, layers = _second_run(engine, second, wanted, states, prompts, work)
        if at_start is not None:
            with environment_of(second), comparing_engine(given) as engine:
                others, layers = _second_run(engine, second, wanted, states, prompts, work)
    return Comparison(
        first=names[0],
        second=names[1],
        steps=max(shadow["steps"] for shadow in shadows),
        operators=tuple(sorted(_operators(shadows), key=lambda o: (o.order is None, o.order or 0, o.operator))),
        layers=tuple(_layers(layers)),
        tokens=tuple(_tokens(answers, others)),
        requests=work.requests,
        all_layers=all(shadow["all_layers"] for shadow in shadows),
        at_start=at_start,
    )


def _second_run(
    engine: Engine,
    policy: SelectionPolicy,
    filters: Mapping[str, Any],
    states: str,
    prompts: Sequence[Sequence[int]],
    work: Workload,
) -> tuple[list[list[int]], list[Any]]:
    engine.call("fl_use_policy", to_plain(policy))
    engine.call("fl_layers_start", filters, states)
    answers = engine.generate(prompts, work.output_tokens)
    return answers, engine.call("fl_layers_stop")


def _chosen_at_start(first: Mapping[str, list[str]], second: Mapping[str, list[str]]) -> tuple[str, str] | None:
    pair = [accepted[AT_START][0] if AT_START in accepted else "none" for accepted in (first, second)]
    return None if pair[0] == pair[1] else (pair[0], pair[1])


def _operators(shadows: Iterable[Mapping[str, Any]]) -> Iterable[OperatorDifference]:
    for shadow in shadows:
        for pairing in shadow["pairings"]:
            start = next(iter(pairing["kept"]), None)
            yield OperatorDifference(
                operator=pairing["operator"],
                first=pairing["first"],
                second=pairing["second"],
                calls=pairing["calls"],
                outside=pairing["outside"],
                max_abs=pairing["max_abs"],
                max_ulp=pairing["max_ulp"],
                failed=pairing["failed"],
                order=start["order"] if start else None,
                step=start["step"] if start else None,
                module=start["module"] if start else "",
                rank=shadow["rank"],
                text=start["shown"] if start else "",
                dump=pairing["dump"],
            )


def _layers(results: Iterable[Mapping[str, Any]]) -> Iterable[LayerDifference]:
    found: dict[tuple[int, str], LayerDifference] = {}
    order: dict[str, int] = {}
    for result in results:
        for layer in result["layers"]:
            order.setdefault(layer["module"], len(order))
            key = (result["rank"], layer["module"])
            known = found.get(key)
            if not layer["within"] and (known is None or known.step == layer["step"]):
                worst = max(layer["max_abs"], known.max_abs if known else 0.0)
                sizes = (layer["outside"], layer["entries"]) if known is None else (known.outside, known.entries)
                found[key] = LayerDifference(layer["module"], result["rank"], layer["step"], worst, *sizes)
    return sorted(found.values(), key=lambda layer: (layer.step, order[layer.module], layer.rank))


def _tokens(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> Iterable[TokenDifference]:
    for request, (one, two) in enumerate(zip(first, second, strict=True)):
        parted = next((i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None)
        if parted is not None:
            yield TokenDifference(request, parted, one[parted], two[parted])
