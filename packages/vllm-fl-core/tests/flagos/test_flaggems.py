"""The wrappers around FlagGems: what they hand over, what they refuse.

FlagGems itself needs a device. Without one a stand-in takes its place, so that layouts, orders of arguments and
refusals are tested; with one, and FlagGems installed, its own kernels are compared with the reference.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICE, check, cut, maker, reference

from vllm_fl.catalog import CATALOG
from vllm_fl.catalog.inputs.moe import make_routes
from vllm_fl.flagos import flaggems
from vllm_fl.flagos.register import FLAGGEMS_OPERATORS
from vllm_fl.plugins import PlatformChoice, load_object

usefixtures = pytest.mark.usefixtures("flag_gems")


@usefixtures
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 16), (0, 8)], ids=str)
def test_activations(shape: tuple[int, ...]) -> None:
    x = maker().normal(*shape)
    check(flaggems.silu_and_mul, "silu_and_mul", x)
    check(flaggems.silu_and_mul, "silu_and_mul", cut(x, shape[-1] + 8))
    check(flaggems.gelu_and_mul, "gelu_and_mul", x, "none")
    check(flaggems.gelu_and_mul, "gelu_and_mul", x, "tanh")


@usefixtures
@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 16), (0, 8)], ids=str)
def test_norm_leaves_its_arguments_alone(shape: tuple[int, ...]) -> None:
    make = maker()
    x, weight = make.normal(*shape), make.normal(shape[-1])
    check(flaggems.rms_norm, "rms_norm", x, None, weight, 1e-6)
    check(flaggems.rms_norm, "rms_norm", cut(x, 64), make.normal(*shape), weight, 1e-6)


@usefixtures
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("rotated", [16, 8])
@pytest.mark.parametrize("tokens", [0, 3])
def test_rotary(neox: bool, rotated: int, tokens: int) -> None:
    make = maker()
    cos, sin = make.normal(10, rotated).chunk(2, -1)
    positions = make.integers(0, 10, tokens, dtype=torch.int64)
    query, key = make.normal(tokens, 4, 16), make.normal(2, tokens, 16).transpose(0, 1)
    check(flaggems.rotary_embedding, "rotary_embedding", query, key, cos, sin, positions, neox)


@usefixtures
def test_cache_of_whole_blocks() -> None:
    make = maker()
    key_cache, value_cache = make.normal(2, 4, 8, 3, 16).transpose(2, 3)
    slots = torch.tensor([9, -1, 30, 0], device=DEVICE)
    key, value = make.normal(5, 3, 16), make.normal(5, 3, 16)
    check(flaggems.reshape_and_cache, "reshape_and_cache", key, value, key_cache, value_cache, slots)


@usefixtures
def test_routing_and_experts() -> None:
    make = maker()
    logits = make.normal(5, 8)
    outputs = (
        make.full(7.0, 5, 2),
        make.full(7, 5, 2, dtype=torch.int32),
        make.full(7, 5, 2, dtype=torch.int32),
    )
    check(flaggems.topk_softmax, "topk_softmax", *outputs, logits, True)
    for scoring in (0, 1, 2):
        scores = logits.softmax(-1) if scoring == 0 else logits
        check(flaggems.grouped_topk, "grouped_topk", scores, 4, 2, 2, True, 2.5, make.normal(8, scale=0.1), scoring)
    check(flaggems.moe_sum, "moe_sum", make.normal(5, 2, 12), make.full(7.0, 5, 12))
    half = maker(torch.float16)
    w1, w2 = half.normal(8, 12, 16, scale=0.2), half.normal(8, 16, 6, scale=0.2)
    ids = make.integers(0, 8, 5, 2)
    check(flaggems.fused_experts, "fused_experts", half.normal(5, 16), w1, w2, make.uniform(0, 1, 5, 2), ids)
    check(flaggems.fused_experts, "fused_experts", half.normal(0, 16), w1, w2, make.normal(0, 2), ids[:0])


@usefixtures
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "block_size"), [(7, 8, 16), (3, 128, 64), (9, 5, 7)])
def test_routes_by_expert(tokens: int, experts: int, block_size: int, padded: bool) -> None:
    args = (make_routes(maker(), tokens, experts, 3), block_size, experts, None, padded)
    spec = CATALOG["moe_align_block_size"]
    got = flaggems.moe_align_block_size(*args)
    assert [part.shape for part in got] == [part.shape for part in spec.fake(*args)]
    named = dict(zip(spec.signature.parameters, args, strict=False))
    assert spec.canonical is not None
    want = reference("moe_align_block_size")(*args)
    for one, two in zip(spec.canonical(named, got), spec.canonical(named, want), strict=True):
        assert torch.equal(one, two)


@usefixtures
@pytest.mark.parametrize("name", ["concat_and_cache_mla", "apply_repetition_penalties", "per_token_group_quant_fp8"])
def test_every_case_of_the_catalogue(name: str) -> None:
    assert _served(getattr(flaggems, name), name, torch.float32)


def _served(wrapper: Any, name: str, dtype: torch.dtype) -> int:
    """How many cases it computes, all rightly; the others it refuses."""
    served = 0
    for case in CATALOG[name].inputs(maker(dtype)):
        with suppress(NotImplementedError):
            check(wrapper, name, *case.args, **case.kwargs)
            served += 1
    return served


def _cache_arguments(**changed: Any) -> tuple[Any, ...]:
    rows, cache = torch.zeros(2, 3, 16), torch.zeros(4, 8, 3, 16).transpose(1, 2)
    arguments = {"key": rows, "value": rows, "key_cache": cache, "value_cache": cache, "slots": torch.arange(2)}
    return tuple({**arguments, **changed}.values())


ROWS, EXPERTS, IDS = torch.zeros(2, 8), torch.zeros(4, 8, 8), torch.zeros(2, 2, dtype=torch.int32)
HALF = ROWS.half()
BOTH = torch.zeros(4, 8, 3, 32).transpose(1, 2)


@usefixtures
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gelu_and_mul", (ROWS, "quick"), "approximate: 'quick' is not one of none, tanh"),
        ("rms_norm", (ROWS, None, None, 1e-6), "weight: FlagGems needs one"),
        (
            "rotary_embedding",
            (EXPERTS, None, ROWS, ROWS, IDS[0], True),
            "key: FlagGems rotates a query only together with a key",
        ),
        (
            "reshape_and_cache",
            _cache_arguments(key_cache=torch.zeros(4, 3, 8, 16)),
            "key_cache: FlagGems needs blocks of contiguous [block_size, H, D]",
        ),
        (
            "reshape_and_cache",
            _cache_arguments(key_cache=BOTH[..., :16], value_cache=BOTH[..., 16:]),
            "key_cache: FlagGems needs blocks of contiguous [block_size, H, D]",
        ),
        (
            "reshape_and_cache",
            _cache_arguments(value=torch.zeros(2, 3, 16, dtype=torch.float16)),
            "value: FlagGems does not convert torch.float16 to torch.float32",
        ),
        (
            "reshape_and_cache",
            _cache_arguments(value=torch.zeros(2, 16, 3).transpose(1, 2)),
            "value: FlagGems needs the heads of a token one after another",
        ),
        (
            "concat_and_cache_mla",
            (torch.zeros(2, 24), ROWS, EXPERTS, IDS[0]),
            "kv_c: latents of 24 entries, FlagGems takes powers of two or more than 512",
        ),
        (
            "concat_and_cache_mla",
            (ROWS, HALF, EXPERTS, IDS[0]),
            "k_pe: FlagGems does not convert torch.float16 to torch.float32",
        ),
        (
            "concat_and_cache_mla",
            (ROWS, ROWS, EXPERTS.transpose(1, 2), IDS[0]),
            "kv_cache: FlagGems needs contiguous rows",
        ),
        ("apply_repetition_penalties", (ROWS.T, ROWS.T, ROWS.T, ROWS), "logits: FlagGems needs contiguous ones"),
        (
            "per_token_group_quant_fp8",
            (ROWS, 8, 1e-10, False, True),
            "use_ue8m0: FlagGems rounds scales up by approximate logarithms",
        ),
        (
            "topk_softmax",
            (torch.zeros(2, 2), IDS, IDS, ROWS, False, torch.zeros(8)),
            "e_score_correction_bias: FlagGems takes none",
        ),
        (
            "topk_softmax",
            (torch.zeros(2, 2), IDS, IDS, torch.zeros(2, 2000)),
            "gating_output: 2000 experts, FlagGems takes at most 1024",
        ),
        (
            "grouped_topk",
            (ROWS, 2, 1, 2, True, 1.0),
            "bias: FlagGems needs one, and scores groups by their two highest experts only",
        ),
        (
            "grouped_topk",
            (ROWS, 2, 1, 3, True, 1.0, torch.zeros(8)),
            "topk: 3, FlagGems takes 1, 2, 4, 8, 16 or 32",
        ),
        (
            "grouped_topk",
            (ROWS.half(), 2, 1, 2, True, 1.0, torch.zeros(8)),
            "scores: FlagGems rounds biased scores to torch.float16",
        ),
        ("moe_sum", (EXPERTS.transpose(1, 2)[..., ::2], ROWS), "FlagGems needs a contiguous last dimension"),
        ("fused_experts", (HALF, EXPERTS, EXPERTS, ROWS, IDS, "gelu"), "activation: 'gelu', FlagGems has 'silu' only"),
        (
            "fused_experts",
            (HALF, EXPERTS, EXPERTS, ROWS, IDS, "silu", False, IDS[0]),
            "expert_map: FlagGems does not leave out experts of other ranks",
        ),
        (
            "fused_experts",
            (ROWS, EXPERTS, EXPERTS, ROWS, IDS),
            "hidden_states: FlagGems multiplies float32 in TF32",
        ),
        (
            "moe_align_block_size",
            (IDS, 16, 4, IDS[0]),
            "expert_map: FlagGems does not leave out experts of other ranks",
        ),
        (
            "moe_align_block_size",
            (IDS[:0], 16, 4),
            "topk_ids: FlagGems' kernels cannot be launched without routes",
        ),
    ],
)
def test_refusals(name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(NotImplementedError) as caught:
        getattr(flaggems, name)(*arguments)
    assert str(caught.value) == message


@usefixtures
def test_import_says_vendor_and_parts_the_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    flaggems.gems()
    assert os.environ["GEMS_VENDOR"] == "acme"
    assert os.environ["FLAGGEMS_DB_URL"] == f"sqlite:///{tmp_path / 'config_cache' / 'vllm_fl_rank3.db'}"
    assert (tmp_path / "config_cache").is_dir()


@usefixtures
def test_import_leaves_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMS_VENDOR", "mine")
    monkeypatch.setenv("FLAGGEMS_DB_URL", "sqlite:///:memory:")
    flaggems.gems()
    assert (os.environ["GEMS_VENDOR"], os.environ["FLAGGEMS_DB_URL"]) == ("mine", "sqlite:///:memory:")


@usefixtures
def test_the_platform_decides_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = PlatformChoice(SimpleNamespace(vendor="chipmaker"), "its probe succeeds")  # type: ignore[arg-type]
    monkeypatch.setattr("vllm_fl.plugins.resolve_platform", lambda: choice)
    flaggems.gems()
    assert os.environ["GEMS_VENDOR"] == "chipmaker"


@usefixtures
@pytest.mark.parametrize(("minor", "left"), [(6, 6), (7, 6), (9, 6)])
def test_launches_are_repaired(minor: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = SimpleNamespace(major_version=3, minor_version=minor)
    monkeypatch.setitem(sys.modules, "flag_gems.utils.libentry", launcher)  # type: ignore[arg-type]
    flaggems.gems()
    assert launcher.minor_version == left


@usefixtures
def test_an_import_that_fails_is_a_refusal_and_said_once(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("No device were detected on your machine !")

    monkeypatch.setattr(flaggems.importlib, "import_module", fail)
    reason = "importing flag_gems raised RuntimeError: No device were detected on your machine !"
    for _ in range(2):
        with pytest.raises(NotImplementedError) as caught:
            flaggems.silu_and_mul(ROWS)
        assert str(caught.value) == reason
    assert warnings == [f"FlagGems is not used: {reason}"]


@pytest.mark.parametrize("name", FLAGGEMS_OPERATORS)
def test_flaggems_itself_against_the_reference(name: str) -> None:
    """Every case of the catalogue is computed rightly or refused, and some are computed."""
    available = FLAGGEMS_OPERATORS[name]()
    if not available:
        pytest.skip(available.reason)
    wrapper = load_object(f"vllm_fl.flagos.flaggems:{name}")
    assert sum(_served(wrapper, name, getattr(torch, dtype)) for dtype in CATALOG[name].dtypes)
