"""Parameters of implementations in files: layers, origins, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vllm_fl.config import KEYS, KnownNames, Settings, check_file
from vllm_fl.dispatch import BackendImplKind, Bucket, OpImpl, Parameter
from vllm_fl.dispatch.parameters import ParameterPath, flat, nested
from vllm_fl.errors import ConfigError

Load = Callable[..., Settings]

_WARPS = "parameters:\n  moe_sum:\n    flagos.triton:\n      warps: "


def moe_sum(input: Any, output: Any, *, warps: int = 4, block: int = 64) -> None:
    raise AssertionError("nothing is computed here")


IMPLEMENTATIONS = [
    OpImpl(
        "moe_sum",
        "flagos.triton",
        BackendImplKind.DEFAULT,
        moe_sum,
        opaque=True,
        parameters=(Parameter("warps", (2, 4, 8), 4), Parameter("block", (64, 128), 64)),
        buckets=(Bucket("decode", 256), Bucket("prefill")),
    ),
    OpImpl("moe_sum", "reference.torch", BackendImplKind.REFERENCE, moe_sum),
]


def path(parameter: str, bucket: str = "") -> ParameterPath:
    return ParameterPath("moe_sum", "flagos.triton", parameter, bucket)


def test_a_parameter_has_one_value_or_one_for_each_bucket(load: Load) -> None:
    settings = load("parameters: {moe_sum: {flagos.triton: {warps: 8, block: {decode: 64, prefill: 128}}}}\n")
    assert settings.parameters == {
        path("warps"): "8",
        path("block", "decode"): "64",
        path("block", "prefill"): "128",
    }
    assert settings.policy().parameters == tuple(sorted(settings.parameters.items()))


def test_the_highest_layer_that_names_a_parameter_wins_with_all_its_buckets(load: Load) -> None:
    platform = f"{_WARPS}{{decode: 2, prefill: 8}}\n      block: 128\n"
    settings = load(f"{_WARPS}4\n", platform)
    rows = [(row.item, row.value, str(row.origin)) for row in settings.describe() if row.key == "parameters"]
    assert rows == [
        ("moe_sum.flagos.triton.block", "128", "platform file ascend.yaml:5:7"),
        ("moe_sum.flagos.triton.warps", "4", "my.yaml:4:7"),
    ]
    buckets = load(f"{_WARPS}{{prefill: 8}}\n", f"{_WARPS}2\n")
    assert buckets.parameters == {path("warps", "prefill"): "8"}
    assert str(buckets.origin("parameters", path("warps", "prefill"))) == "my.yaml:4:15"


def test_plain_form() -> None:
    settings = {path("block", "decode"): "64", path("warps"): "auto"}
    plain = nested(settings.items())
    assert plain == {"moe_sum": {"flagos.triton": {"block": {"decode": 64}, "warps": "auto"}}}
    assert flat(plain) == settings


SHAPES = {
    "list of operators": (
        "parameters: [moe_sum]\n",
        "my.yaml:1:13: parameters: a list is not a mapping of operators to implementations, such as "
        "'rms_norm: {flagos.triton: {warps: 4}}'",
    ),
    "no implementation": (
        "parameters:\n  moe_sum: {warps}\n",
        "my.yaml:2:18: parameters.moe_sum.warps: has no value; expected a mapping of parameters to values, such as "
        "'warps: 4'",
    ),
    "parameters beside the operator": (
        "parameters:\n  moe_sum: 4\n",
        "my.yaml:2:12: parameters.moe_sum: '4' is not a mapping of implementations to parameters, such as "
        "'flagos.triton: {warps: 4}'",
    ),
    "list of values": (
        f"{_WARPS}[2, 4]\n",
        "my.yaml:4:14: parameters.moe_sum.flagos.triton.warps: a list is not a value, or a mapping of buckets to "
        "values, such as 'decode: 4'",
    ),
    "empty bucket": (
        f"{_WARPS}{{decode: }}\n",
        "my.yaml:4:14: parameters.moe_sum.flagos.triton.warps: has no value; expected a value for the bucket 'decode'",
    ),
    "wrong operator": (
        "parameters: {moe sum: {}}\n",
        "my.yaml:1:14: parameters: 'moe sum' is not the name of an operator",
    ),
}


@pytest.mark.parametrize(("text", "expected"), SHAPES.values(), ids=SHAPES)
def test_wrong_shapes(load: Load, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text)
    assert str(caught.value) == expected


NAMES = {
    "operator": (
        "parameters: {moe_summ: {x: {y: 1}}}\n",
        "my.yaml:1:29: parameters: unknown operator 'moe_summ' (known: moe_sum, rms_norm); did you mean 'moe_sum'?",
    ),
    "implementation": (
        "parameters: {moe_sum: {flagos.tritn: {warps: 2, block: 64}}}\n",
        "my.yaml:1:49: parameters: unknown implementation 'flagos.tritn' of 'moe_sum' "
        "(known: flagos.triton, reference.torch); did you mean 'flagos.triton'?",
    ),
    "operator without implementations": (
        "parameters: {rms_norm: {vendor.acme: {warps: 2}}}\n",
        "my.yaml:1:39: parameters: unknown implementation 'vendor.acme' of 'rms_norm' (none is known)",
    ),
    "parameter": (
        "parameters: {moe_sum: {flagos.triton: {warp: 2}}}\n",
        "my.yaml:1:40: parameters.moe_sum.flagos.triton.warp: unknown parameter 'warp' (known: warps, block); "
        "did you mean 'warps'?",
    ),
    "implementation without parameters": (
        "parameters: {moe_sum: {reference.torch: {warps: 2}}}\n",
        "my.yaml:1:42: parameters.moe_sum.reference.torch.warps: unknown parameter 'warps' (it has none)",
    ),
    "value": (f"{_WARPS}3\n", "my.yaml:4:7: parameters.moe_sum.flagos.triton.warps: '3' is not one of 2, 4, 8"),
    "bucket": (
        f"{_WARPS}{{deocde: 2}}\n",
        "my.yaml:4:15: parameters.moe_sum.flagos.triton.warps.deocde: unknown bucket 'deocde' "
        "(known: decode, prefill); did you mean 'decode'?",
    ),
    "value of a bucket": (
        f"{_WARPS}{{decode: 2, prefill: 16}}\n",
        "my.yaml:4:26: parameters.moe_sum.flagos.triton.warps.prefill: '16' is not one of 2, 4, 8",
    ),
}


@pytest.mark.parametrize(("text", "expected"), NAMES.values(), ids=NAMES)
def test_what_no_implementation_has_declared(load: Load, text: str, expected: str) -> None:
    known = KnownNames(["moe_sum", "rms_norm"], vendors=[], impl_ids=[], implementations=IMPLEMENTATIONS)
    settings = load(text)
    with pytest.raises(ConfigError) as caught:
        settings.check_names(known)
    assert str(caught.value) == expected
    assert [str(p) for p in check_file("my.yaml", known)] == [expected]


def test_the_key_is_for_vendors_too() -> None:
    assert KEYS["parameters"].in_platform_file
