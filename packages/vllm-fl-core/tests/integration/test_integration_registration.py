"""Which layers are ours, under which names they are switched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_fl.config import get_settings, reset_settings
from vllm_fl.dispatch import get_default_manager, reset_default_manager, with_preference
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.errors import ConfigError
from vllm_fl.integration import layers

NAMES = [layer.name for layer in layers.LAYERS]


def test_the_names_are_those_that_users_know() -> None:
    assert NAMES == [
        "silu_and_mul",
        "gelu_and_mul",
        "rms_norm",
        "gemma_rms_norm",
        "rms_norm_gated",
        "rotary_embedding",
        "fused_moe",
        "unquantized_fused_moe_method",
        "gated_delta_net",
        "quant_fp8",
        "fp8_linear",
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({}, NAMES, id="all"),
        pytest.param({"VLLM_FL_OOT_ENABLED": "0"}, [], id="off"),
        pytest.param({"VLLM_FL_OOT_WHITELIST": "rms_norm,silu_and_mul"}, ["silu_and_mul", "rms_norm"], id="white"),
        pytest.param({"VLLM_FL_OOT_WHITELIST": ""}, [], id="white-empty"),
        pytest.param({"VLLM_FL_OOT_BLACKLIST": "rms_norm"}, [name for name in NAMES if name != "rms_norm"], id="black"),
    ],
)
def test_selected(environment: dict[str, str], expected: list[str], clean_settings: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        clean_settings.setenv(name, value)
    reset_settings()
    assert [layer.name for layer in layers.selected(get_settings())] == expected


@pytest.mark.parametrize("variable", ["VLLM_FL_OOT_WHITELIST", "VLLM_FL_OOT_BLACKLIST"])
def test_an_unknown_layer_is_an_error(variable: str, clean_settings: pytest.MonkeyPatch) -> None:
    clean_settings.setenv(variable, "rms_nrom")
    reset_settings()
    with pytest.raises(ConfigError) as caught:
        layers.register()
    key = variable.removeprefix("VLLM_FL_").lower()
    assert str(caught.value) == (
        f"environment variable {variable}: {key}: unknown layer 'rms_nrom' (known: {', '.join(sorted(NAMES))});"
        " did you mean 'rms_norm'?"
    )


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """vLLM's registry of replacements, empty for the test."""
    saved = dict(op_registry_oot)
    op_registry_oot.clear()
    yield op_registry_oot
    op_registry_oot.clear()
    op_registry_oot.update(saved)


def test_only_selected_layers_are_registered(registries: dict[str, Any], clean_settings: pytest.MonkeyPatch) -> None:
    clean_settings.setenv("VLLM_FL_OOT_WHITELIST", "silu_and_mul,rotary_embedding")
    reset_settings()
    layers.register()
    assert "SiluAndMul" in registries
    assert {"RotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding"} <= set(registries)
    assert not {"RMSNorm", "GeluAndMul", "MoERunner"} & set(registries)


def test_the_replacement_of_another_plugin_is_left(registries: dict[str, Any], warnings: list[str]) -> None:
    class Theirs(SiluAndMul):  # type: ignore[misc]
        pass

    SiluAndMul.register_oot(Theirs)
    layers.replace(SiluAndMul, type("Ours", (SiluAndMul,), {"__module__": "vllm_fl.x"}), "silu_and_mul")
    assert registries["SiluAndMul"] is Theirs
    assert warnings == [
        f"vLLM's SiluAndMul is already replaced by {__name__}.{Theirs.__qualname__} of another plug-in;"
        " vllm-fl leaves it so"
    ]


def test_what_is_not_a_layer_cannot_be_replaced() -> None:
    with pytest.raises(TypeError) as caught:
        layers.replace(dict, dict)
    assert str(caught.value) == "builtins.dict is not a replaceable layer of vLLM"


@pytest.mark.parametrize(
    ("given", "silu_is_ours", "gelu_is_ours"),
    [
        pytest.param([], True, True, id="default"),
        pytest.param(["-silu_and_mul"], False, True, id="one-off"),
        pytest.param(["none"], False, False, id="all-off"),
        pytest.param(["none", "+silu_and_mul"], True, False, id="one-on"),
    ],
)
@pytest.mark.parametrize("mode", [0, 3], ids=["eager", "inductor"])
def test_custom_ops_switch_our_forwards(
    given: list[str], silu_is_ours: bool, gelu_is_ours: bool, mode: int, spy: Any
) -> None:
    import torch

    config = VllmConfig(compilation_config={"mode": mode, "custom_ops": list(given)})
    with set_current_vllm_config(config):
        silu, gelu = SiluAndMul(compile_native=False), GeluAndMul()
    for layer, ours, operator in ((silu, silu_is_ours, "silu_and_mul"), (gelu, gelu_is_ours, "gelu_and_mul")):
        seen = spy(operator)
        layer(torch.randn(2, 8))
        assert seen.calls == ours


def test_names_are_added_where_vllm_keeps_its_own_layers() -> None:
    for given, expected in (
        ([], {f"+{layer.custom_op}" for layer in layers.LAYERS if layer.custom_op}),
        (
            ["-rms_norm"],
            {"-rms_norm", *(f"+{x.custom_op}" for x in layers.LAYERS if x.custom_op not in (None, "rms_norm"))},
        ),
        (["none"], {"none"}),
    ):
        custom_ops = list(given)
        layers.enable(custom_ops)
        assert set(custom_ops) == expected
        assert len(custom_ops) == len(expected)


@pytest.mark.usefixtures("vllm_config")
def test_the_hw_agnostic_twins_are_ours(spy: Any) -> None:
    import torch

    activation = layers.hw_agnostic("activation", "SiluAndMul")
    norm = layers.hw_agnostic("layernorm", "RMSNorm")
    if activation is None or norm is None:
        pytest.skip("this vLLM has no hardware-agnostic layers")
    silu, rms = spy("silu_and_mul"), spy("rms_norm")
    activation()(torch.randn(2, 8))
    norm(8)(torch.randn(2, 8))
    assert (silu.calls, rms.calls) == (1, 1)
    assert RMSNorm is not norm


def test_hw_agnostic_layers_may_be_absent() -> None:
    assert layers.hw_agnostic("attention", "Attention") is None
    assert layers.hw_agnostic("activation", "Nothing") is None


@pytest.mark.parametrize(
    ("operators", "expected"),
    [
        pytest.param({"rms_norm"}, set(NAMES) - {"rms_norm"}, id="one-operator"),
        pytest.param({"topk_softmax", "topk_sigmoid"}, set(NAMES), id="not-all-of-a-layer"),
        pytest.param({"topk_softmax", "topk_sigmoid", "grouped_topk"}, set(NAMES) - {"fused_moe"}, id="all-of-a-layer"),
    ],
)
def test_a_layer_of_the_native_vendor_stays_vllms(operators: set[str], expected: set[str]) -> None:
    reset_default_manager()
    manager = get_default_manager()
    manager.ensure_initialized()
    vendor = BackendImplKind.VENDOR
    for name in operators:
        impl = manager.registry.get_implementation(name, "reference.torch")
        assert impl is not None
        manager.registry.register_impl(replace(impl, impl_id="vendor.acme", kind=vendor, vendor="acme", priority=100))
    with with_preference("vendor"):
        assert {layer.name for layer in layers.replaced("acme")} == expected
        assert {layer.name for layer in layers.replaced("other")} == set(NAMES)
    assert {layer.name for layer in layers.replaced(None)} == set(NAMES)
    reset_default_manager()
