"""Selection: the order, the reasons, and that no candidate is ever lost."""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_helpers import flagos, reference, silu, vendor
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl.catalog import CATALOG
from vllm_fl.dispatch import (
    Availability,
    BackendImplKind,
    Environment,
    OpImpl,
    Selection,
    SelectionPolicy,
    match_token,
    select,
)

SPEC = CATALOG["silu_and_mul"]
FLAGOS = flagos("silu_and_mul", silu(0))
ACME = vendor("acme", "silu_and_mul", silu(0))
OTHER = vendor("other", "silu_and_mul", silu(0), priority=120)
REFERENCE = reference("silu_and_mul", silu(0))
ALL = (REFERENCE, ACME, FLAGOS, OTHER)


def chosen(policy: SelectionPolicy, environment: Environment = Environment(), **more: Any) -> Selection:  # noqa: B008
    return select(SPEC, ALL, policy, environment, **more)


def ids(selection: Selection) -> list[str]:
    return [candidate.impl.impl_id for candidate in selection.accepted]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (SelectionPolicy(), ["default.flagos", "vendor.other", "vendor.acme", "reference.torch"]),
        (SelectionPolicy(prefer="vendor"), ["vendor.other", "vendor.acme", "default.flagos", "reference.torch"]),
        (SelectionPolicy(prefer="reference"), ["reference.torch", "default.flagos", "vendor.other", "vendor.acme"]),
        (
            SelectionPolicy(per_op_order=(("silu_and_mul", ("vendor:acme", "reference")),)),
            ["vendor.acme", "reference.torch"],
        ),
        (
            SelectionPolicy(per_op_order=(("silu_and_mul", ("impl:vendor.acme", "vendor")),)),
            ["vendor.acme", "vendor.other"],
        ),
        (SelectionPolicy(per_op_order=(("moe_sum", ("reference",)),)), ids(chosen(SelectionPolicy()))),
        (SelectionPolicy(per_op_order=(("silu_and_mul", ()),)), []),
    ],
    ids=["default", "vendor", "reference", "own order", "impl first", "other operator", "empty order"],
)
def test_order(policy: SelectionPolicy, order: list[str]) -> None:
    assert ids(chosen(policy)) == order


@pytest.mark.parametrize(
    ("policy", "impl_id", "reason", "item"),
    [
        (
            SelectionPolicy(deny_vendors=frozenset({"acme"})),
            "vendor.acme",
            "rejected: vendor 'acme' is denied",
            "deny_vendors",
        ),
        (
            SelectionPolicy(allow_vendors=frozenset({"other"})),
            "vendor.acme",
            "rejected: vendor 'acme' is not allowed (only other)",
            "allow_vendors",
        ),
        (
            SelectionPolicy(allow_vendors=frozenset()),
            "vendor.acme",
            "rejected: vendor 'acme' is not allowed (only nobody)",
            "allow_vendors",
        ),
        (
            SelectionPolicy(flagos_enabled=False),
            "default.flagos",
            "rejected: kind flagos is switched off",
            "flagos_enabled",
        ),
        (
            SelectionPolicy(flagos_whitelist=frozenset({"moe_sum"})),
            "default.flagos",
            "rejected: the whitelist of kind flagos does not name the operator",
            "flagos_whitelist",
        ),
        (
            SelectionPolicy(flagos_blacklist=frozenset({"silu_and_mul"})),
            "default.flagos",
            "rejected: the blacklist of kind flagos names the operator",
            "flagos_blacklist",
        ),
        (
            SelectionPolicy(per_op_order=(("silu_and_mul", ("vendor:other", "flagos")),)),
            "vendor.acme",
            "rejected: no token of vendor:other|flagos matches",
            "op_backends.silu_and_mul",
        ),
    ],
    ids=["denied", "not allowed", "nobody allowed", "flagos off", "whitelist", "blacklist", "token"],
)
def test_rejected_by_the_policy(policy: SelectionPolicy, impl_id: str, reason: str, item: str) -> None:
    selection = chosen(
        policy.derive("elsewhere").derive("here", **{item: getattr(policy, item)}) if hasattr(policy, item) else policy
    )
    candidate = next(c for c in selection.candidates if c.impl.impl_id == impl_id)
    assert not candidate.accepted
    assert candidate.reason == reason
    assert candidate.origin == ("here" if hasattr(policy, item) else "set by code")


