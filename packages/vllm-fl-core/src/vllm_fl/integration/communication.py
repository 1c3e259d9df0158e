"""Prepares a process for the chosen communicator: its backend of torch.distributed, and its KV connectors."""

from __future__ import annotations

from typing import Any

from vllm_fl.plugins import choose_communicator, installed_communicators, load_object

__all__ = ["prepare"]

_registered: set[str] = set()


def prepare(platform: Any) -> None:
    """Let vLLM make its process groups by the communicator's backend, if it has one, and know the KV connectors.

    Args:
        platform: the class of the platform of this process.

    Raises:
        PlatformError: the configuration asks for a communicator that is not there.
    """
    chosen = choose_communicator().plugin
    _register_kv_connectors()
    if chosen is not None and chosen.dist_backend is not None:
        backend = load_object(chosen.dist_backend)(platform.device_type)
        if backend is not None:
            platform.dist_backend = backend


def _register_kv_connectors() -> None:
    found = {
        name: path
        for item in installed_communicators()
        if item.plugin is not None and item.error is None
        for name, path in item.plugin.kv_connectors
        if name not in _registered
    }
    if not found:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, path in found.items():
        module, _, class_name = path.partition(":")
        KVConnectorFactory.register_connector(name, module, class_name)
        _registered.add(name)
