"""Parameters that implementations declare: how they are declared, checked, bound and explained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from dispatch_helpers import FakeTensor, manager_of, reference, silu, vendor

from vllm_fl.catalog import OpSpec
from vllm_fl.dispatch import (
    Backend,
    BackendImplKind,
    Bucket,
    OpImpl,
    OpManager,
    Parameter,
    SelectionPolicy,
    bind,
    call_op,
    op_options,
    policy_context,
    register_backend,
    resolve_op,
    set_global_policy,
)
from vllm_fl.dispatch.default import adopt_default_manager
from vllm_fl.dispatch.parameters import ParameterPath, Value, parse_variant, variant
from vllm_fl.dispatch.policy import PolicyManager
from vllm_fl.errors import ConfigError, RegistrationError

BLOCK, WARPS = Parameter("block", (64, 128, 256), 64), Parameter("warps", (None, 4, 8), None)
BUCKETS = (Bucket("decode", 16), Bucket("prefill"))


def silu_and_mul(x: Any, *, block: int = 64, warps: int | None = None) -> Any:
    return (block, warps)


def acme(fn: Callable[..., Any] = silu_and_mul, **fields: Any) -> OpImpl:
    return vendor("acme", "silu_and_mul", fn, **{"parameters": (BLOCK, WARPS), **fields})


def policy(*given: tuple[str, str], **fields: Any) -> SelectionPolicy:
    """The default policy with some of acme's parameters; ``warps.decode`` is that of a bucket."""
    settings = []
    for name, text in given:
        parameter, _, bucket = name.partition(".")
        settings.append((ParameterPath("silu_and_mul", "vendor.acme", parameter, bucket), text))
    return SelectionPolicy(parameters=tuple(settings), **fields)


def tokens(number: int) -> FakeTensor:
    return FakeTensor(number, 8)


def test_nothing_is_passed_where_all_have_their_defaults(default: Callable[..., OpManager]) -> None:
    seen = []

    def fn(x: Any, **given: Any) -> Any:
        seen.append(given)

    default(acme(fn))
    call_op("silu_and_mul", tokens(1))
    with policy_context(policy(("block", "128"), ("warps", "auto"))):
        call_op("silu_and_mul", tokens(1))
    assert seen == [{}, {"block": 128}]
    assert resolve_op("silu_and_mul") is fn


def test_a_policy_sets_them_for_every_way_of_calling(default: Callable[..., OpManager]) -> None:
    manager = default(acme())
    bound = bind("silu_and_mul")
    assert bound.fn(tokens(1)) == (64, None)
    set_global_policy(policy(("block", "256"), ("warps", "8")))
    assert call_op("silu_and_mul", tokens(1)) == bound.fn(tokens(1)) == bound(tokens(1)) == (256, 8)
    assert resolve_op("silu_and_mul")(tokens(1)) == (256, 8)
    manager.count_calls()
    assert call_op("silu_and_mul", tokens(1)) == (256, 8)
    assert manager.call_counts() == {("silu_and_mul", "vendor.acme"): 1}
    manager.count_calls(False)
    set_global_policy(SelectionPolicy())
    assert call_op("silu_and_mul", tokens(1)) == (64, None)