def test_rejected_by_the_platform() -> None:
    needy = vendor("needy", "silu_and_mul", silu(0), min_arch=90)
    environment = Environment(
        "cuda",
        80,
        {("silu_and_mul", "vendor.acme"): Availability(False, "no libacme"), ("x", "y"): Availability(False)},
    )
    selection = select(SPEC, [ACME, needy], SelectionPolicy(), environment)
    assert [c.reason for c in selection.candidates] == [
        "rejected: not available: no libacme",
        "rejected: needs device capability 90, this device has 80",
    ]
    assert selection.chosen is None
    no_arch = select(SPEC, [needy], SelectionPolicy(), Environment())
    assert no_arch.candidates[0].reason == "rejected: needs device capability 90, this device reports none"
    assert ids(select(SPEC, [needy], SelectionPolicy(), Environment("cuda", 90))) == ["vendor.needy"]


def test_rejected_by_the_arguments_and_by_history() -> None:
    narrow = vendor("narrow", "silu_and_mul", silu(0), supported_dtypes={"bfloat16", "float16"})
    selection = select(SPEC, [narrow], SelectionPolicy(), Environment(), dtype="float32")
    assert selection.candidates[0].reason == "rejected: does not support float32 (only bfloat16, float16)"
    assert ids(select(SPEC, [narrow], SelectionPolicy(), Environment(), dtype="float16")) == ["vendor.narrow"]
    assert ids(select(SPEC, [narrow], SelectionPolicy(), Environment())) == ["vendor.narrow"]
    demoted = chosen(SelectionPolicy(), demoted={"default.flagos": "ValueError: no"})
    assert demoted.candidates[-1].reason == "rejected: failed before: ValueError: no"


def test_denied_vendor_is_not_probed() -> None:
    class Watched(dict[tuple[str, str], Availability]):
        def get(self, key: Any, default: Any = None) -> Any:
            asked.append(key[1])
            return default

    asked: list[str] = []
    chosen(SelectionPolicy(deny_vendors=frozenset({"acme"})), Environment(availability=Watched()))
    assert sorted(asked) == ["default.flagos", "reference.torch", "vendor.other"]


def test_explain() -> None:
    policy = SelectionPolicy(prefer="vendor", flagos_enabled=False).derive("my.yaml:3:1", prefer="vendor")
    twin = vendor("acme", "silu_and_mul", silu(0))
    selection = select(SPEC, [REFERENCE, FLAGOS, OTHER, twin], policy, Environment())
    assert selection.explain() == (
        "silu_and_mul(x): vendor.other\n"
        "  + vendor.other     chosen: first by the order vendor|flagos|reference, priority 120 (my.yaml:3:1)\n"
        "  + vendor.acme      next: priority 100 is below 120\n"
        "  + reference.torch  next: token 'reference' comes after 'vendor' (my.yaml:3:1)\n"
        "  - default.flagos   rejected: kind flagos is switched off (set by code)"
    )
    assert select(SPEC, [], policy, Environment()).explain() == (
        "silu_and_mul(x): no implementation\n  none is registered"
    )


def test_operator_without_specification() -> None:
    impl = vendor("acme", "mystery", lambda x: x)
    selection = select(None, [impl], SelectionPolicy(), Environment(), op_name="mystery")
    assert selection.op_name == selection.signature == "mystery"
    assert ids(selection) == ["vendor.acme"]


VENDORS = ["a", "b", "c"]
TOKENS = ["flagos", "reference", "vendor", *(f"vendor:{v}" for v in VENDORS), "impl:i0", "impl:i3"]


@st.composite
def implementations(draw: st.DrawFn) -> list[OpImpl]:
    impls = []
    for index in range(draw(st.integers(0, 7))):
        kind = draw(st.sampled_from(list(BackendImplKind)))
        impls.append(
            OpImpl(
                "silu_and_mul",
                f"i{index}",
                kind,
                silu(0),
                vendor=draw(st.sampled_from(VENDORS)) if kind is BackendImplKind.VENDOR else None,
                priority=draw(st.sampled_from([50, 100, 150])),
                supported_dtypes=draw(st.sampled_from([None, frozenset({"float16"}), frozenset({"float32"})])),
                min_arch=draw(st.sampled_from([None, 70, 90])),
            )
        )
    return impls


