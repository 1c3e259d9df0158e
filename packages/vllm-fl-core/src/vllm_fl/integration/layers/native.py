"""Layers of a model that is loaded, brought in line with the selection: ours, or vLLM's own where those serve it."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.custom_op import CustomOp
from vllm.platforms import current_platform

from vllm_fl.dispatch import get_default_manager

from . import LAYERS, replaced

__all__ = ["follow_selection", "left_to_vllm"]

_OURS = __package__ or "vllm_fl.integration.layers"


def follow_selection(model: Any, custom_ops: list[str]) -> dict[str, str]:
    """Let every replaced layer compute as in an engine that would start with the present selection.

    Layers that were vLLM's own when the model was loaded stay so, and so do those that the user has switched off in
    ``custom_ops``, and mixtures of experts and gated delta nets, which prepare their weights for either.

    Args:
        model: the ``torch.nn.Module``.
        custom_ops: those of the engine's compilation configuration.

    Returns:
        Operator to implementation, where a layer of vLLM's has taken over.
    """
    vendor = getattr(current_platform, "native_vendor", None)
    if vendor is None:
        return {}
    ours = {layer.custom_op for layer in replaced(vendor)}
    simple = (layer.name for layer in LAYERS if layer.custom_op == layer.name)  # of one operator of that name
    switched_on = {name for name in simple if _is_on(name, custom_ops)}
    native: dict[str, str] = {}
    for module in model.modules():
        original = _original(module)
        if original is None or module.name not in switched_on:
            continue
        if module.name in ours:
            module._forward_method = module.forward_cuda
            continue
        # vLLM's rule: its kernel where layers are on by default, else PyTorch code for inductor.
        module._forward_method = original.forward_native if "none" in custom_ops else original.forward_cuda
        native[module.name] = get_default_manager().get_selected_impl_id(module.name)
    return native


def left_to_vllm(model: Any) -> list[str]:
    """Names of the layers of ours in `model` that would be vLLM's own in an engine that starts with what is selected.

    Those alone that :func:`follow_selection` leaves as they are.
    """
    vendor = getattr(current_platform, "native_vendor", None)
    if vendor is None:
        return []
    ours = {layer.name for layer in replaced(vendor)}
    modules = {type(module).__module__ for module in model.modules()}
    return [
        layer.name
        for layer in LAYERS
        if layer.custom_op != layer.name and layer.name not in ours and f"{_OURS}.{layer.module}" in modules
    ]


def _is_on(name: str, custom_ops: list[str]) -> bool:
    return f"-{name}" not in custom_ops and (f"+{name}" in custom_ops or "none" not in custom_ops)


def _original(module: Any) -> Any:
    """`module`, whose class is one of ours, as the class of vLLM's that ours stands for; None for any other module."""
    kinds = type(module).__mro__
    ours = sum(kind.__module__.startswith(_OURS) for kind in kinds)
    return super(kinds[ours - 1], module) if ours and isinstance(module, CustomOp) else None
