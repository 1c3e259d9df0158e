"""Our versions of vLLM's layers: thin subclasses whose forward calls a dispatched operator.

One module a family; each names its vLLM classes only when it is imported, which happens in ``general_plugin``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from vllm_fl.config import KnownNames, Settings, get_settings
from vllm_fl.dispatch import get_default_manager
from vllm_fl.logging import get_logger

__all__ = [
    "LAYERS",
    "Layer",
    "are_served_by",
    "enable",
    "hw_agnostic",
    "register",
    "replace",
    "replaced",
    "selected",
    "transformers_norm",
]


@dataclass(frozen=True)
class Layer:
    """A layer, or family of layers, that users can switch by name.

    Args:
        name: as in ``VLLM_FL_OOT_WHITELIST`` and ``VLLM_FL_OOT_BLACKLIST``.
        module: module of this package with a function ``register_<name>()``.
        custom_op: vLLM's name in ``compilation_config.custom_ops``; None where vLLM has no such switch.
        operators: the operators behind it, where they are not the one of its own name.
    """

    name: str
    module: str
    custom_op: str | None
    operators: tuple[str, ...] = ()

    def is_served_by(self, vendor: str) -> bool:
        """Whether the implementation chosen for each of the operators is one of `vendor`."""
        return are_served_by(vendor, *self.operators or (self.name,))


def are_served_by(vendor: str, *operators: str) -> bool:
    """Whether the implementation chosen for each of the operators is one of `vendor`."""
    manager = get_default_manager()
    chosen = [manager.selection(name).chosen for name in operators]
    return all(candidate is not None and candidate.impl.vendor == vendor for candidate in chosen)


LAYERS = (
    Layer("silu_and_mul", "activation", "silu_and_mul"),
    Layer("gelu_and_mul", "activation", "gelu_and_mul"),
    Layer("rms_norm", "layernorm", "rms_norm"),
    Layer("gemma_rms_norm", "layernorm", "gemma_rms_norm"),
    Layer("rms_norm_gated", "layernorm", "rms_norm_gated"),
    Layer("rotary_embedding", "rotary", "rotary_embedding"),
    Layer("fused_moe", "moe", None, ("topk_softmax", "topk_sigmoid", "grouped_topk")),
    Layer(
        "unquantized_fused_moe_method",
        "moe",
        "unquantized_fused_moe",
        ("fused_experts", "moe_align_block_size", "moe_sum", "silu_and_mul"),
    ),
    Layer(
        "gated_delta_net",
        "gdn",
        None,
        (
            "causal_conv1d_fn",
            "causal_conv1d_update",
            "fused_gdn_gating",
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
        ),
    ),
    Layer("quant_fp8", "quantization", "quant_fp8", ("per_token_group_quant_fp8",)),
    Layer("fp8_linear", "quantization", None, ("scaled_mm",)),
)


def selected(settings: Settings) -> tuple[Layer, ...]:
    """The layers that the configuration leaves switched on.

    Raises:
        ConfigError: the white- or blacklist names a layer that does not exist.
    """
    settings.check_names(KnownNames(oot_layers=[layer.name for layer in LAYERS]))
    if not settings.oot_enabled:
        return ()
    allowed, denied = settings.oot_whitelist, settings.oot_blacklist
    return tuple(layer for layer in LAYERS if (allowed is None or layer.name in allowed) and layer.name not in denied)


def replaced(native_vendor: str | None = None) -> tuple[Layer, ...]:
    """The layers that are replaced: the selected ones, without those that vLLM serves with the chosen kernels itself.

    Args:
        native_vendor: the vendor whose implementations are the kernels of vLLM's own layers, if there is one. Where
            dispatch chooses them, vLLM's layer calls them with fewer copies than the operator's signature allows.

    Raises:
        ConfigError: the white- or blacklist names a layer that does not exist.
    """
    layers = selected(get_settings())
    if native_vendor is None:
        return layers
    return tuple(layer for layer in layers if not layer.is_served_by(native_vendor))


def register(native_vendor: str | None = None) -> None:
    """Register every layer of :func:`replaced` with vLLM. Safe to call again."""
    for layer in replaced(native_vendor):
        module = import_module(f"{__name__}.{layer.module}")
        getattr(module, f"register_{layer.name}")()


def replace(original: type, ours: type, name: str | None = None) -> None:
    """Have vLLM build `ours` wherever it builds `original`.

    vLLM looks a replacement up by the exact name of the class. ``register_oot`` renames the replacement to that
    class name, after which neither ``+silu_and_mul`` nor ``-silu_and_mul`` would reach it; the name is put back.

    Args:
        original: a CustomOp or PluggableLayer of vLLM.
        ours: its subclass.
        name: the name in ``custom_ops`` to restore; None leaves vLLM's.
    """
    registry = _registry_of(original)
    present = registry.get(original.__name__)
    if present is not None:
        if present.__module__ != ours.__module__:
            get_logger(__name__).warning(
                "vLLM's %s is already replaced by %s.%s of another plug-in; vllm-fl leaves it so",
                original.__name__,
                present.__module__,
                present.__qualname__,
            )
        return
    original.register_oot(ours)  # type: ignore[attr-defined]
    if name is not None:
        ours.name = name  # type: ignore[attr-defined]


def _registry_of(original: type) -> dict[str, type]:
    """The ``op_registry_oot`` that the base class of `original` looks into (vLLM has more than one)."""
    for base in original.__mro__:
        registry: dict[str, type] | None = getattr(import_module(base.__module__), "op_registry_oot", None)
        if registry is not None:
            return registry
    raise TypeError(f"{original.__module__}.{original.__qualname__} is not a replaceable layer of vLLM")


def hw_agnostic(module: str, name: str) -> type | None:
    """The class of the same name that vLLM 0.28 and later build under ``VLLM_USE_HW_AGNOSTIC``; None in others."""
    return _if_there(f"vllm.model_executor.hw_agnostic.layers.{module}", name)


def transformers_norm(name: str) -> type | None:
    """A norm of models that run on vLLM's transformers backend; None in releases that have no norm of its own there."""
    return _if_there("vllm.model_executor.models.transformers.fusers.rms_norm", name)


def _if_there(module: str, name: str) -> type | None:
    try:
        found = import_module(module)
    except ImportError:
        return None
    return getattr(found, name, None)


def enable(custom_ops: list[str], native_vendor: str | None = None) -> None:
    """Switch the replaced layers on in vLLM's ``custom_ops``, in place; a user's ``none``, ``+x`` or ``-x`` stays.

    For platforms where vLLM's remaining layers have kernels of their own and vLLM's own rule decides about them.
    """
    if "none" in custom_ops:
        return
    for layer in replaced(native_vendor):
        op = layer.custom_op
        if op is not None and f"+{op}" not in custom_ops and f"-{op}" not in custom_ops:
            custom_ops.append(f"+{op}")
