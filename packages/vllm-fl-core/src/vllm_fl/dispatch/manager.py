"""The manager: selects an implementation of each operator once, binds it, and keeps the binding right."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import ref

from vllm_fl.catalog import OpSpec
from vllm_fl.errors import FrozenError
from vllm_fl.logging import get_logger

from . import forks
from .bindings import Bindings
from .bound import BoundOp
from .default import get_default_manager, reset_default_manager
from .failures import FailureLog, FailureRecord
from .initialization import register_everything
from .links import Call
from .observers import Observers, Watcher
from .plan import OpPlan
from .planner import Planner
from .policy import PolicyManager, SelectionPolicy
from .registry import OpRegistry
from .selection import Selection
from .types import OpImpl

if TYPE_CHECKING:
    from vllm_fl.diagnostics.live import Tracer

__all__ = ["OpManager", "get_default_manager", "reset_default_manager"]

_NOBODY: Mapping[str, str] = MappingProxyType({})


class OpManager:
    """Dispatch over one registry.

    Selection happens at the first call of an operator and again after a change of the registry or the policy; in
    between a call goes straight to a bound function. All methods may be called from any thread.

    Args:
        registry: the implementations; a new, empty registry by default.
        register_builtins: register the installed backends and plug-ins at first use.
    """

    def __init__(self, registry: OpRegistry | None = None, *, register_builtins: bool = True) -> None:
        self.registry = registry if registry is not None else OpRegistry()
        self.failure_log = FailureLog()
        self._register_builtins = register_builtins
        self._initialized = self._initializing = False
        self._lock = threading.RLock()
        self._policies = PolicyManager.get_instance()
        self.observers = Observers()
        self.tracer: Tracer | None = None
        self._planner = Planner(self.registry, self.observers)
        self._plans: dict[str, OpPlan] = {}
        self._context_plans: dict[tuple[str, SelectionPolicy], OpPlan] = {}
        self._bindings = Bindings(self.find, self.look)
        self._frozen: str | None = None
        self.registry.subscribe(self)
        self._policies.subscribe(self)
        forks.reset_in_child(self)

    def call(self, op_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an operator.

        Raises:
            UnknownOperatorError: there is no such operator.
            NoImplementationError: no implementation is available, wanted and able to take the arguments.
            TypeError: the arguments do not fit the operator's signature.
        """
        try:
            fn = self._bindings.table[op_name]
        except KeyError:
            fn = self.find(op_name)
        return fn(*args, **kwargs)

    def bind(self, op_name: str) -> BoundOp:
        """The operator as an object to keep: the same for each call, whatever happens to the selection.

        Nothing is resolved yet, and a wrong name is an error of the first call.
        """
        bound = self._bindings.bound.get(op_name)
        if bound is None:
            with self._lock:
                bound = self._bindings.bind(op_name)
        return bound

    def find(self, op_name: str) -> Call:
        """The function that serves an operator now; it is bound. Raises as :meth:`call`."""
        with self._lock:
            return self._install(self._plan(op_name))

    def look(self, op_name: str) -> Call:
        """As :meth:`find`, and nothing is bound."""
        return self._plan(op_name).call

    def resolve(self, op_name: str) -> Call:
        """The chosen implementation's own function, with its parameters. Raises as :meth:`call`."""
        return self._plan(op_name).links[0].own

    def resolve_candidates(self, op_name: str) -> list[OpImpl]:
        """The accepted implementations, in the order in which they are tried. Raises as :meth:`call`."""
        return [link.impl for link in self._plan(op_name).links]

    def get_selected_impl_id(self, op_name: str) -> str:
        """The chosen implementation's id. Raises as :meth:`call`."""
        return self._plan(op_name).links[0].impl_id

    def selection(self, op_name: str, *, dtype: Any = None) -> Selection:
        """Every candidate of an operator, accepted or rejected, with the reason.

        Args:
            op_name: the operator.
            dtype: dtype of the first tensor argument, if only calls with that one are meant.

        Raises:
            UnknownOperatorError: there is no such operator.
        """
        self.ensure_initialized()
        with self._lock:
            policy = self._policies.get_policy()
            return self._planner.select(op_name, policy, self._demoted(op_name), dtype)

    def selections(self) -> dict[str, Selection]:
        """The selection of every operator of the catalogue and of the registry, by name."""
        self.ensure_initialized()
        return {op_name: self.selection(op_name) for op_name in self.registry.known_operators()}

    def fingerprint(self) -> str:
        """A hash that is equal only if every operator has the same accepted implementations in the same order, with the
        same parameters."""
        lines = []
        for op_name, selection in self.selections().items():
            impls = [f"{c.variant}{'!' if c.impl.opaque else ''}" for c in selection.accepted]
            lines.append(f"{op_name}={','.join(impls)}")
        lines.append(f"strict={self._policies.get_policy().strict}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]

    def failures(self) -> list[FailureRecord]:
        """The first failure of each implementation, whole, oldest first."""
        return self.failure_log.records()

    def get_failed_impls(self, op_name: str | None = None) -> dict[str, set[str]]:
        """The implementations that are out because they failed, by operator (one operator, or all that have any)."""
        with self._lock:
            failed = {name: set(demoted) for name in self._bindings.bound if (demoted := self._demoted(name))}
        return failed if op_name is None else {op_name: failed.get(op_name, set())}

    def clear_failed_impls(self, op_name: str | None = None) -> None:
        """Forget failures, of one operator or all: the implementations are tried again."""
        with self._lock:
            self.failure_log.clear(op_name)
            self._reset(self._bindings.table if op_name is None else [op_name])

    @property
    def policy_epoch(self) -> int:
        """Number of policy changes in this process."""
        return self._policies.get_policy_epoch()

    def bump_policy_epoch(self) -> int:
        """Select every operator afresh. Raises FrozenError if the selection is frozen."""
        return self._policies.bump_policy_epoch()

    def freeze(self, reason: str) -> None:
        """Make later changes of policy and registry raise FrozenError.

        Args:
            reason: continues the sentence "the selection is frozen because". A second call keeps the first reason.
        """
        with self._lock:
            self._frozen = self._frozen or reason
            self.registry.freeze(self._frozen)

    def thaw(self) -> None:
        """Allow changes again. Graphs that exist keep the implementations that they were compiled with."""
        with self._lock:
            self._frozen = None
            self.registry.freeze(None)

    @property
    def frozen(self) -> str | None:
        """Why the selection is frozen; None if it is not."""
        return self._frozen

    def count_calls(self, enabled: bool = True) -> None:
        """Count from zero which implementation serves how many calls, or stop counting.

        Costs nothing while off. Calls inside a compiled graph are not calls of Python: an implementation that was
        traced into the graph is counted when it is traced, one behind a custom operator at each run.
        """
        with self._lock:
            self.observers.count(enabled)
            self._relink()

    def call_counts(self) -> dict[tuple[str, str], int]:
        """(operator, impl_id) to the number of calls since counting began."""
        return self.observers.counts()

    def watch(self, watcher: Watcher) -> None:
        """Let `watcher` wrap every implementation from now on; allowed while the selection is frozen.

        Compiled graphs keep what they were compiled with, and call no watcher for what was traced into them.
        """
        with self._lock:
            self.observers.watch(watcher)
            self._relink()

    def unwatch(self, watcher: Watcher) -> None:
        """Call implementations without `watcher` again."""
        with self._lock:
            self.observers.unwatch(watcher)
            self._relink()

    def prepare_compile(self) -> None:
        """Bind every operator and define the custom operators that compiled graphs need.

        A graph from a cache on disk refers to them without anything having been traced in this process. Imports torch.
        """
        from .torch_ops import opaque_op

        self.ensure_initialized()
        for op_name in self.registry.list_operators():
            spec = self.registry.spec(op_name)
            if spec is not None and any(impl.opaque for impl in self.registry.get_implementations(op_name)):
                opaque_op(self.bind(op_name), spec, self._looker(op_name)).define()
            if self.selection(op_name).accepted:
                self.find(op_name)

    def ensure_initialized(self) -> None:
        """Register the installed backends and plug-ins, once; if this raises, the next call tries again.

        Raises:
            ConfigError: the configuration is wrong, or names an operator, vendor or implementation that nobody has.
        """
        if self._initialized:
            return
        with self._lock:
            if self._initialized or self._initializing:  # the latter: a plug-in asks while it registers
                return
            self._initializing = True
            try:
                if self._register_builtins:
                    register_everything(self)
                self._initialized = True
            finally:
                self._initializing = False

    def registry_changed(self) -> None:
        with self._lock:
            self._planner.forget_environment()
            # Initialisation may run while Dynamo traces a deferred function, which must stay where it is.
            self._reset(self._bindings.installed.copy() if self._initializing else self._bindings.table)

    def policy_changed(self) -> None:
        with self._lock:
            self._reset(self._bindings.table)

    def contexts_changed(self) -> None:
        with self._lock:
            if not self._policies.contexts_open:
                self._context_plans.clear()
            for op_name in list(self._bindings.table):
                plan = self._plans.get(op_name)
                if plan is not None:
                    self._install(plan)
                else:
                    self._bindings.defer(op_name)

    def refuse_if_frozen(self, action: str) -> None:
        if self._frozen is not None:
            raise FrozenError(
                f"{action}: the selection is frozen because {self._frozen}; change the policy before that, or call"
                " thaw() on the manager and compile again"
            )

    def demote(self, plan: OpPlan, reasons: Mapping[str, str]) -> None:
        with self._lock:
            for key, present in self._context_plans.items():
                if present is plan:
                    self._context_plans[key] = self._build(key[0], key[1], {**plan.demoted, **reasons})
                    return
            if self._plans.get(plan.op_name) is plan:
                policy = self._policies.base_policy()
                self._plans[plan.op_name] = new = self._build(plan.op_name, policy, {**plan.demoted, **reasons})
                self.rebound(new)

    def rebound(self, plan: OpPlan) -> None:
        with self._lock:
            # A deferred function stays where it is, lest code that was compiled through it be compiled again.
            if self._plans.get(plan.op_name) is plan and plan.op_name in self._bindings.installed:
                self._install(plan)

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        self._initializing = False
        self._planner.forget_environment()
        self._reset(self._bindings.table)

    def adopt(self, bound: dict[str, BoundOp], table: dict[str, Call], pickle: Callable[[str], BoundOp]) -> None:
        """Become the default manager: serve these bound operators. Raises ValueError if it has been used."""
        with self._lock:
            self._bindings.adopt(bound, table, pickle)

    def disown(self) -> None:
        """Leave the bound operators to another manager."""
        with self._lock:
            self.thaw()
            self._bindings.disown()
            self._plans.clear()

    def _looker(self, op_name: str) -> Callable[[], Call]:
        """:meth:`look` for a custom operator: it lives as long as the process and must not keep the manager alive."""
        if self._bindings.pickle is None:
            return partial(_look, ref(self), op_name)
        return lambda: get_default_manager().look(op_name)

    def _reset(self, op_names: Iterable[str]) -> None:
        """Forget what was decided about these operators."""
        for op_name in list(op_names):
            self._plans.pop(op_name, None)
            for key in [key for key in self._context_plans if key[0] == op_name]:
                del self._context_plans[key]
            self._bindings.defer(op_name)

    def _install(self, plan: OpPlan) -> Call:
        if self._policies.contexts_open:
            return self._bindings.install_lookup(plan.op_name)
        return self._bindings.install(plan.op_name, plan.call)

    def _plan(self, op_name: str) -> OpPlan:
        """The plan under the policy that holds here and now."""
        policy = self._policies.override()
        plan = self._plans.get(op_name) if policy is None else self._context_plans.get((op_name, policy))
        if plan is not None:
            return plan
        with self._lock:
            if policy is None:
                return self._base_plan(op_name)
            self.ensure_initialized()
            key = (op_name, policy)
            plan = self._context_plans.get(key) or self._build(op_name, policy, _NOBODY)
            self._context_plans[key] = plan
            return plan

    def _base_plan(self, op_name: str) -> OpPlan:
        plan = self._plans.get(op_name)
        if plan is None:
            self.ensure_initialized()
            plan = self._plans[op_name] = self._build(op_name, self._policies.base_policy(), _NOBODY)
            logger = get_logger(__name__)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", plan.selection.explain())
        return plan

    def _demoted(self, op_name: str) -> Mapping[str, str]:
        policy = self._policies.override()
        plan = self._plans.get(op_name) if policy is None else self._context_plans.get((op_name, policy))
        return plan.demoted if plan is not None else _NOBODY

    def _build(self, op_name: str, policy: SelectionPolicy, demoted: Mapping[str, str]) -> OpPlan:
        return self._planner.build(self, op_name, policy, demoted, partial(self._opaque_call, op_name))

    def _opaque_call(self, op_name: str, spec: OpSpec) -> Call:
        from .torch_ops import opaque_op

        return opaque_op(self.bind(op_name), spec, self._looker(op_name)).make_call()

    def _relink(self) -> None:
        """Build all plans again, because their links are watched otherwise; what failed stays out."""
        for (op_name, policy), plan in list(self._context_plans.items()):
            self._context_plans[op_name, policy] = self._build(op_name, policy, plan.demoted)
        for op_name, plan in list(self._plans.items()):
            self._plans[op_name] = new = self._build(op_name, self._policies.base_policy(), plan.demoted)
            self.rebound(new)


def _look(manager: ref[OpManager], op_name: str) -> Call:
    present = manager()
    if present is None:
        raise RuntimeError(f"the manager that a graph with {op_name} was compiled with is gone; compile again")
    return present.look(op_name)
