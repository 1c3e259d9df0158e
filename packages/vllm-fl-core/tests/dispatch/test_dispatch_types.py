"""Tokens, implementations, and the helpers that name the nearest."""

from __future__ import annotations

import pytest
from dispatch_helpers import flagos, reference, silu, vendor

from vllm_fl.dispatch import Availability, BackendImplKind, BackendPriority, OpImpl, match_token, parse_token
from vllm_fl.dispatch.types import dtype_name
from vllm_fl.errors import ConfigError, did_you_mean, nearest

IMPLS = {
    "acme": vendor("acme", "silu_and_mul", silu(0)),
    "flagos": flagos("silu_and_mul", silu(0)),
    "reference": reference("silu_and_mul", silu(0)),
}


@pytest.mark.parametrize(
    ("token", "matched"),
    [
        ("flagos", {"flagos"}),
        ("vendor", {"acme"}),
        ("reference", {"reference"}),
        ("vendor:acme", {"acme"}),
        ("vendor:other", set()),
        ("impl:reference.torch", {"reference"}),
        ("impl:vendor.acme", {"acme"}),
        ("impl:vendor", set()),
    ],
)
def test_token_matches(token: str, matched: set[str]) -> None:
    assert {name for name, impl in IMPLS.items() if match_token(impl, token)} == matched
    assert str(parse_token(token)) == token


FORMS = "(flagos, reference, vendor, vendor:NAME, impl:ID)"


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("vendorr:cuda", f"'vendorr:cuda' is not a token {FORMS}; did you mean 'vendor:cuda'?"),
        ("flaggems", f"'flaggems' is not a token {FORMS}; did you mean 'flagos'?"),
        ("Vendor", f"'Vendor' is not a token {FORMS}; did you mean 'vendor'?"),
        ("vendor:", f"'vendor:' is not a token {FORMS}"),
        ("flagos:x", f"'flagos:x' is not a token {FORMS}"),
        ("", f"'' is not a token {FORMS}"),
        ("zzz", f"'zzz' is not a token {FORMS}"),
    ],
)
def test_unknown_token(token: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        match_token(IMPLS["acme"], token)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


def test_token_that_is_no_text() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_token(3)  # type: ignore[arg-type]
    assert str(caught.value) == f"3 is not a token {FORMS}"


def test_vendor_implementation_needs_a_vendor() -> None:
    with pytest.raises(ValueError) as caught:
        OpImpl("rms_norm", "vendor.acme", BackendImplKind.VENDOR, print)
    assert str(caught.value) == "rms_norm: implementation 'vendor.acme' is of kind vendor but names no vendor"


def test_availability_reasons() -> None:
    def probed(answer: object) -> Availability:
        def fn(x: object) -> object:
            return x

        def ask() -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        fn._is_available = ask  # type: ignore[attr-defined]
        return vendor("acme", "silu_and_mul", fn).availability()

    assert probed(True) == Availability(True)
    assert probed(False) == Availability(False, "its availability check says no")
    assert probed(Availability(False, "driver too old")) == Availability(False, "driver too old")
    assert probed(OSError("no libacme")) == Availability(False, "availability check raised OSError: no libacme")


def test_bound_method_is_available_when_its_object_is() -> None:
    class Acme:
        def is_available(self) -> Availability:
            return Availability(False, "no card")

        def silu_and_mul(self, x: object) -> object:
            return x

    assert vendor("acme", "silu_and_mul", Acme().silu_and_mul).availability() == Availability(False, "no card")


def test_kinds_and_priorities() -> None:
    assert [str(kind) for kind in BackendImplKind] == ["flagos", "vendor", "reference"]
    assert (BackendPriority.DEFAULT, BackendPriority.VENDOR, BackendPriority.REFERENCE) == (150, 100, 50)


def test_dtype_names() -> None:
    torch = pytest.importorskip("torch")
    assert dtype_name(torch.bfloat16) == dtype_name("bfloat16") == "bfloat16"


@pytest.mark.parametrize(
    ("name", "match"),
    [("rms_nrom", "rms_norm"), ("RMS-Norm", "rms_norm"), ("moe_summ", "moe_sum"), ("zzzzzz", None)],
)
def test_nearest(name: str, match: str | None) -> None:
    options = ["rms_norm", "moe_sum", "silu_and_mul"]
    assert nearest(name, options) == match
    assert did_you_mean(name, options) == (f"; did you mean {match!r}?" if match else "")
