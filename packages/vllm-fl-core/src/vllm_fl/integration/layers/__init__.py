"""Our versions of vLLM's layers: thin subclasses whose forward calls a dispatched operator.

One module a family; each names its vLLM classes only when it is imported, which happens in ``general_plugin``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from vllm_fl.config import ConfigProblems, Settings, get_settings
from vllm_fl.config.names import unknown_names
from vllm_fl.logging import get_logger

__all__ = ["LAYERS", "Layer", "enable", "hw_agnostic", "register", "replace", "selected"]


@dataclass(frozen=True)
class Layer:
    """A layer, or family of layers, that users can switch by name.

    Args:
        name: as in ``VLLM_FL_OOT_WHITELIST`` and ``VLLM_FL_OOT_BLACKLIST``.
        module: module of this package with a function ``register_<name>()``.
        custom_op: vLLM's name in ``compilation_config.custom_ops``; None where vLLM has no such switch.
    """

    name: str
    module: str
    custom_op: str | None


LAYERS = (
    Layer("silu_and_mul", "activation", "silu_and_mul"),
    Layer("gelu_and_mul", "activation", "gelu_and_mul"),
    Layer("rms_norm", "layernorm", "rms_norm"),
    Layer("gemma_rms_norm", "layernorm", "gemma_rms_norm"),
    Layer("rms_norm_gated", "layernorm", "rms_norm_gated"),
    Layer("rotary_embedding", "rotary", "rotary_embedding"),
    Layer("fused_moe", "moe", None),
    Layer("unquantized_fused_moe_method", "moe", "unquantized_fused_moe"),
    Layer("gated_delta_net", "gdn", None),
)


def selected(settings: Settings) -> tuple[Layer, ...]:
    """The layers that the configuration leaves switched on.

    Raises:
        ConfigError: the white- or blacklist names a layer that does not exist.
    """
    problems = unknown_names(settings, settings.origins, oot_layers=[layer.name for layer in LAYERS])
    if problems:
        raise ConfigProblems(problems)
    if not settings.oot_enabled:
        return ()
    allowed, denied = settings.oot_whitelist, settings.oot_blacklist
    return tuple(layer for layer in LAYERS if (allowed is None or layer.name in allowed) and layer.name not in denied)


def register() -> None:
    """Register every selected layer with vLLM. Safe to call again."""
    for layer in selected(get_settings()):
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
    try:
        found = import_module(f"vllm.model_executor.hw_agnostic.layers.{module}")
    except ImportError:
        return None
    return getattr(found, name, None)


def enable(custom_ops: list[str]) -> None:
    """Switch the selected layers on in vLLM's ``custom_ops``, in place; a user's ``none``, ``+x`` or ``-x`` stays.

    For platforms where vLLM's remaining layers have kernels of their own and vLLM's own rule decides about them.
    """
    if "none" in custom_ops:
        return
    for layer in selected(get_settings()):
        op = layer.custom_op
        if op is not None and f"+{op}" not in custom_ops and f"-{op}" not in custom_ops:
            custom_ops.append(f"+{op}")
