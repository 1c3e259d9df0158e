"""What the user wants: the selection policy, from the configuration, set by code, or for the extent of a block."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from vllm_fl.errors import ConfigError, did_you_mean

from . import forks
from .parameters import ParameterPath
from .types import parse_token

PREFER_DEFAULT = "flagos"
PREFER_VENDOR = "vendor"
PREFER_REFERENCE = "reference"
_ORDERS: Mapping[str, tuple[str, ...]] = {
    PREFER_DEFAULT: (PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE),
    PREFER_VENDOR: (PREFER_VENDOR, PREFER_DEFAULT, PREFER_REFERENCE),
    PREFER_REFERENCE: (PREFER_REFERENCE, PREFER_DEFAULT, PREFER_VENDOR),
}
VALID_PREFER_VALUES = frozenset(_ORDERS)


@dataclass(frozen=True)
class SelectionPolicy:
    """Which implementations are wanted, and in which order.

    Args:
        prefer: the kind that is tried first: ``flagos``, ``vendor`` or ``reference``.
        strict: an exception other than ``NotImplementedError`` is passed on; nothing else is tried.
        per_op_order: ((operator, (token, ...)), ...): for that operator only what a token matches is a candidate, in
            the order of the tokens.
        deny_vendors: vendors whose implementations are not used.
        allow_vendors: the only vendors whose implementations are used; None allows all, an empty set none.
        flagos_enabled: False: no implementation of kind flagos.
        flagos_whitelist: the only operators that use flagos; None means all.
        flagos_blacklist: operators that do not use flagos.
        parameters: ((path, value as text), ...): what parameters of implementations are set to.
        origins: where each item was set, for messages: field name, ``op_backends.OPERATOR`` or ``parameters.PATH``, to
            a place; the key "" stands for all others. It takes no part in comparison.

    Raises:
        ConfigError: `prefer` or a token is not one, or an operator has two orders.
    """

    prefer: str = PREFER_DEFAULT
    strict: bool = False
    per_op_order: tuple[tuple[str, tuple[str, ...]], ...] = ()
    deny_vendors: frozenset[str] = frozenset()
    allow_vendors: frozenset[str] | None = None
    flagos_enabled: bool = True
    flagos_whitelist: frozenset[str] | None = None
    flagos_blacklist: frozenset[str] = frozenset()
    parameters: tuple[tuple[ParameterPath, str], ...] = ()
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.prefer not in VALID_PREFER_VALUES:
            raise ConfigError(
                f"prefer: {self.prefer!r} is not a kind ({', '.join(_ORDERS)}){did_you_mean(str(self.prefer), _ORDERS)}"
            )
        seen: set[str] = set()
        for op_name, tokens in self.per_op_order:
            if op_name in seen:
                raise ConfigError(f"per_op_order names the operator {op_name!r} twice; give one order")
            seen.add(op_name)
            for token in tokens:
                try:
                    parse_token(token)
                except ConfigError as error:
                    raise ConfigError(f"per_op_order of {op_name}: {error}") from None

    @classmethod
    def from_dict(
        cls,
        prefer: str = PREFER_DEFAULT,
        strict: bool = False,
        per_op_order: Mapping[str, Iterable[str]] | None = None,
        deny_vendors: Iterable[str] | None = None,
        allow_vendors: Iterable[str] | None = None,
    ) -> SelectionPolicy:
        """A policy from plain containers."""
        return cls(
            prefer=prefer,
            strict=strict,
            per_op_order=tuple(sorted((op, tuple(tokens)) for op, tokens in (per_op_order or {}).items())),
            deny_vendors=frozenset(deny_vendors or ()),
            allow_vendors=None if allow_vendors is None else frozenset(allow_vendors),
        )

    @property
    def per_op_order_dict(self) -> dict[str, list[str]]:
        return {op_name: list(tokens) for op_name, tokens in self.per_op_order}

    def get_per_op_order(self, op_name: str) -> list[str] | None:
        """The operator's own tokens, or None if it has none."""
        return next((list(tokens) for name, tokens in self.per_op_order if name == op_name), None)

    def get_parameters(self, op_name: str, impl_id: str) -> dict[ParameterPath, str]:
        """What is set of one implementation's parameters."""
        return {path: text for path, text in self.parameters if path[:2] == (op_name, impl_id)}

    def get_default_order(self) -> list[str]:
        """The tokens for operators without an order of their own."""
        return list(_ORDERS[self.prefer])

    def is_vendor_allowed(self, vendor: str) -> bool:
        return vendor not in self.deny_vendors and (self.allow_vendors is None or vendor in self.allow_vendors)

    def origin(self, item: str) -> str:
        """Where `item` was set."""
        return self.origins.get(item) or self.origins.get("") or "set by code"

    def derive(self, by: str, **fields: Any) -> SelectionPolicy:
        """This policy with some fields replaced; `by` becomes their origin."""
        origins = {**self.origins, **dict.fromkeys(fields, by)}
        return replace(self, **fields, origins=MappingProxyType(origins))

    def fingerprint(self) -> str:
        """Text that is equal for equal policies only."""

        def names(values: Iterable[str] | None) -> str:
            return "*" if values is None else ",".join(sorted(values))

        orders = ";".join(f"{op}={'|'.join(tokens)}" for op, tokens in sorted(self.per_op_order))
        return "/".join(
            (
                f"prefer={self.prefer}",
                f"strict={int(self.strict)}",
                f"order={orders}",
                f"deny={names(self.deny_vendors)}",
                f"allow={names(self.allow_vendors)}",
                f"flagos={int(self.flagos_enabled)}:{names(self.flagos_whitelist)}:{names(self.flagos_blacklist)}",
                f"parameters={';'.join(f'{path}={text}' for path, text in sorted(self.parameters))}",
            )
        )


