"""A plan: how calls of one operator are served under one policy, and what happens when an implementation refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from vllm_fl.catalog import OpSpec
from vllm_fl.errors import NoImplementationError
from vllm_fl.logging import get_logger

from .codegen import AGAIN, make_call, make_key
from .failures import FailureLog, add_note, cannot_retry, describe, make_record, name_arguments
from .links import Call, Link
from .selection import Selection
from .tracing import is_compiling

#: Conditions that are remembered for an operator; when there are more, all are forgotten.
MEMORY_LIMIT = 4096


class PlanHost(Protocol):
    """The manager, to its plans."""

    failure_log: FailureLog

    def demote(self, plan: OpPlan, reasons: Mapping[str, str]) -> None:
        """Take implementations out of the plan."""

    def rebound(self, plan: OpPlan) -> None:
        """``plan.call`` is another function now."""


class OpPlan:
    """The accepted implementations of an operator and the function that calls them, ``call``.

    Args:
        host: the manager.
        selection: the decision; at least one candidate is accepted.
        spec: the operator's specification, if it has one.
        links: the accepted candidates, in order.
        strict: pass exceptions on.
        demoted: impl_id to reason of those that failed under this plan or the one that it replaces.
        opaque: the operator behind torch.library, for links that Dynamo must not trace.
    """

    def __init__(
        self,
        host: PlanHost,
        selection: Selection,
        spec: OpSpec | None,
        links: tuple[Link, ...],
        *,
        strict: bool,
        demoted: Mapping[str, str],
        opaque: Call | None,
    ) -> None:
        self.host = host
        self.selection = selection
        self.spec = spec
        self.links = links
        self.strict = strict
        self.demoted = demoted
        self.remembering = False
        self.memory: dict[Any, Link] = {}
        self.key = make_key(spec)
        self.chain = _chain(self, opaque)
        self.traced = self.chain[0]
        self.call: Call = make_call(self)

    @property
    def op_name(self) -> str:
        return self.selection.op_name

    def attempt(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Serve a call by the first implementation that takes its arguments."""
        answer = _Attempt(self, args, kwargs).follow(0)
        if answer is AGAIN:
            raise AssertionError("an attempt from the start has no exception to raise again")
        return answer

    def recover(
        self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any], link: Link | None = None
    ) -> Any:
        """Decide what follows `error`, which `link` (the first one, if None) raised.

        Returns:
            The result of a later implementation, or AGAIN if `error` is to be raised again.
        """
        link = link or self.links[0]
        if is_compiling():
            following = link.index + 1
            if isinstance(error, NotImplementedError) and following < len(self.links):
                return self.chain[following](*args, **kwargs)
            return AGAIN
        attempt = _Attempt(self, args, kwargs)
        if not attempt.may_go_on(link, error):
            return AGAIN
        return attempt.follow(link.index + 1)

    def remember(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], link: Link) -> None:
        """Let `link` serve the calls under the conditions of this one."""
        if len(self.memory) >= MEMORY_LIMIT:
            self.memory.clear()
        with contextlib.suppress(TypeError):  # an argument that cannot be hashed
            self.memory[self.key(*args, **kwargs)] = link
        if not self.remembering:
            self.remembering = True
            self.rebuild()

    def rebuild(self) -> None:
        self.call = make_call(self)
        self.host.rebound(self)


