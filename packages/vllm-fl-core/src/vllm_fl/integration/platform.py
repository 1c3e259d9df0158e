"""What the platforms of all backends share. No vendor is named here: a backend's class fills in the device."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from vllm_fl.config import ENVIRONMENT
from vllm_fl.dispatch import get_default_manager
from vllm_fl.engines import ALL_LAYERS
from vllm_fl.errors import ConfigError
from vllm_fl.logging import get_logger
from vllm_fl.plugins import communicator_class
from vllm_fl.tune.table import use_tuned

from . import compat

__all__ = ["FINGERPRINT_KEY", "LAYERS_KEY", "FLPlatform", "OutOfTreePlatform", "native_vendor_of", "stamp_selection"]

#: Keys in ``vllm_config.additional_config`` under which the selection enters vLLM's hash.
FINGERPRINT_KEY = "vllm_fl_dispatch_fingerprint"
LAYERS_KEY = "vllm_fl_layers"


class FLPlatform(Platform):
    """Base of every platform of a backend distribution; put it before the class of vLLM that it extends, if any.

    The attention backend, the layers and the operators behind them come from dispatch; compilation is set up so that
    they are reached, and so that no cached graph of another selection is taken.
    """

    # vLLM hands variables that begin with VLLM_ to the workers of a Ray cluster, and of others those named here.
    additional_env_vars: ClassVar[list[str]] = [name for name in ENVIRONMENT if not name.startswith("VLLM_")]

    #: Path of the worker class, one with FLWorkerMixin; empty leaves the choice to the class of vLLM.
    worker_cls: ClassVar[str] = ""
    #: Whether vLLM's compiled kernels (``vllm._C``) are loaded.
    uses_compiled_kernels: ClassVar[bool] = False
    #: Whether vLLM's fusion passes, which match its own compiled kernels, can run.
    supports_fusion_passes: ClassVar[bool] = False
    #: Whether vLLM's layers have kernels for this device, so that those we do not replace follow vLLM's own rule.
    has_native_layers: ClassVar[bool] = False
    #: The vendor whose implementations are the very kernels that vLLM's layers call, if there is one: a layer stays
    #: vLLM's own where dispatch chooses them. Under torch.compile vLLM may then trace its PyTorch form instead.
    native_vendor: ClassVar[str | None] = None
    #: Path of the communicator where none is chosen by the configuration; empty leaves it to the class of vLLM.
    communicator_cls: ClassVar[str] = ""
    #: Names of ``--attention-backend`` that are served besides CUSTOM, the dispatched one.
    native_attention_backends: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        """vLLM makes its platform once a process, before it loads any plug-in, and perhaps without loading one."""
        compat.guard_accelerator(self.device_type)

    @classmethod
    def import_kernels(cls) -> None:
        if cls.uses_compiled_kernels:
            super().import_kernels()
        compat.define_missing_symbols()

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Path of the attention backend: the one the user named, else the operator ``attention_backend``'s.

        Raises:
            ValueError: ``--attention-backend`` names one that this platform does not have.
            NoImplementationError: no implementation has an attention of that sort.
        """
        name = getattr(selected_backend, "name", None)
        if name in cls.native_attention_backends:
            return str(selected_backend.get_path())
        if name not in (None, "CUSTOM"):
            allowed = ", ".join(["CUSTOM", *sorted(cls.native_attention_backends)])
            raise ValueError(
                f"--attention-backend {name} is not available on the platform {cls.get_device_name()!r} ({allowed});"
                " leave it out to let vllm-fl choose (policy of the operator attention_backend)"
            )
        path = get_default_manager().call(
            "attention_backend",
            use_mla=bool(attn_selector_config.use_mla),
            use_sparse=bool(getattr(attn_selector_config, "use_sparse", False)),
        )
        return str(path).replace(":", ".")

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Path of the communicator class: the chosen plug-in's, else the platform's own.

        Raises:
            PlatformError: the chosen one is not installed or cannot be used; it is never replaced by another.
        """
        return communicator_class(cls.device_type) or cls.communicator_cls or str(super().get_device_communicator_cls())

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return "vllm_fl.integration.passes.FLPassManager"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        from . import layers

        super().apply_config_platform_defaults(vllm_config)
        # Before the layers, which depend on the selection. A configuration that vLLM derives from an engine's, such as
        # that of a draft model, has the stamp already: the selection stays the engine's.
        additional = vllm_config.additional_config
        is_stamped = isinstance(additional, dict) and FINGERPRINT_KEY in additional
        if vllm_config.model_config is not None and not is_stamped:
            use_tuned(vllm_config)
        compilation = vllm_config.compilation_config
        if not cls.supports_fusion_passes:
            _switch_off_fusions(compilation.pass_config)
        # Under inductor vLLM's default is "none": it would trace its own PyTorch forwards and never ask ours.
        if cls.has_native_layers:
            layers.enable(compilation.custom_ops, native_vendor_of(vllm_config))
        elif not {"all", "none"} & set(compilation.custom_ops):
            compilation.custom_ops.append("all")

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.lora_config is not None:
            cls._check_adapters(vllm_config)
        parallel = vllm_config.parallel_config
        if cls.worker_cls and parallel.worker_cls == "auto":
            parallel.worker_cls = cls.worker_cls
        elif cls.worker_cls and parallel.worker_cls != cls.worker_cls:
            get_logger(__name__).warning(
                "--worker-cls %s: it has to be a subclass of %s; without FLWorkerMixin no layer of vLLM's goes through"
                " dispatch, and neither VLLM_FL_TUNED nor FlagGems' ATen functions are used",
                parallel.worker_cls,
                cls.worker_cls,
            )
        super().check_and_update_config(vllm_config)
        if not cls.support_static_graph_mode():
            compilation = vllm_config.compilation_config
            compilation.cudagraph_capture_sizes = []
            if compilation.compile_sizes is None:
                compilation.compile_sizes = []
        stamp_selection(vllm_config)

    @classmethod
    def _check_adapters(cls, vllm_config: Any) -> None:
        from . import layers

        try:
            cls.get_punica_wrapper()
        except NotImplementedError:
            raise ConfigError(
                f"--enable-lora: the platform {cls.device_name!r} has no kernels for adapters; merge the adapter into"
                " the checkpoint (merge_and_unload() of PEFT) and serve that"
            ) from None
        if not cls.has_native_layers or not vllm_config.model_config.get_num_experts():
            return
        experts = "unquantized_fused_moe_method"
        if experts in [layer.name for layer in layers.replaced(native_vendor_of(vllm_config))]:
            raise ConfigError(
                "--enable-lora: adapters of experts need vLLM's own experts, and dispatch chooses others; set"
                f" VLLM_FL_OOT_BLACKLIST={experts}"
            )


class OutOfTreePlatform(FLPlatform):
    """Base of a platform for a device that vLLM does not know: what vLLM can do on any device is on."""

    _enum = PlatformEnum.OOT
    communicator_cls = "vllm_fl.integration.communicator.FLCommunicator"

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """What an operator does not take is that operator's to say."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Layers that share an index (encoder-decoder models) are no problem: each has its cache bound by name."""

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """vLLM 0.31 and later: without Triton for the device, PyTorch code takes the place of its Triton kernels."""
        compat.register_kernel_fallbacks()

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Settle what vLLM reads from the environment.

        Raises:
            ConfigError: the user asks for vLLM's second model runner, which is written for CUDA's memory and Triton.
        """
        super().pre_register_and_update(parser)
        wanted = os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        if wanted.strip().lower() not in {"0", "false"}:
            raise ConfigError(
                f"environment variable VLLM_USE_V2_MODEL_RUNNER: {wanted!r}; the platform {cls.device_name!r} has"
                " vLLM's first model runner only: unset the variable"
            )


def native_vendor_of(vllm_config: Any) -> str | None:
    """The vendor whose layers may stay vLLM's own in an engine of this configuration; None: all go through dispatch."""
    from vllm.platforms import current_platform  # not yet there while this module is imported

    config = vllm_config.additional_config
    if isinstance(config, dict) and config.get(ALL_LAYERS):
        return None
    return getattr(current_platform, "native_vendor", None)