class PolicyListener(Protocol):
    """A manager, to the policy: told about changes, and asked whether they are allowed."""

    def refuse_if_frozen(self, action: str) -> None: ...

    def policy_changed(self) -> None: ...

    def contexts_changed(self) -> None: ...


class _Override(NamedTuple):
    policy: SelectionPolicy | None
    depth: int  #: number of blocks that this context is in


_NO_OVERRIDE = _Override(None, 0)
_override: ContextVar[_Override] = ContextVar("vllm_fl_policy", default=_NO_OVERRIDE)


class PolicyManager:
    """The policy of this process and its overrides; one instance, :meth:`get_instance`.

    An override of the present context (thread or task) goes before the global policy, that before the configuration.
    Managers are told about each change, so that the call path need not ask.
    """

    _instance: PolicyManager | None = None
    _instance_lock = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._global: SelectionPolicy | None = None
        self._configured: SelectionPolicy | None = None
        self._epoch = 0
        self._open = 0
        self._listeners: WeakSet[PolicyListener] = WeakSet()
        forks.reset_in_child(self)

    @classmethod
    def get_instance(cls) -> PolicyManager:
        if cls._instance is None:
            with cls._instance_lock:
                if cls._instance is None:
                    cls._instance = cls()
        return cls._instance

    def get_policy(self) -> SelectionPolicy:
        """The policy that holds here and now.

        Raises:
            ConfigError: it is the configuration's, and that is wrong.
        """
        return _override.get().policy or self.base_policy()

    def base_policy(self) -> SelectionPolicy:
        """The policy outside every context."""
        if self._global is not None:
            return self._global
        if self._configured is None:
            self._configured = _configured_policy()
        return self._configured

    def override(self) -> SelectionPolicy | None:
        """The policy of the innermost context, or None outside of all."""
        return _override.get().policy

    def set_global_policy(self, policy: SelectionPolicy) -> SelectionPolicy:
        """Replace the policy of the process; returns the old one. Every operator is selected afresh.

        Raises:
            FrozenError: the selection is frozen.
        """
        if not isinstance(policy, SelectionPolicy):
            raise TypeError(f"expected a SelectionPolicy, got {policy!r}")
        self._refuse_if_frozen("set_global_policy")
        old = self.base_policy()
        with self._lock:
            self._global = policy
        self.bump_policy_epoch()
        return old

    def reset_global_policy(self) -> None:
        """Go back to the configuration, which is read again.

        Raises:
            FrozenError: the selection is frozen.
        """
        from vllm_fl.config import reset_settings

        self._refuse_if_frozen("reset_global_policy")
        with self._lock:
            self._global = self._configured = None
            reset_settings()
        self.bump_policy_epoch()

    def get_policy_epoch(self) -> int:
        """Number of changes so far."""
        return self._epoch

    def bump_policy_epoch(self) -> int:
        """Select every operator afresh; failures are forgotten. Returns the new epoch.

        Raises:
            FrozenError: the selection is frozen.
        """
        self._refuse_if_frozen("bump_policy_epoch")
        with self._lock:
            self._epoch += 1
            epoch = self._epoch
        for listener in self._audience():
            listener.policy_changed()
        return epoch

    @contextmanager
    def create_policy_context(self, policy: SelectionPolicy) -> Iterator[SelectionPolicy]:
        """See :func:`policy_context`."""
        if not isinstance(policy, SelectionPolicy):
            raise TypeError(f"expected a SelectionPolicy, got {policy!r}")
        self._refuse_if_frozen("policy_context")
        token = _override.set(_Override(policy, _override.get().depth + 1))
        try:
            self._count_contexts(+1)
            yield policy
        finally:
            # An async generator may be closed in another context than it ran in; that one ends with its task.
            with suppress(ValueError):
                _override.reset(token)
            self._count_contexts(-1)

    @property
    def contexts_open(self) -> int:
        """Number of policy contexts that are open in any thread."""
        return self._open

    def subscribe(self, listener: PolicyListener) -> None:
        """Tell `listener`, which is held weakly, about changes."""
        with self._lock:
            self._listeners.add(listener)

    def after_fork_in_child(self) -> None:
        self._lock = threading.RLock()
        type(self)._instance_lock = threading.Lock()
        self._open = _override.get().depth  # only the thread that forked lives on

    def _count_contexts(self, change: int) -> None:
        with self._lock:
            self._open = max(0, self._open + change)
        for listener in self._audience():
            listener.contexts_changed()

    def _audience(self) -> list[PolicyListener]:
        with self._lock:  # a manager that another thread makes would change the set meanwhile
            return list(self._listeners)

    def _refuse_if_frozen(self, action: str) -> None:
        for listener in self._audience():
            listener.refuse_if_frozen(action)


