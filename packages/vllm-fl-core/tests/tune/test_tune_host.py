"""What the process with the engine asks of its workers, in which order; with a stand-in for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.dispatch import SelectionPolicy
from vllm_fl.engines import Workload
from vllm_fl.errors import CommandError, Exit
from vllm_fl.policies import to_plain
from vllm_fl.profile import runner
from vllm_fl.tune import host as module
from vllm_fl.tune.host import PROFILED_TOKENS, Host

POLICY = to_plain(SelectionPolicy())
ANSWERS = {"fl_exchange_graphs": ["", ""], "fl_call_counts": [{"norm": {"a": 3}}], "fl_native_uses": [{"gate": "b"}]}


class Engine:
    """Writes down what it is asked for."""

    def __init__(self, graphs: str, answers: dict[str, Any]) -> None:
        modes = SimpleNamespace(mode=SimpleNamespace(name="NONE"), cudagraph_mode=SimpleNamespace(name=graphs))
        self.config = SimpleNamespace(compilation_config=modes)
        self.vocabulary = 300
        self.answers = {**ANSWERS, **answers}
        self.asked: list[Any] = []

    def call(self, method: str, *arguments: Any) -> Any:
        self.asked.append((method, *(a for a in arguments if not isinstance(a, dict))))
        return self.answers.get(method)

    def generate(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> None:
        self.asked.append("generate")

    def outputs(self, prompts: Sequence[Sequence[int]], output_tokens: int, *, logprobs: int | None = None) -> Any:
        self.asked.append("generate")
        return []


def started(monkeypatch: pytest.MonkeyPatch, graphs: str = "FULL", **answers: Any) -> tuple[Host, Engine]:
    engine = Engine(graphs, answers)
    monkeypatch.setattr(module, "Engine", lambda arguments, extension: engine)
    host = Host()
    host.start({}, POLICY, Workload(output_tokens=100))
    return host, engine


def test_an_engine_with_graphs_shows_its_workload_first(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = started(monkeypatch)
    assert engine.asked == [("fl_exchange_graphs",), ("fl_survey", True), "generate", ("fl_survey", False)]


def test_an_engine_without_graphs_is_ready_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = started(monkeypatch, "NONE")
    assert engine.asked == []


def test_graphs_that_cannot_be_exchanged_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommandError) as caught:
        started(monkeypatch, fl_exchange_graphs=["", "planted"])
    assert caught.value.code == Exit.USAGE
    assert str(caught.value) == (
        "The graphs of this engine cannot be exchanged: planted.\n"
        "Remedy: Pass --enforce-eager: an engine without graphs can always change its implementations."
    )


def test_calls_are_counted_before_a_graph_captures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    host, engine = started(monkeypatch, "NONE")
    _, counts = host.answers(POLICY)
    assert counts == {"norm": {"a": 3}, "gate": {"b": 1}}
    assert engine.asked == [
        ("fl_count_calls", True),
        ("fl_use_policy",),
        "generate",
        ("fl_call_counts",),
        ("fl_count_calls", False),
        ("fl_native_uses",),
    ]


def test_a_profile_has_no_graphs_and_short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    host, engine = started(monkeypatch, "NONE")

    def profile_engine(_: Any, work: Workload) -> Any:
        engine.asked.append(work.output_tokens)
        return SimpleNamespace(operators=[], share=None)

    monkeypatch.setattr(runner, "profile_engine", profile_engine)
    assert host.profile() == {}
    assert engine.asked == [("fl_without_graphs", True), PROFILED_TOKENS, ("fl_without_graphs", False)]


def test_the_host_ends_with_a_process_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    class Child:
        def __init__(self, exitcode: int | None) -> None:
            self.exitcode = exitcode

    running, done, died = Child(None), Child(0), Child(3)
    rounds = iter(([running, done], [running, done], [running, died], []))
    monkeypatch.setattr(module.multiprocessing, "active_children", lambda: next(rounds))
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(module.os, "_exit", end)
    with pytest.raises(Ended) as caught:
        module._end_with_an_engine()
    assert caught.value.args == (3,)
