"""What every platform of ours tells vLLM."""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_fl.config import reset_settings
from vllm_fl.dispatch import OpImpl, get_default_manager, reset_default_manager, with_preference
from vllm_fl.dispatch.types import BackendImplKind
from vllm_fl.errors import ConfigError, NoImplementationError
from vllm_fl.integration import layers
from vllm_fl.integration.platform import FINGERPRINT_KEY, LAYERS_KEY, FLPlatform, OutOfTreePlatform, stamp_selection


def selector(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"use_mla": False, "use_sparse": False, **fields})


def test_the_attention_backend_comes_from_dispatch() -> None:
    expected = get_default_manager().call("attention_backend")
    assert current_platform.get_attn_backend_cls(None, selector()) == expected
    assert current_platform.get_attn_backend_cls(AttentionBackendEnum.CUSTOM, selector()) == expected


def test_a_path_with_a_colon_is_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = get_default_manager()
    monkeypatch.setattr(manager, "call", lambda name, **kwargs: "pkg.module:Backend")
    assert current_platform.get_attn_backend_cls(None, selector()) == "pkg.module.Backend"


def test_attention_that_nobody_has_is_an_error_with_the_reasons() -> None:
    with pytest.raises(NoImplementationError, match="no implementation of attention_backend takes these arguments"):
        current_platform.get_attn_backend_cls(None, selector(use_sparse=True))


def test_a_backend_that_the_platform_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError) as caught:
        current_platform.get_attn_backend_cls(AttentionBackendEnum.FLASH_ATTN, selector())
    assert str(caught.value) == (
        "--attention-backend FLASH_ATTN is not available on the platform 'cpu' (CUSTOM); leave it out to let vllm-fl"
        " choose (policy of the operator attention_backend)"
    )


def test_a_native_backend_of_the_platform_is_taken_as_asked() -> None:
    class Native(FLPlatform):
        native_attention_backends = frozenset({"FLASH_ATTN"})

    path = Native.get_attn_backend_cls(AttentionBackendEnum.FLASH_ATTN, selector())
    assert path == AttentionBackendEnum.FLASH_ATTN.get_path()


def test_configuration_without_graphs() -> None:
    config = VllmConfig()
    assert config.parallel_config.worker_cls == current_platform.worker_cls
    compilation = config.compilation_config
    assert compilation.mode == CompilationMode.VLLM_COMPILE
    assert compilation.backend == "inductor"
    assert compilation.custom_ops == ["all"]
    assert compilation.cudagraph_mode == CUDAGraphMode.NONE
    assert compilation.cudagraph_capture_sizes == compilation.compile_sizes == []


def test_adapters_are_refused_where_nothing_multiplies_them() -> None:
    class Without(FLPlatform):
        device_name = "acme"

    with pytest.raises(ConfigError) as caught:
        Without.check_and_update_config(SimpleNamespace(lora_config=object()))
    assert str(caught.value) == (
        "--enable-lora: the platform 'acme' has no kernels for adapters; merge the adapter into the checkpoint"
        " (merge_and_unload() of PEFT) and serve that"
    )


@pytest.mark.parametrize(("experts", "own", "refused"), [(8, False, True), (8, True, False), (0, False, False)])
def test_adapters_of_experts_need_vllms_own(
    monkeypatch: pytest.MonkeyPatch, experts: int, own: bool, refused: bool
) -> None:
    class Native(FLPlatform):
        has_native_layers = True

        @classmethod
        def get_punica_wrapper(cls) -> str:
            return "acme.Punica"

    replaced = [layer for layer in layers.LAYERS if not (own and layer.module == "moe")]
    monkeypatch.setattr(layers, "replaced", lambda native_vendor: replaced)
    model = SimpleNamespace(get_num_experts=lambda: experts)
    config: Any = SimpleNamespace(lora_config=object(), additional_config={}, model_config=model)
    with pytest.raises(ConfigError) if refused else nullcontext() as caught:
        Native._check_adapters(config)
    if refused:
        assert str(caught.value) == (
            "--enable-lora: adapters of experts need vLLM's own experts, and dispatch chooses others; set"
            " VLLM_FL_OOT_BLACKLIST=unquantized_fused_moe_method"
        )