def test_watchers_see_the_function_with_its_parameters(default: Callable[..., OpManager]) -> None:
    class Doubles:
        def around(self, impl: OpImpl, call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: (call(*args, **kwargs), call(*args, **kwargs))

    manager = default(acme())
    set_global_policy(policy(("block", "128")))
    manager.watch(Doubles())
    assert call_op("silu_and_mul", tokens(1)) == ((128, None), (128, None))


def refuses(x: Any) -> Any:
    raise NotImplementedError("never")


@pytest.mark.parametrize(
    "impls",
    [
        [acme(supports=lambda x: True)],
        [acme(supported_dtypes={"float32"})],
        [vendor("first", "silu_and_mul", refuses, priority=200), acme()],
    ],
    ids=["a check", "dtypes", "the second candidate"],
)
def test_conditions_and_fallback_keep_them(default: Callable[..., OpManager], impls: list[OpImpl]) -> None:
    default(*impls)
    set_global_policy(policy(("block", "128")))
    assert [call_op("silu_and_mul", tokens(1)) for _ in range(3)] == [(128, None)] * 3


@pytest.mark.parametrize("fields", [{}, {"supports": lambda x: True}], ids=["plain", "remembering"])
def test_buckets_go_by_the_number_of_tokens(default: Callable[..., OpManager], fields: dict[str, Any]) -> None:
    manager = default(acme(opaque=True, buckets=BUCKETS, **fields))
    set_global_policy(policy(("warps.decode", "4"), ("warps.prefill", "8"), ("block", "128")))
    expected = [(128, 4), (128, 4), (128, 8)]
    assert [call_op("silu_and_mul", tokens(number)) for number in (1, 16, 17)] == expected
    assert [resolve_op("silu_and_mul")(x=tokens(number)) for number in (1, 16, 17)] == expected
    manager.count_calls()
    assert [call_op("silu_and_mul", tokens(number)) for number in (1, 16, 17)] == expected


def test_a_bucket_that_is_not_named_has_the_default(default: Callable[..., OpManager]) -> None:
    default(acme(opaque=True, buckets=BUCKETS))
    set_global_policy(policy(("warps.prefill", "8")))
    assert [call_op("silu_and_mul", tokens(number)) for number in (16, 17)] == [(64, None), (64, 8)]
    set_global_policy(policy(("warps", "4"), ("warps.prefill", "8")))
    assert [call_op("silu_and_mul", tokens(number)) for number in (16, 17)] == [(64, 4), (64, 8)]


def test_an_operator_without_a_specification(default: Callable[..., OpManager], warnings: list[str]) -> None:
    manager = default(OpImpl("own", "vendor.a", BackendImplKind.VENDOR, silu_and_mul, vendor="a", parameters=(BLOCK,)))
    path = ParameterPath("own", "vendor.a", "block")
    set_global_policy(SelectionPolicy(parameters=((path, "128"),)))
    assert manager.call("own", 1) == (128, None)


def test_the_fingerprint_has_them() -> None:
    manager = manager_of(acme(), reference("silu_and_mul", silu("torch")))
    before = manager.fingerprint()
    with policy_context(policy(("block", "64"))):
        assert manager.fingerprint() == before
    with policy_context(policy(("block", "128"))):
        assert manager.fingerprint() != before
    assert policy(("block", "64")).fingerprint() != SelectionPolicy().fingerprint()


def test_the_trace_shows_those_that_are_not_defaults() -> None:
    manager = manager_of(acme(opaque=True, buckets=BUCKETS))
    with policy_context(policy(("warps.decode", "4"), ("block", "64"))):
        found = manager.selection("silu_and_mul")
    assert found.explain() == (
        "silu_and_mul(x): vendor.acme\n"
        "  + vendor.acme  chosen: first by the order flagos|vendor|reference, priority 100 (set by code)\n"
        "                 with warps.decode=4 (set by code)"
    )
    assert [str(setting) for setting in found.candidates[0].settings] == [
        "block.decode=64",
        "block.prefill=64",
        "warps.decode=4",
        "warps.prefill=auto",
    ]
    assert found.candidates[0].variant == "vendor.acme(warps.decode=4)"


def test_a_backend_declares_them_at_its_method() -> None:
    class Acme(Backend):
        name = vendor = "acme"

        def is_available(self) -> bool:
            return True

        @op_options(parameters=[BLOCK], buckets=BUCKETS, opaque=True)
        def silu_and_mul(self, x: Any, *, block: int = 64) -> Any:
            return block

    manager = manager_of()
    (impl,) = register_backend(manager.registry, Acme())
    assert (impl.parameters, impl.buckets) == ((BLOCK,), BUCKETS)
    with policy_context(policy(("block.decode", "128"))):
        assert [manager.call("silu_and_mul", tokens(number)) for number in (16, 17)] == [128, 64]


WRONG_SETTINGS = [
    (
        ("blok", "64"),
        "set by code: parameters.silu_and_mul.vendor.acme.blok: unknown parameter 'blok' (known: block, warps);"
        " did you mean 'block'?",
    ),
    (
        ("block", "100"),
        "set by code: parameters.silu_and_mul.vendor.acme.block: '100' is not one of 64, 128, 256",
    ),
    (
        ("block.decode", "64"),
        "set by code: parameters.silu_and_mul.vendor.acme.block.decode: unknown bucket 'decode'"
        " (it has none; give one value)",
    ),
]


@pytest.mark.parametrize(("setting", "message"), WRONG_SETTINGS, ids=["parameter", "value", "bucket"])
def test_a_policy_that_sets_what_there_is_not(setting: tuple[str, str], message: str) -> None:
    manager = manager_of(acme())
    with policy_context(policy(setting)), pytest.raises(ConfigError) as caught:
        manager.call("silu_and_mul", tokens(1))
    assert str(caught.value) == message


WRONG_PARAMETERS: list[tuple[tuple[str, tuple[Value, ...], Value], str]] = [
    (("a b", (1, 2), 1), "parameter 'a b': the name of an argument is expected"),
    (("a", (1, "x y"), 1), "parameter a: 'x y' cannot be written as one word"),
    (("a", (1,), 1), "parameter a: 1 are not at least two different values"),
    (("a", (1, 1), 1), "parameter a: 1, 1 are not at least two different values"),
    (("a", (None, "auto"), None), "parameter a: auto, auto are not at least two different values"),
    (("a", (True, False), None), "parameter a: the default None is not one of true, false"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG_PARAMETERS)
def test_wrong_declarations(fields: tuple[str, tuple[Value, ...], Value], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Parameter(*fields)
    assert str(caught.value) == message


_BUCKETS = "names are expected, with rising numbers of tokens, and None for the last"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parameters": (BLOCK, BLOCK)}, "a parameter is declared twice: block, block"),
        (
            {"buckets": BUCKETS},
            "buckets need opaque=True: torch.compile would decide once for all numbers of tokens",
        ),
        ({"opaque": True, "buckets": BUCKETS[:1]}, f"buckets decode: 16: {_BUCKETS}"),
        ({"opaque": True, "buckets": BUCKETS[::-1]}, f"buckets prefill: None, decode: 16: {_BUCKETS}"),
        ({"opaque": True, "buckets": (("a", 1), ("a", None))}, f"buckets a: 1, a: None: {_BUCKETS}"),
    ],
)
def test_declarations_that_contradict_themselves(fields: dict[str, Any], message: str) -> None:
    fields["buckets"] = tuple(Bucket(*bucket) for bucket in fields.get("buckets", ()))
    with pytest.raises(ValueError) as caught:
        acme(**fields)
    assert str(caught.value) == f"silu_and_mul: implementation 'vendor.acme': {message}"


def other_default(x: Any, *, block: int = 128) -> Any: ...


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        (
            acme(silu("x")),
            "it takes no keyword argument 'block', which it declares as a parameter",
        ),
        (acme(other_default), "'block' defaults to 128, the parameter to 64"),
        (
            acme(parameters=(Parameter("x", (1, 2), 1),)),
            "parameter 'x' has the name of an argument of the operator",
        ),
    ],
    ids=["not taken", "another default", "an argument"],
)
def test_functions_that_do_not_fit(impl: OpImpl, message: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        manager_of(impl)
    assert str(caught.value) == f"silu_and_mul(x): implementation 'vendor.acme' does not fit: {message}"


def test_buckets_need_a_tensor() -> None:
    def sizes(n, *, block=64):  # type: ignore[no-untyped-def]
        """Sizes."""

    def sizes_fake(n):  # type: ignore[no-untyped-def]
        """Sizes."""

    sizes_fake.__name__ = "sizes"
    sizes_fake.__annotations__ = {"n": "int", "return": "None"}
    manager = manager_of()
    manager.registry.register_spec(OpSpec(fake=sizes_fake, called_from="here"))
    with pytest.raises(RegistrationError) as caught:
        manager.registry.register_impl(
            vendor("acme", "sizes", sizes, opaque=True, parameters=(BLOCK,), buckets=BUCKETS)
        )
    assert str(caught.value) == (
        "sizes(n): implementation 'vendor.acme' does not fit: it has buckets of the number of tokens, and the operator"
        " has no tensor to tell that number from"
    )


@pytest.mark.parametrize("values", [{}, {"warps.decode": "4", "block": "auto"}])
def test_variants_can_be_read_back(values: dict[str, str]) -> None:
    assert parse_variant(variant("vendor.acme", values)) == ("vendor.acme", values)


torch = pytest.importorskip("torch")


def scaled(x: Any, *, block: int = 64) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return gate * up * block


def untraceable(x: Any, *, block: int = 64) -> Any:
    assert x.data_ptr() != 0
    return scaled(x, block=block)


@pytest.fixture
def compiled() -> Callable[[Any], Any]:
    torch._dynamo.reset()
    compiled: Callable[[Any], Any] = torch.compile(
        lambda x: call_op("silu_and_mul", x), backend="eager", fullgraph=True, dynamic=True
    )
    return compiled


def test_compiled_code_has_the_values_of_a_traced_implementation(compiled: Callable[[Any], Any]) -> None:
    adopt_default_manager(manager_of(acme(scaled, parameters=(BLOCK,))))
    x = torch.ones(3, 8)
    for block in (64, 128):
        set_global_policy(policy(("block", str(block))))
        assert float(compiled(x)[0, 0]) == block


def test_compiled_code_asks_an_opaque_implementation_in_each_run(compiled: Callable[[Any], Any]) -> None:
    adopt_default_manager(manager_of(acme(untraceable, parameters=(BLOCK,), buckets=BUCKETS, opaque=True)))
    set_global_policy(policy(("block.decode", "128"), ("block.prefill", "256")))
    found = [float(compiled(torch.ones(number, 8))[0, 0]) for number in (3, 16, 17, 40)]
    assert found == [128, 128, 256, 256]
    assert PolicyManager.get_instance().contexts_open == 0
