"""What a manager does at its first use: register every backend, then check the configuration's names against them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.logging import get_logger

from .discovery import discover_backends, discover_plugins

if TYPE_CHECKING:
    from vllm_fl.config import KnownNames

    from .manager import OpManager
    from .registry import OpRegistry


def register_everything(manager: OpManager) -> None:
    """Register the installed backends and plug-ins, and start what the configuration asks for.

    Raises:
        ConfigError: the configuration is wrong, or names an operator, vendor or implementation that nobody has.
    """
    from vllm_fl.config import get_settings

    settings = get_settings()
    registry = manager.registry
    discover_backends(registry)
    discover_plugins(registry)
    settings.check_names(registered_names(registry))
    if settings.oplist_path is not None:
        manager.observers.write_oplist(settings.oplist_path, str(settings.origin("oplist_path")))
    if settings.trace_dir is not None:
        from vllm_fl.diagnostics.live import Tracer

        manager.tracer = Tracer(manager, settings.trace_dir, str(settings.origin("trace_dir")))
        manager.tracer.start()
    for op_name in registry.known_operators():
        manager.bind(op_name)
    if settings.dispatch_debug:
        traces = [manager.selection(op_name).explain() for op_name in registry.list_operators()]
        get_logger(__name__).info("operators and implementations:\n%s", "\n".join(traces))


def registered_names(registry: OpRegistry) -> KnownNames:
    """What a configuration may name of `registry`, of FlagGems, and of the installed backends, registered or not."""
    from vllm_fl.config import KnownNames
    from vllm_fl.flagos.aten import flagos_names
    from vllm_fl.integration.layers import LAYERS
    from vllm_fl.plugins import installed_backends

    impls = tuple(impl for impls in registry.snapshot().impls_by_op.values() for impl in impls)
    vendors = {impl.vendor for impl in impls}
    vendors |= {backend.plugin.vendor for backend in installed_backends() if backend.plugin is not None}
    operators = frozenset(registry.known_operators())
    return KnownNames(
        operators=operators,
        vendors=frozenset(vendor for vendor in vendors if vendor),
        impl_ids=frozenset(impl.impl_id for impl in impls),
        implementations=impls,
        flagos_operators=flagos_names(operators),
        oot_layers=frozenset(layer.name for layer in LAYERS),
    )
