"""Selection: which implementations of an operator are candidates, in which order, and why not the others.

A pure function. Three questions stay apart and are answered in this order: what does the user want (policy), can the
platform run it (environment), do the arguments fit (dtype). A candidate is never dropped: it is accepted or rejected,
with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vllm_fl.catalog import OpSpec

from .parameters import Setting, settings_of, text_of, variant
from .policy import SelectionPolicy
from .types import AVAILABLE, Availability, BackendImplKind, OpImpl, dtype_name, parse_token


@dataclass(frozen=True)
class Environment:
    """Facts about this process.

    Args:
        device_type: torch device type of the platform, or None if it is not known.
        arch: device capability as ``major * 10 + minor``, or None if the device has none.
        availability: (operator, impl_id) to whether this process can run it; what is missing can be run.
    """

    device_type: str | None = None
    arch: int | None = None
    availability: Mapping[tuple[str, str], Availability] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Candidate:
    """The decision about one implementation.

    Args:
        impl: the implementation.
        accepted: whether it may serve calls.
        reason: why, in words.
        token: the token of the order that matched it, if any.
        origin: where the setting that decided was made; empty where no setting did.
        settings: the values of the implementation's parameters.
    """

    impl: OpImpl
    accepted: bool
    reason: str
    token: str | None = None
    origin: str = ""
    settings: tuple[Setting, ...] = ()

    @property
    def changed(self) -> tuple[Setting, ...]:
        """The settings that are not defaults."""
        return tuple(setting for setting in self.settings if not setting.is_default)

    @property
    def variant(self) -> str:
        """The implementation's id, and in brackets the settings that are not defaults."""
        return variant(self.impl.impl_id, {setting.name: text_of(setting.value) for setting in self.changed})


@dataclass(frozen=True)
class Selection:
    """All candidates of an operator: the accepted ones in the order in which they are tried, then the rejected ones."""

    op_name: str
    candidates: tuple[Candidate, ...]
    policy_fingerprint: str
    signature: str = ""

    @property
    def accepted(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if candidate.accepted)

    @property
    def chosen(self) -> Candidate | None:
        """The first accepted candidate, or None."""
        return next(iter(self.accepted), None)

    def explain(self) -> str:
        """The trace: a line for the operator and one for each candidate."""
        chosen = self.chosen
        head = f"{self.signature or self.op_name}: {chosen.impl.impl_id if chosen else 'no implementation'}"
        if not self.candidates:
            return f"{head}\n  none is registered"
        width = max(len(candidate.impl.impl_id) for candidate in self.candidates)
        lines = [head]
        for c in self.candidates:
            origin = f" ({c.origin})" if c.origin else ""
            lines.append(f"  {'+' if c.accepted else '-'} {c.impl.impl_id:<{width}}  {c.reason}{origin}")
            lines += [f"  {'':{width + 2}}  with {setting} ({setting.origin})" for setting in c.changed]
        return "\n".join(lines)


def select(
    spec: OpSpec | None,
    impls: Iterable[OpImpl],
    policy: SelectionPolicy,
    environment: Environment,
    *,
    demoted: Mapping[str, str] = MappingProxyType({}),
    dtype: Any = None,
    op_name: str = "",
) -> Selection:
    """Judge every implementation of one operator.

    Args:
        spec: the operator's specification, or None if it has none; then give `op_name`.
        impls: its implementations; all of them come back as candidates.
        policy: what the user wants.
        environment: what this process can run.
        demoted: impl_id to the reason why it is out until the next policy change.
        dtype: dtype of the first tensor argument, if the question is about calls with that dtype alone.
        op_name: the operator's name where `spec` is None.

    Raises:
        ConfigError: `policy` sets a parameter to what the implementation does not have.
    """
    impls = tuple(impls)
    op_name = spec.name if spec is not None else op_name or (impls[0].op_name if impls else "")
    order = _Order(op_name, policy)
    accepted: list[tuple[OpImpl, int]] = []
    rejected: list[Candidate] = []
    for impl in impls:
        place, token = order.place(impl)
        refusal = next(_refusals(impl, place, policy, order, environment, demoted, dtype), None)
        if refusal is None:
            accepted.append((impl, place))
        else:
            reason, origin = refusal
            settings = settings_of(impl, policy)
            rejected.append(Candidate(impl, False, f"rejected: {reason}", token, origin, settings))
    accepted.sort(key=lambda pair: (pair[0].priority, pair[0].impl_id), reverse=True)
    accepted.sort(key=lambda pair: pair[1])
    return Selection(
        op_name,
        (*_ranked(accepted, order, policy), *rejected),
        policy.fingerprint(),
        str(spec) if spec is not None else op_name,
    )


