"""The registration, and a call through dispatch."""

from __future__ import annotations

from vllm_fl.dispatch import get_default_manager, with_allowed_vendors, with_preference


def test_acme_backend_registration() -> None:
    manager = get_default_manager()
    manager.ensure_initialized()
    snap = manager.registry.snapshot()
    ours = [impl for impls in snap.impls_by_op.values() for impl in impls if impl.vendor == "acme"]
    for impl in ours:
        print(f"{impl.op_name}: {impl.impl_id}, available={impl.is_available()}")
    assert {"silu_and_mul", "rms_norm", "rotary_embedding", "attention_backend"} <= {impl.op_name for impl in ours}


def test_acme_silu_and_mul() -> None:
    import torch
    from vllm_fl.dispatch import call_op

    x = torch.randn(2, 128)
    expected = torch.nn.functional.silu(x[:, :64]) * x[:, 64:]
    with with_preference("vendor"), with_allowed_vendors("acme"):
        assert get_default_manager().get_selected_impl_id("silu_and_mul") == "vendor.acme"
        result = call_op("silu_and_mul", x)
    torch.testing.assert_close(result, expected)