def stamp_selection(vllm_config: Any) -> None:
    """Put the present selection of implementations and layers into ``additional_config``.

    vLLM hashes it into the keys of its compile caches, so that no two selections share a graph.

    Raises:
        TypeError: ``additional_config`` is an object and not a mapping, so that nothing can be added to it.
    """
    from . import layers

    config = vllm_config.additional_config
    if not isinstance(config, dict):
        raise TypeError(
            f"additional_config is of type {type(config).__name__}; vllm-fl adds the selection of operators to it:"
            " pass a dict"
        )
    config[FINGERPRINT_KEY] = get_default_manager().fingerprint()
    config[LAYERS_KEY] = sorted(layer.name for layer in layers.replaced(native_vendor_of(vllm_config)))


def _switch_off_fusions(pass_config: Any) -> None:
    """Switch off the passes that match vLLM's compiled kernels; left on, their absence is a NameError at compile."""
    wanted = []
    for name in vars(pass_config):
        if name.startswith("fuse_") or name in {"enable_sp", "enable_qk_norm_rope_fusion"}:
            if getattr(pass_config, name):
                wanted.append(name)
            setattr(pass_config, name, False)
    if wanted:
        get_logger(__name__).warning(
            "pass_config.%s: this platform does not have these fusion passes of vLLM; they are switched off",
            ", pass_config.".join(sorted(wanted)),
        )