names = st.frozensets(st.sampled_from(VENDORS))
operators = st.frozensets(st.sampled_from(["silu_and_mul", "moe_sum"]))
policies = st.builds(
    SelectionPolicy,
    prefer=st.sampled_from(["flagos", "vendor", "reference"]),
    strict=st.booleans(),
    per_op_order=st.one_of(
        st.just(()),
        st.lists(st.sampled_from(TOKENS), max_size=4, unique=True).map(lambda t: (("silu_and_mul", tuple(t)),)),
    ),
    deny_vendors=names,
    allow_vendors=st.none() | names,
    flagos_enabled=st.booleans(),
    flagos_whitelist=st.none() | operators,
    flagos_blacklist=operators,
)
environments = st.builds(
    Environment,
    device_type=st.just("cuda"),
    arch=st.sampled_from([None, 80, 90]),
    availability=st.dictionaries(
        st.tuples(st.just("silu_and_mul"), st.sampled_from([f"i{n}" for n in range(7)])),
        st.sampled_from([Availability(True), Availability(False, "no")]),
    ),
)
histories = st.dictionaries(st.sampled_from([f"i{n}" for n in range(7)]), st.just("ValueError"), max_size=3)
dtypes = st.sampled_from([None, "float16", "float32"])


@given(implementations(), policies, environments, histories, dtypes)
def test_no_candidate_vanishes(
    impls: list[OpImpl],
    policy: SelectionPolicy,
    environment: Environment,
    demoted: dict[str, str],
    dtype: str | None,
) -> None:
    selection = select(SPEC, impls, policy, environment, demoted=demoted, dtype=dtype)
    assert sorted(c.impl.impl_id for c in selection.candidates) == sorted(impl.impl_id for impl in impls)
    assert all(c.reason for c in selection.candidates)
    assert list(selection.candidates) == [
        *(c for c in selection.candidates if c.accepted),
        *(c for c in selection.candidates if not c.accepted),
    ]
    assert all(c.impl.impl_id in selection.explain() for c in selection.candidates)


@given(implementations(), policies, environments, histories, dtypes)
def test_what_is_accepted_is_wanted_and_can_run(
    impls: list[OpImpl],
    policy: SelectionPolicy,
    environment: Environment,
    demoted: dict[str, str],
    dtype: str | None,
) -> None:
    order = policy.get_per_op_order("silu_and_mul")
    order = policy.get_default_order() if order is None else order

    def acceptable(impl: OpImpl) -> bool:
        answer = environment.availability.get((impl.op_name, impl.impl_id))
        return (
            any(match_token(impl, token) for token in order)
            and (impl.vendor is None or policy.is_vendor_allowed(impl.vendor))
            and (impl.kind is not BackendImplKind.DEFAULT or policy.flagos_enabled)
            and (impl.kind is not BackendImplKind.DEFAULT or "silu_and_mul" not in policy.flagos_blacklist)
            and (
                impl.kind is not BackendImplKind.DEFAULT
                or policy.flagos_whitelist is None
                or "silu_and_mul" in policy.flagos_whitelist
            )
            and (answer is None or answer.ok)
            and (impl.min_arch is None or (environment.arch is not None and environment.arch >= impl.min_arch))
            and (dtype is None or impl.supported_dtypes is None or dtype in impl.supported_dtypes)
            and impl.impl_id not in demoted
        )

    selection = select(SPEC, impls, policy, environment, demoted=demoted, dtype=dtype)
    assert {c.impl.impl_id for c in selection.accepted} == {impl.impl_id for impl in impls if acceptable(impl)}


@given(implementations(), policies, st.randoms())
def test_order_does_not_depend_on_registration(impls: list[OpImpl], policy: SelectionPolicy, random: Any) -> None:
    shuffled = list(impls)
    random.shuffle(shuffled)
    first, second = select(SPEC, impls, policy, Environment()), select(SPEC, shuffled, policy, Environment())
    assert ids(first) == ids(second)
    assert first == select(SPEC, impls, policy, Environment())


@given(implementations(), policies)
def test_order_follows_tokens_then_priority(impls: list[OpImpl], policy: SelectionPolicy) -> None:
    tokens = policy.get_per_op_order("silu_and_mul")
    tokens = policy.get_default_order() if tokens is None else tokens

    def rank(impl: OpImpl) -> tuple[int, int]:
        place = next(index for index, token in enumerate(tokens) if match_token(impl, token))
        return place, -impl.priority

    ranks = [rank(c.impl) for c in select(SPEC, impls, policy, Environment()).accepted]
    assert ranks == sorted(ranks)