class _Order:
    """The token order that holds for an operator."""

    def __init__(self, op_name: str, policy: SelectionPolicy) -> None:
        own = policy.get_per_op_order(op_name)
        self.texts = policy.get_default_order() if own is None else own
        self.origin = policy.origin("prefer" if own is None else f"op_backends.{op_name}")
        self._tokens = [parse_token(text) for text in self.texts]

    def place(self, impl: OpImpl) -> tuple[int, str | None]:
        """(index, text) of the first token that matches; (-1, None) if none does."""
        for index, token in enumerate(self._tokens):
            if token.matches(impl):
                return index, self.texts[index]
        return -1, None

    def __str__(self) -> str:
        return "|".join(self.texts)


def _refusals(
    impl: OpImpl,
    place: int,
    policy: SelectionPolicy,
    order: _Order,
    environment: Environment,
    demoted: Mapping[str, str],
    dtype: Any,
) -> Iterator[tuple[str, str]]:
    """(reason, origin of the setting) for each rule against `impl`; lazily, so that a denied vendor is not probed."""
    if place < 0:
        yield f"no token of {order} matches", order.origin
    yield from _unwanted(impl, policy)
    available = environment.availability.get((impl.op_name, impl.impl_id), AVAILABLE)
    if not available:
        yield f"not available: {available.reason or 'no reason given'}", ""
    if impl.min_arch is not None and (environment.arch is None or environment.arch < impl.min_arch):
        have = "this device reports none" if environment.arch is None else f"this device has {environment.arch}"
        yield f"needs device capability {impl.min_arch}, {have}", ""
    if dtype is not None and not accepts_dtype(impl, dtype):
        allowed = ", ".join(sorted(dtype_name(d) for d in impl.supported_dtypes or ()))
        yield f"does not support {dtype_name(dtype)} (only {allowed})", ""
    if impl.impl_id in demoted:
        yield f"failed before: {demoted[impl.impl_id]}", ""


def _unwanted(impl: OpImpl, policy: SelectionPolicy) -> Iterator[tuple[str, str]]:
    if impl.kind is BackendImplKind.VENDOR and impl.vendor is not None:
        if impl.vendor in policy.deny_vendors:
            yield f"vendor {impl.vendor!r} is denied", policy.origin("deny_vendors")
        if policy.allow_vendors is not None and impl.vendor not in policy.allow_vendors:
            allowed = ", ".join(sorted(policy.allow_vendors)) or "nobody"
            yield f"vendor {impl.vendor!r} is not allowed (only {allowed})", policy.origin("allow_vendors")
    if impl.kind is BackendImplKind.DEFAULT:
        if not policy.flagos_enabled:
            yield "kind flagos is switched off", policy.origin("flagos_enabled")
        if policy.flagos_whitelist is not None and impl.op_name not in policy.flagos_whitelist:
            yield "the whitelist of kind flagos does not name the operator", policy.origin("flagos_whitelist")
        if impl.op_name in policy.flagos_blacklist:
            yield "the blacklist of kind flagos names the operator", policy.origin("flagos_blacklist")


def accepts_dtype(impl: OpImpl, dtype: Any) -> bool:
    """Whether `impl` accepts a first tensor argument of `dtype` (a torch dtype or its name)."""
    return impl.supported_dtypes is None or dtype_name(dtype) in {dtype_name(d) for d in impl.supported_dtypes}


def _ranked(accepted: list[tuple[OpImpl, int]], order: _Order, policy: SelectionPolicy) -> Iterator[Candidate]:
    before: OpImpl | None = None
    before_place = -1
    for impl, place in accepted:
        token = order.texts[place]
        if before is None:
            reason = f"chosen: first by the order {order}, priority {impl.priority}"
        elif place != before_place:
            reason = f"next: token {token!r} comes after {order.texts[before_place]!r}"
        elif impl.priority != before.priority:
            reason = f"next: priority {impl.priority} is below {before.priority}"
        else:
            reason = f"next: equal priority {impl.priority}, and its impl_id sorts lower"
        origin = order.origin if before is None or place != before_place else ""
        yield Candidate(impl, True, reason, token, origin, settings_of(impl, policy))
        before, before_place = impl, place
