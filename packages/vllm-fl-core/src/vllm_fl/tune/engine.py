"""Measures mixes on a running engine of vLLM: one engine stays up, and a new one is started only after a failure."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from vllm_fl.dispatch import ParameterPath, SelectionPolicy
from vllm_fl.dispatch.parameters import parse_variant
from vllm_fl.engines import Workload
from vllm_fl.errors import CommandError, Exit
from vllm_fl.policies import to_plain

from .gate import Answer, Tolerance, judge
from .objectives import Limits, Objective, Round, cost
from .space import Dimension, Mix, SearchSpace, changes, search_space
from .table import TUNED_ENV
from .trials import TrialFailed

#: What an engine decides when it builds the model; another choice would need another engine.
AT_START = ("attention_backend",)
#: The module of the process that holds the engine.
HOST = "vllm_fl.tune.host"
_START_S = 1800.0
#: A command may take so long, as long as the start (it may compile or capture what a start does), and so many times as
#: long as the longest so far.
_LEAST_HANG_S, _HANG_FACTOR = 120.0, 20.0
_OUT_OF_MEMORY = ("outofmemory", "out of memory", "memoryerror")


class EngineMeasurer:
    """Runs mixes on an engine; as a context manager it ends with the block.

    Args:
        arguments: those of vLLM's ``LLM``, the model among them. Prefix caching is switched off: what one mix has
            computed must not serve another one.
        policy: what the baseline selects by.
        workload: a round of it is measured.
        objective, limits: what is measured.
        tolerance: of the accuracy gate.
        hang_s: a command that takes longer is a hang; by default what the engine has shown so far decides.

    Raises:
        CommandError: the engine does not start, or it has graphs that cannot be exchanged.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        policy: SelectionPolicy,
        workload: Workload,
        *,
        objective: Objective = "throughput",
        limits: Limits | None = None,
        tolerance: Tolerance | None = None,
        hang_s: float | None = None,
    ) -> None:
        self._arguments = {**arguments, "enable_prefix_caching": False}
        if objective != "throughput":
            self._arguments["disable_log_stats"] = False
        self._policy, self._work = policy, workload
        self._objective, self._limits, self._tolerance = objective, limits or Limits(), tolerance or Tolerance()
        self._hang_s, self._longest_s, self._start_s = hang_s, 0.0, 0.0
        self._host: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._expected: list[Answer] | None = None
        self._accepted: dict[str, list[str]] = {}
        self._dimensions: dict[str, dict[str, tuple[Dimension, ...]]] = {}
        self._used: set[tuple[str, str]] = set()
        self.starts = 0
        self._start()
        self._ask("accepted", to_plain(policy))  # warms the connection up before anything is timed

    def __enter__(self) -> EngineMeasurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and all its processes."""
        host, self._host = self._host, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if host is not None:
            with suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
            host.wait()

    def space(self, min_share: float = 0.0, shares: Mapping[str, float] | None = None) -> SearchSpace:
        """The operators that the workload uses and for which there is a choice; profiled if no `shares` are given."""
        shares = shares or self._ask("profile")
        accepted, self._dimensions = self._ask("accepted", to_plain(self._policy)), self._ask("dimensions")
        self._accepted = {name: [parse_variant(each)[0] for each in variants] for name, variants in accepted.items()}
        chosen = {name: variants for name, variants in accepted.items() if name not in AT_START}
        return search_space(shares, chosen, min_share=min_share, dimensions=self._dimensions)

    def key(self) -> dict[str, Any]:
        """What a result holds for (see :mod:`vllm_fl.tune.table`)."""
        return dict(self._ask("key"))

    def policy_of(self, mix: Mix) -> SelectionPolicy:
        """The policy that selects `mix`: for each operator its implementation, then the others in their order.

        A parameter that the baseline's policy sets is set in any case: it may come from the platform.
        """
        orders, settings = dict(self._policy.per_op_order), dict(self._policy.parameters)
        for name, chosen in mix.items():
            impl_id, values = parse_variant(chosen)
            others = [i for i in self._accepted.get(name, ()) if i != impl_id]
            orders[name] = tuple(f"impl:{i}" for i in (impl_id, *others))
            given = {path[:3] for path in settings if path[:2] == (name, impl_id)}
            settings = {path: text for path, text in settings.items() if path[:3] not in given}
            for dimension in self._dimensions.get(name, {}).get(impl_id, ()):
                path = ParameterPath(name, impl_id, *dimension.name.split("."))
                if dimension.name in values or path[:3] in given:
                    settings[path] = values.get(dimension.name, dimension.default)
        return self._policy.derive(
            "vllm-fl tune", per_op_order=tuple(sorted(orders.items())), parameters=tuple(sorted(settings.items()))
        )

    def left_to_vllm(self, mix: Mix) -> tuple[str, ...]:
        """Layers that compute otherwise here than in a new engine that selects `mix`; none if no engine runs."""
        return tuple(self._ask("left_to_vllm", to_plain(self.policy_of(mix)))) if self._connection else ()

    def check(self, mix: Mix) -> None:
        """Whether `mix` runs, is used, and answers as the baseline; the first call is the baseline's."""
        answers, counts = self._ask("answers", self._strict(mix))
        if self._expected is None:
            self._expected, self._baseline = answers, dict(mix)
            return
        self._used |= {(name, chosen) for name, calls in counts.items() for chosen in calls}
        for name, chosen in changes(mix, self._baseline).items():
            impl_id, _ = parse_variant(chosen)
            if (name, impl_id) not in self._used:
                raise TrialFailed("not used", f"{impl_id} took none of the calls of {name}")
        judge(self._expected, answers, self._tolerance)

    def measure(self, mix: Mix, variant: int) -> float:
        measured = Round(*self._ask("round", self._strict(mix), variant))
        return cost(self._objective, measured, self._limits)

    def now(self) -> float:
        return time.monotonic()

    def _strict(self, mix: Mix) -> dict[str, Any]:
        """As :meth:`policy_of`, and an implementation that fails is not replaced: the mix would not be what ran."""
        return {**to_plain(self.policy_of(mix)), "strict": True}

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._host = subprocess.Popen(
                [sys.executable, "-m", HOST, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != TUNED_ENV},
            )
        self._connection = Connection(ours.detach())
        self.starts += 1
        self._ask("start", self._arguments, to_plain(self._policy), self._work, limit_s=_START_S)

    def _ask(self, command: str, *arguments: Any, limit_s: float | None = None) -> Any:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        limit = limit_s or self._hang_s or max(_LEAST_HANG_S, self._start_s, _HANG_FACTOR * self._longest_s)
        begin = time.monotonic()
        try:
            self._connection.send((command, arguments))
            answered = self._connection.poll(limit)
            reply = self._connection.recv() if answered else None
        except (EOFError, OSError):
            text = self._how_it_ended()
            self.close()
            raise TrialFailed("crash", text) from None
        except BaseException:  # Ctrl-C: the reply to this command must not be taken for that to the next one
            self.close()
            raise
        if reply is None:
            self.close()
            raise TrialFailed("hang", f"no answer within {limit:.0f} s")
        if reply[0] == "ok":
            took_s = time.monotonic() - begin
            if command == "start":
                self._start_s = max(self._start_s, took_s)
            else:
                self._longest_s = max(self._longest_s, took_s)
            return reply[1]
        self.close()
        raise _failure(*reply[1:])

    def _how_it_ended(self) -> str:
        assert self._host is not None
        try:
            code = self._host.wait(5.0)
        except subprocess.TimeoutExpired:
            return "the engine's process does not answer any more"
        if code >= 0:
            return f"the engine's process ended with exit code {code}"
        hint = ", as when memory runs out" if -code == signal.SIGKILL else ""
        return f"the engine's process was ended by {signal.Signals(-code).name}{hint}"


def _failure(kind: str, text: str, remedy: str, code: int) -> Exception:
    if kind == "CommandError":
        return CommandError(text, remedy, Exit(code))
    first = (text.strip().splitlines() or [""])[0]
    described = f"{kind}: {first}"
    reason = "out of memory" if any(word in f"{kind}: {text}".lower() for word in _OUT_OF_MEMORY) else "crash"
    return TrialFailed(reason, described)  # type: ignore[arg-type]