def test_a_worker_that_the_user_names_is_kept_with_a_warning(warnings: list[str]) -> None:
    config = VllmConfig(parallel_config={"worker_cls": "some.Worker"})
    assert config.parallel_config.worker_cls == "some.Worker"
    assert warnings == [
        f"--worker-cls some.Worker: it has to be a subclass of {current_platform.worker_cls}; without FLWorkerMixin no"
        " layer of vLLM's goes through dispatch, and neither VLLM_FL_TUNED nor FlagGems' ATen functions are used"
    ]


def test_fusion_passes_are_off_and_a_request_for_one_is_answered(warnings: list[str]) -> None:
    config = VllmConfig(compilation_config={"pass_config": {"fuse_norm_quant": True, "enable_sp": True}})
    passes = config.compilation_config.pass_config
    assert not [name for name, value in vars(passes).items() if name.startswith("fuse_") and value]
    assert passes.enable_sp is passes.enable_qk_norm_rope_fusion is False
    assert warnings == [
        "pass_config.enable_sp, pass_config.fuse_norm_quant: this platform does not have these fusion passes of vLLM;"
        " they are switched off"
    ]


def test_variables_that_vllm_must_hand_to_other_hosts() -> None:
    assert {"USE_FLAGGEMS", "FLAGCX_PATH"} <= set(current_platform.additional_env_vars)
    assert not [name for name in current_platform.additional_env_vars if name.startswith("VLLM_")]


def test_native_layers_follow_vllms_rule() -> None:
    class Native(FLPlatform):
        has_native_layers = True

    config = VllmConfig()
    config.compilation_config.custom_ops = ["-rms_norm"]
    Native.apply_config_platform_defaults(config)
    assert "+silu_and_mul" in config.compilation_config.custom_ops
    assert "all" not in config.compilation_config.custom_ops
    assert "+rms_norm" not in config.compilation_config.custom_ops


def test_the_pass_manager_drops_what_needs_compiled_kernels() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_fl.integration.passes import NoPass

    manager = resolve_obj_by_qualname(current_platform.get_pass_manager_cls())()
    manager.configure(VllmConfig())
    assert isinstance(manager.fix_functionalization, NoPass)


def test_the_second_model_runner_is_refused_out_of_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    class Acme(OutOfTreePlatform):
        device_name = "acme"

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    Acme.pre_register_and_update()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigError) as caught:
        Acme.pre_register_and_update()
    assert str(caught.value) == (
        "environment variable VLLM_USE_V2_MODEL_RUNNER: '1'; the platform 'acme' has vLLM's first model runner only:"
        " unset the variable"
    )


@pytest.fixture
def manager(clean_settings: pytest.MonkeyPatch) -> Any:
    reset_default_manager()
    yield get_default_manager()
    reset_default_manager()


def key() -> str:
    return str(VllmConfig().compute_hash())


def test_the_cache_key_is_that_of_the_selection(manager: Any) -> None:
    first = key()
    assert key() == first
    manager.ensure_initialized()
    second_choice = OpImpl("silu_and_mul", "flagos.test", BackendImplKind.DEFAULT, lambda x: x, priority=150)
    manager.registry.register_impl(second_choice)
    other = key()
    assert other != first
    with with_preference("reference"):
        config = VllmConfig()
        assert config.compute_hash() not in (first, other)
        assert config.additional_config[FINGERPRINT_KEY] == manager.fingerprint()


def test_the_cache_key_is_that_of_the_layers(manager: Any, clean_settings: pytest.MonkeyPatch) -> None:
    first = key()
    clean_settings.setenv("VLLM_FL_OOT_BLACKLIST", "rms_norm")
    reset_settings()
    assert key() != first
    assert "rms_norm" not in VllmConfig().additional_config[LAYERS_KEY]


def test_the_users_additional_config_stays() -> None:
    config = VllmConfig(additional_config={"mine": 1})
    assert config.additional_config["mine"] == 1
    assert FINGERPRINT_KEY in config.additional_config


def test_an_additional_config_that_is_no_mapping_is_an_error() -> None:
    with pytest.raises(TypeError) as caught:
        stamp_selection(SimpleNamespace(additional_config=object()))
    assert str(caught.value) == (
        "additional_config is of type object; vllm-fl adds the selection of operators to it: pass a dict"
    )
