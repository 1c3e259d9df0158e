"""The plug-in: complete, and light until it is asked for its operators."""

from __future__ import annotations

import subprocess
import sys

import pytest

import vllm_fl_reference.ops as ops
from vllm_fl.catalog import CATALOG
from vllm_fl.dispatch import OpRegistry
from vllm_fl.dispatch.types import BackendImplKind, BackendPriority
from vllm_fl_reference.plugin import PLUGIN, register


def test_every_operator_is_registered() -> None:
    registry = OpRegistry()
    register(registry)
    impls = registry.snapshot().impls_by_op
    assert set(impls) == set(CATALOG)
    for name, (impl,) in impls.items():
        assert (impl.impl_id, impl.kind, impl.priority) == (
            "reference.torch",
            BackendImplKind.REFERENCE,
            BackendPriority.REFERENCE,
        )
        assert impl.fn is getattr(ops, name)
        assert impl.is_available()
        assert not impl.opaque


def test_exports_are_the_catalogue() -> None:
    assert sorted(ops.__all__) == sorted(CATALOG)


@pytest.mark.parametrize("name", CATALOG)
def test_signatures_and_documentation(name: str) -> None:
    function = getattr(ops, name)
    assert CATALOG[name].mismatch(function) is None
    parameters = function.__kwdefaults__ or {}  # of the implementation, as far as the operator has no such argument
    own = set(parameters) - set(CATALOG[name].signature.parameters)
    annotations = {argument: kind for argument, kind in function.__annotations__.items() if argument not in own}
    assert annotations == CATALOG[name].fake.__annotations__
    assert function.__doc__


def test_declaration() -> None:
    assert (PLUGIN.name, PLUGIN.kind, PLUGIN.device_type) == ("reference", BackendImplKind.REFERENCE, "cpu")
    assert PLUGIN.fallback
    assert PLUGIN.vendor is None


def test_importing_the_plugin_imports_no_torch() -> None:
    code = (
        "import sys, vllm_fl_reference, vllm_fl_reference.plugin; "
        "print(*sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