def _configured_policy() -> SelectionPolicy:
    from vllm_fl.config import get_settings

    settings = get_settings()
    switch = "use_flaggems" if settings.prefer_enabled else "prefer_enabled"
    fields = ("prefer", "strict", "allow_vendors", "deny_vendors", "flagos_whitelist", "flagos_blacklist")
    origins = {name: str(settings.origin(name)) for name in fields}
    origins["flagos_enabled"] = str(settings.origin(switch))
    origins.update({f"op_backends.{op}": str(settings.origin("op_backends", op)) for op in settings.op_backends})
    origins.update({f"parameters.{path}": str(settings.origin("parameters", path)) for path in settings.parameters})
    return replace(settings.policy(), origins=MappingProxyType(origins))


def get_policy() -> SelectionPolicy:
    """The policy that holds here and now (see :class:`PolicyManager`)."""
    return PolicyManager.get_instance().get_policy()


def set_global_policy(policy: SelectionPolicy) -> SelectionPolicy:
    """Replace the policy of the process; returns the old one."""
    return PolicyManager.get_instance().set_global_policy(policy)


def reset_global_policy() -> None:
    """Go back to the configuration, which is read again."""
    PolicyManager.get_instance().reset_global_policy()


def get_policy_epoch() -> int:
    """Number of policy changes so far."""
    return PolicyManager.get_instance().get_policy_epoch()


def bump_policy_epoch() -> int:
    """Select every operator afresh."""
    return PolicyManager.get_instance().bump_policy_epoch()


def policy_from_env() -> SelectionPolicy:
    """The policy of the configuration, read now."""
    from vllm_fl.config import reset_settings

    reset_settings()
    return _configured_policy()


def policy_from_config(config_path: str | Path) -> SelectionPolicy:
    """The policy of one configuration file, whatever the environment says.

    Raises:
        ConfigError: the file is missing or anything in it is wrong.
    """
    from vllm_fl.config import load_file

    settings = load_file(config_path)
    return replace(settings.policy(), origins=MappingProxyType({"": str(config_path)}))


def policy_context(policy: SelectionPolicy) -> AbstractContextManager[SelectionPolicy]:
    """Use `policy` inside the block, in this thread or task only.

    While any block is open, in whatever thread, each call looks up its context's policy; outside of blocks it does not.
    A task that was started inside keeps the policy only as long as some block is open. A function compiled by
    torch.compile inside keeps the selection that it was traced with; do not run it in two contexts at a time.

    Raises:
        FrozenError: the selection is frozen.
    """
    return PolicyManager.get_instance().create_policy_context(policy)


def with_strict_mode() -> AbstractContextManager[SelectionPolicy]:
    """The present policy, strict, inside the block."""
    return policy_context(get_policy().derive("with_strict_mode", strict=True))


def with_preference(prefer: str) -> AbstractContextManager[SelectionPolicy]:
    """The present policy with another preferred kind, inside the block."""
    return policy_context(get_policy().derive("with_preference", prefer=prefer))


def with_allowed_vendors(*vendors: str) -> AbstractContextManager[SelectionPolicy]:
    """The present policy with these vendors alone allowed, inside the block."""
    return policy_context(get_policy().derive("with_allowed_vendors", allow_vendors=frozenset(vendors)))


def with_denied_vendors(*vendors: str) -> AbstractContextManager[SelectionPolicy]:
    """The present policy with these vendors denied besides those that are already, inside the block."""
    policy = get_policy()
    denied = policy.deny_vendors | frozenset(vendors)
    return policy_context(policy.derive("with_denied_vendors", deny_vendors=denied))