class _Attempt:
    """One call on its way down the candidates."""

    def __init__(self, plan: OpPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.plan = plan
        self.args = args
        self.kwargs = kwargs
        self.refused: list[tuple[Link, str]] = []
        self.failed: list[tuple[Link, Exception]] = []

    def follow(self, start: int) -> Any:
        """Try the candidates from `start` on; AGAIN if the exception that led here is to be raised again."""
        led_here = self.failed[0][1] if self.failed else None
        for link in self.plan.links[start:]:
            refusal = link.refusal(self.args, self.kwargs)
            if refusal is not None:
                self.refused.append((link, refusal))
                continue
            try:
                result = link.call(*self.args, **self.kwargs)
            except Exception as error:
                if not self.may_go_on(link, error):
                    raise
                continue
            self._succeeded(link)
            return result
        return self._exhausted(led_here)

    def may_go_on(self, link: Link, error: Exception) -> bool:
        """Whether the next candidate may be tried after `error`.

        Raises:
            TypeError: the arguments do not fit the operator's signature, which is the caller's mistake.
        """
        if isinstance(error, NotImplementedError):
            self.refused.append((link, f"does not support these arguments: {str(error) or 'no reason given'}"))
            return True
        self._raise_if_misused(link, error)
        self.failed.append((link, error))
        why_not = cannot_retry(error, self.plan.spec, self.args, self.kwargs, self.plan.strict)
        if why_not is not None:
            self._report(f"the exception is passed on, since {why_not}")
        return why_not is None

    def _raise_if_misused(self, link: Link, error: Exception) -> None:
        spec = self.plan.spec
        if spec is None and not isinstance(error, TypeError):
            return
        import inspect

        signature = spec.signature if spec is not None else inspect.signature(link.impl.fn)
        try:
            signature.bind(*self.args, **self.kwargs)
        except TypeError as mistake:
            plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
            raise TypeError(f"{self.plan.op_name}{inspect.Signature(plain)}: {mistake}") from error

    def _succeeded(self, link: Link) -> None:
        if self.refused or self.plan.remembering or self.plan.links[0].impl.supports is not None:
            self.plan.remember(self.args, self.kwargs, link)
        if self.failed:
            self._report(f"{link.impl_id!r} serves the operator from now on")
            self.plan.host.demote(self.plan, {failed.impl_id: describe(error) for failed, error in self.failed})

    def _exhausted(self, led_here: Exception | None) -> Any:
        plan = self.plan
        if not self.failed:
            lines = [f"  {link.impl_id}: {reason}" for link, reason in self.refused]
            raise NoImplementationError(
                f"no implementation of {plan.op_name} takes these arguments"
                f" ({_shown(name_arguments(plan.spec, self.args, self.kwargs))})\n"
                + "\n".join(lines)
                + f"\n{plan.selection.explain()}"
            )
        self._report("the exception is passed on, since no other implementation is left")
        first = self.failed[0][1]
        for link, error in self.failed[1:]:
            add_note(
                first, f"{plan.op_name}: implementation {link.impl_id!r} was tried next and raised {describe(error)}"
            )
        for link, reason in self.refused:
            add_note(first, f"{plan.op_name}: implementation {link.impl_id!r} {reason}")
        if first is led_here:
            return AGAIN
        raise first

    def _report(self, outcome: str) -> None:
        log = self.plan.host.failure_log
        for link, error in self.failed:
            if log.known(self.plan.op_name, link.impl_id):
                continue
            arguments = name_arguments(self.plan.spec, self.args, self.kwargs)
            record = make_record(self.plan.op_name, link.impl_id, error, arguments, outcome)
            if log.add(record):
                get_logger(__name__).warning("%s; %s\n%s", record, outcome, record.traceback)


def _shown(arguments: Mapping[str, Any]) -> str:
    def show(value: Any) -> str:
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__

    return ", ".join(f"{name}={show(value)}" for name, value in arguments.items())


def _chain(plan: OpPlan, opaque: Call | None) -> tuple[Callable[..., Any], ...]:
    """For each link the function that torch.compile traces: this link, or the following ones if it does not fit."""
    following: Call = _nothing_left(plan.op_name)
    chain: list[Call] = []
    for link in reversed(plan.links):
        target = opaque if link.impl.opaque and opaque is not None else link.call
        following = _traced(link, target, following)
        chain.append(following)
    return tuple(reversed(chain))


def _traced(link: Link, target: Call, following: Call) -> Call:
    conditional = link.conditional

    def call(*args: Any, **kwargs: Any) -> Any:
        if conditional and not link.fits_traced(args, kwargs):
            return following(*args, **kwargs)
        try:
            return target(*args, **kwargs)
        except NotImplementedError:
            return following(*args, **kwargs)

    return call


def _nothing_left(op_name: str) -> Call:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NoImplementationError(f"no implementation of {op_name} takes the arguments that are being compiled")

    return call
