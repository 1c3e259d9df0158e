"""Makes selections and plans of what the registry holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm_fl.catalog import OpSpec
from vllm_fl.errors import NoImplementationError, UnknownOperatorError, did_you_mean

from .environment import probe_environment
from .links import Call, Link
from .observers import Observers
from .parameters import configuration_of
from .plan import OpPlan, PlanHost
from .policy import SelectionPolicy
from .registry import OpRegistry
from .selection import Candidate, Environment, Selection, select


class Planner:
    """Selection over one registry; facts about the process are asked once and kept until they are to be forgotten."""

    def __init__(self, registry: OpRegistry, observers: Observers) -> None:
        self._registry = registry
        self._observers = observers
        self._environment: Environment | None = None

    def forget_environment(self) -> None:
        self._environment = None

    def select(self, op_name: str, policy: SelectionPolicy, demoted: Mapping[str, str], dtype: Any = None) -> Selection:
        """The selection of one operator.

        Raises:
            UnknownOperatorError: there is no such operator.
        """
        spec, impls = self._registry.spec(op_name), self._registry.get_implementations(op_name)
        if spec is None and not impls:
            known = self._registry.known_operators()
            raise UnknownOperatorError(
                f"operator {op_name!r} is neither in the catalogue nor registered{did_you_mean(op_name, known)}"
            )
        environment = self._environment
        if environment is None:
            environment = self._environment = probe_environment(self._registry.snapshot())
        return select(spec, impls, policy, environment, demoted=demoted, dtype=dtype, op_name=op_name)

    def build(
        self,
        host: PlanHost,
        op_name: str,
        policy: SelectionPolicy,
        demoted: Mapping[str, str],
        opaque_call: Callable[[OpSpec], Call],
    ) -> OpPlan:
        """The plan of one operator; `opaque_call` gives the call of its custom operator, if it needs one.

        Raises:
            UnknownOperatorError: there is no such operator.
            NoImplementationError: no candidate is accepted.
        """
        selection = self.select(op_name, policy, demoted)
        if selection.chosen is None:
            raise NoImplementationError(_nothing_accepted(selection))
        spec = self._registry.spec(op_name)
        links = tuple(self._link(candidate, index, spec) for index, candidate in enumerate(selection.accepted))
        opaque = opaque_call(spec) if spec is not None and any(link.impl.opaque for link in links) else None
        return OpPlan(host, selection, spec, links, strict=policy.strict, demoted=demoted, opaque=opaque)

    def _link(self, candidate: Candidate, index: int, spec: OpSpec | None) -> Link:
        bare, impl = bare_link(candidate, index, spec), candidate.impl
        hooks = self._observers.hooks(impl.op_name, impl.impl_id)
        function = self._observers.function(impl, bare.own)
        if function is bare.own and not hooks:
            return bare
        return Link(impl, index, spec, hooks, function, own=bare.own)


def bare_link(candidate: Candidate, index: int, spec: OpSpec | None) -> Link:
    """The link of a candidate with its parameters, which nothing watches."""
    configuration = configuration_of(candidate.impl, candidate.settings, spec)
    own: Call = candidate.impl.fn if configuration is None else configuration.bind(candidate.impl.fn)
    return Link(candidate.impl, index, spec, (), own, configuration, own)


def _nothing_accepted(selection: Selection) -> str:
    if not selection.candidates:
        remedy = "install a distribution that has one: vllm-fl-reference has every operator of the catalogue"
        return f"no implementation of {selection.op_name} is registered; {remedy}"
    return (
        f"no implementation of {selection.op_name} is left:\n{selection.explain()}\n"
        "change the settings named above, or install a backend that this machine can run"
    )
