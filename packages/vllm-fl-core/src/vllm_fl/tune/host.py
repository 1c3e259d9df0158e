"""The process that holds the engine: ``python -m vllm_fl.tune.host FD``, started by :mod:`vllm_fl.tune.engine`.

It is a process of its own, and the leader of a session, so that a hang or a crash of whatever it runs ends there and
with it. It answers one command after the other over the socket FD.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from vllm_fl.engines import Engine, Workload
from vllm_fl.errors import CommandError, Exit
from vllm_fl.logging import get_logger
from vllm_fl.policies import environment_of, from_plain

from .gate import Answer
from .objectives import RequestTimes, Round
from .space import Dimension

_EXTENSION = "vllm_fl.tune.worker.TuneWorker"
#: What an engine raises before it ends is on its way for a moment.
_GRACE_S = 5.0
#: Longest answers in the profiled round.
PROFILED_TOKENS = 8
#: Tokens whose log-probabilities are kept at each position.
_LIKELY = 8


class Host:
    """The engine and what the tuner asks of it; policies are what :func:`vllm_fl.policies.to_plain` makes."""

    def start(self, arguments: Mapping[str, Any], policy: Mapping[str, Any], workload: Workload) -> None:
        """Start an engine that selects by `policy`."""
        self._policy = from_plain(policy)
        self._work = workload
        with environment_of(self._policy):
            self._engine = Engine(arguments, _EXTENSION)
        self._with_times = not arguments.get("disable_log_stats", True)
        if _has_graphs(self._engine.config.compilation_config):
            self._exchange_graphs()

    def _exchange_graphs(self) -> None:
        reasons = [reason for reason in self._engine.call("fl_exchange_graphs") if reason]
        if reasons:
            remedy = "Pass --enforce-eager: an engine without graphs can always change its implementations."
            text = f"The graphs of this engine cannot be exchanged: {reasons[0]}."
            raise CommandError(text, remedy, Exit.USAGE)
        self._engine.call("fl_survey", True)
        self._engine.generate(self._prompts(0), self._work.output_tokens)
        self._engine.call("fl_survey", False)

    def profile(self) -> dict[str, float]:
        """Operator to its share of the time; without compiled code and graphs, which hide whose a kernel is."""
        from vllm_fl.profile.runner import profile_engine

        # The profiler's timeline grows with every step, and most steps look alike.
        work = replace(self._work, output_tokens=min(PROFILED_TOKENS, self._work.output_tokens))
        self._engine.call("fl_without_graphs", True)
        report = profile_engine(self._engine, work)
        self._engine.call("fl_without_graphs", False)
        return {row.operator: report.share(row.operator) for row in report.operators}

    def accepted(self, policy: Mapping[str, Any]) -> dict[str, list[str]]:
        """Operator to the variants that a policy accepts, in order; those that every rank has."""
        first, *others = self._engine.call("fl_chosen_by", policy)
        return {op: [i for i in ids if all(i in o.get(op, ()) for o in others)] for op, ids in first.items()}

    def dimensions(self) -> dict[str, dict[str, tuple[Dimension, ...]]]:
        """Operator to implementation to what may be varied of it."""
        return {
            operator: {
                impl_id: tuple(Dimension(name, tuple(values), default) for name, values, default in each)
                for impl_id, each in implementations.items()
            }
            for operator, implementations in self._engine.call("fl_dimensions")[0].items()
        }

    def left_to_vllm(self, policy: Mapping[str, Any]) -> list[str]:
        """Layers that compute otherwise here than in a new engine that selects by `policy`."""
        return list(self._engine.call("fl_left_to_vllm", policy)[0])

    def key(self) -> dict[str, Any]:
        """What the result holds for."""
        from .table import key_of

        return key_of(self._engine.config)

    def use(self, policy: Mapping[str, Any]) -> None:
        """Select by `policy` from now on."""
        self._engine.call("fl_use_policy", policy)

    def answers(self, policy: Mapping[str, Any]) -> tuple[list[Answer], dict[str, dict[str, int]]]:
        """The answers to the same requests each time, and operator to calls of each implementation meanwhile."""
        self._engine.call("fl_count_calls", True)
        self.use(policy)  # a call that a graph captures is counted now, and not when it is replayed
        outputs = self._engine.outputs(self._prompts(0), self._work.output_tokens, logprobs=_LIKELY)
        counts = self._engine.call("fl_call_counts")[0]
        self._engine.call("fl_count_calls", False)
        for operator, implementation in self._engine.call("fl_native_uses")[0].items():
            counts.setdefault(operator, {})[implementation] = 1
        return [answer_of(output) for output in outputs], counts

    def round(self, policy: Mapping[str, Any], variant: int) -> Round:
        """One round of the workload, with the prompts of that variant."""
        self.use(policy)
        prompts = self._prompts(variant)
        begin = time.perf_counter()
        outputs = self._engine.outputs(prompts, self._work.output_tokens)
        wall_s = time.perf_counter() - begin
        times = [request_times(output.metrics) for output in outputs] if self._with_times else []
        return Round(wall_s, sum(len(output.outputs[0].token_ids) for output in outputs), times)

    def _prompts(self, variant: int) -> list[list[int]]:
        return self._work.prompts(self._engine.vocabulary, variant)


def _has_graphs(compilation: Any) -> bool:
    return any(mode.name != "NONE" for mode in (compilation.mode, compilation.cudagraph_mode))


def answer_of(output: Any) -> Answer:
    """What is kept of vLLM's ``RequestOutput``, which has log-probabilities."""
    best = output.outputs[0]
    likely = [{token: float(entry.logprob) for token, entry in at.items()} for at in best.logprobs]
    return Answer(list(best.token_ids), likely)


def request_times(metrics: Any) -> RequestTimes:
    """The times in vLLM's ``RequestStateStats``, which a request has where the engine keeps statistics."""
    tokens = metrics.num_generation_tokens
    further = (metrics.last_token_ts - metrics.first_token_ts) / max(1, tokens - 1)
    return RequestTimes(metrics.first_token_latency, further, tokens)


def serve(connection: Connection) -> None:
    """Answer commands until the other side is gone: ("ok", result) or ("error", kind, text, remedy, code)."""
    host = Host()
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        begin = time.perf_counter()
        try:
            result = getattr(host, command)(*arguments)
            if command != "round":
                get_logger(__name__).info("%s took %.1f s", command, time.perf_counter() - begin)
            connection.send(("ok", result))
        except BrokenPipeError:
            return
        except CommandError as error:
            connection.send(("error", "CommandError", error.message, error.remedy, int(error.code)))
        except Exception as error:
            connection.send(("error", type(error).__name__, str(error), "", 1))


def _end_with(parent: int) -> None:
    """End this process and its children when `parent` is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def _end_with_an_engine() -> None:
    """End this process when one of the engine's has died; vLLM's client would wait for its answer for ever."""
    seen: set[BaseProcess] = set()
    while True:
        seen |= set(multiprocessing.active_children())
        died = next((child for child in seen if child.exitcode), None)
        time.sleep(1.0 if died is None else _GRACE_S)
        if died is not None:
            os._exit(max(died.exitcode or 0, 1))


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=_end_with_an_engine, daemon=True).start()
    serve(Connection(int(sys.argv[1])))
