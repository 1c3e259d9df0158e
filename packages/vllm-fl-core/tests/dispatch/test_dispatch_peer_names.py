"""Code as users of vllm-plugin-FL write it: the public names, imported from where they import them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def registry() -> Any:
    from vllm_fl.dispatch.registry import OpRegistry
    from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl

    registry = OpRegistry()
    registry.register_many(
        [
            OpImpl(
                op_name="silu_and_mul",
                impl_id="default.flagos",
                kind=BackendImplKind.DEFAULT,
                fn=lambda x: ("flagos", x),
                priority=BackendPriority.DEFAULT,
            ),
            OpImpl(
                op_name="silu_and_mul",
                impl_id="vendor.cuda",
                kind=BackendImplKind.VENDOR,
                fn=lambda x: ("cuda", x),
                vendor="cuda",
                priority=BackendPriority.VENDOR,
            ),
            OpImpl(
                op_name="silu_and_mul",
                impl_id="reference.torch",
                kind=BackendImplKind.REFERENCE,
                fn=lambda x: ("reference", x),
                priority=BackendPriority.REFERENCE,
            ),
        ]
    )
    return registry


# fmt: off
EXPORTS = [
    "BackendImplKind", "BackendPriority", "OpImpl", "match_token", "OpRegistry", "OpRegistrySnapshot",
    "SelectionPolicy", "PolicyManager", "get_policy", "set_global_policy", "reset_global_policy", "policy_context",
    "policy_from_config", "with_strict_mode", "with_preference", "with_allowed_vendors", "with_denied_vendors",
    "PREFER_DEFAULT", "PREFER_VENDOR", "PREFER_REFERENCE", "PLUGIN_GROUP", "PLUGIN_MODULES_ENV", "OpManager",
    "call_op", "resolve_op", "get_default_manager", "reset_default_manager", "VLLMFLBackendBase", "Backend",
    "discover_plugins", "get_discovered_plugins", "clear_discovered_plugins", "get_logger", "set_log_level",
    "CachedOp", "freeze_dispatch", "thaw_dispatch", "is_dispatch_frozen", "get_frozen_dispatch_manifest",
    "FrozenDispatchManifest",
]
# fmt: on


@pytest.mark.parametrize("name", EXPORTS)
def test_exports(name: str) -> None:
    import vllm_fl.dispatch

    assert name in vllm_fl.dispatch.__all__
    assert getattr(vllm_fl.dispatch, name) is not None


def test_constants() -> None:
    from vllm_fl.dispatch import PLUGIN_GROUP, PLUGIN_MODULES_ENV, PREFER_DEFAULT, PREFER_REFERENCE, PREFER_VENDOR
    from vllm_fl.dispatch.policy import VALID_PREFER_VALUES

    assert (PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE) == ("flagos", "vendor", "reference")
    assert {PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE} == set(VALID_PREFER_VALUES)
    assert (PLUGIN_GROUP, PLUGIN_MODULES_ENV) == ("vllm_fl.plugin", "VLLM_FL_PLUGIN_MODULES")


def test_manager_script(registry: Any) -> None:
    from vllm_fl.dispatch.manager import OpManager
    from vllm_fl.dispatch.policy import SelectionPolicy, policy_context, set_global_policy, with_denied_vendors

    manager = OpManager(registry)
    manager.ensure_initialized()
    assert manager.registry is registry
    assert manager.resolve("silu_and_mul")(3) == manager.call("silu_and_mul", 3) == ("flagos", 3)
    assert [impl.impl_id for impl in manager.resolve_candidates("silu_and_mul")] == [
        "default.flagos",
        "vendor.cuda",
        "reference.torch",
    ]
    assert manager.get_selected_impl_id("silu_and_mul") == "default.flagos"
    with policy_context(SelectionPolicy.from_dict(prefer="vendor")):
        assert manager.call("silu_and_mul", 3) == ("cuda", 3)
        with with_denied_vendors("cuda"):
            assert manager.call("silu_and_mul", 3) == ("flagos", 3)
    old = set_global_policy(SelectionPolicy.from_dict(per_op_order={"silu_and_mul": ["reference", "vendor:cuda"]}))
    assert old == SelectionPolicy()
    assert manager.get_selected_impl_id("silu_and_mul") == "reference.torch"
    assert manager.get_failed_impls() == {}
    manager.clear_failed_impls()
    epoch = manager.policy_epoch
    manager.bump_policy_epoch()
    assert manager.policy_epoch == epoch + 1


def test_fallback_script() -> None:
    from vllm_fl.dispatch import BackendImplKind, OpImpl, OpManager

    def broken(x: int) -> int:
        raise RuntimeError("kernel launch failed")

    manager = OpManager(register_builtins=False)
    manager.registry.register_impl(
        OpImpl(op_name="my_op", impl_id="vendor.x", kind=BackendImplKind.VENDOR, fn=broken, vendor="x", priority=100)
    )
    manager.registry.register_impl(
        OpImpl(op_name="my_op", impl_id="reference.torch", kind=BackendImplKind.REFERENCE, fn=lambda x: x + 1)
    )
    assert manager.call("my_op", 1) == 2
    assert manager.get_failed_impls("my_op") == {"my_op": {"vendor.x"}}
    manager.clear_failed_impls("my_op")
    assert manager.get_failed_impls() == {}


def test_policy_manager_script() -> None:
    from vllm_fl.dispatch.policy import (
        PolicyManager,
        SelectionPolicy,
        bump_policy_epoch,
        get_policy,
        get_policy_epoch,
        policy_from_env,
        reset_global_policy,
    )

    manager = PolicyManager.get_instance()
    assert manager is PolicyManager.get_instance()
    strict = SelectionPolicy(strict=True)
    manager.set_global_policy(strict)
    assert manager.get_policy() is get_policy() is strict
    with manager.create_policy_context(SelectionPolicy(prefer="vendor")):
        assert get_policy().prefer == "vendor"
    epoch = get_policy_epoch()
    assert bump_policy_epoch() == epoch + 1 == manager.get_policy_epoch()
    manager.reset_global_policy()
    reset_global_policy()
    assert get_policy() == policy_from_env()


def test_environment_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl.dispatch import get_policy, reset_global_policy

    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    monkeypatch.setenv("VLLM_FL_STRICT", "1")
    monkeypatch.setenv("VLLM_FL_PER_OP", "rms_norm=vendor|reference;silu_and_mul=flagos")
    monkeypatch.setenv("VLLM_FL_DENY_VENDORS", "a,b")
    monkeypatch.setenv("VLLM_FL_ALLOW_VENDORS", "c")
    reset_global_policy()
    policy = get_policy()
    assert (policy.prefer, policy.strict) == ("vendor", True)
    assert policy.get_per_op_order("rms_norm") == ["vendor", "reference"]
    assert policy.per_op_order_dict["silu_and_mul"] == ["flagos"]
    assert policy.deny_vendors == {"a", "b"}
    assert policy.is_vendor_allowed("c")
    assert not policy.is_vendor_allowed("d")


def test_config_file_script(tmp_path: Path) -> None:
    from vllm_fl.dispatch import policy_context, policy_from_config

    path = tmp_path / "dispatch.yaml"
    path.write_text("prefer: vendor\nstrict: true\nop_backends:\n  rms_norm: vendor:cuda|reference\n")
    with policy_context(policy_from_config(str(path))) as policy:
        assert policy.strict
        assert policy.get_per_op_order("rms_norm") == ["vendor:cuda", "reference"]


def test_default_manager_script(registry: Any) -> None:
    from vllm_fl.dispatch import CachedOp, call_op, get_default_manager, reset_default_manager, resolve_op

    manager = get_default_manager()
    manager.registry.register_many(registry.get_implementations("silu_and_mul"))
    assert call_op("silu_and_mul", 1) == resolve_op("silu_and_mul")(1) == CachedOp("silu_and_mul")(1) == ("flagos", 1)
    reset_default_manager()
    assert get_default_manager() is not manager


def test_threads_script(registry: Any) -> None:
    from vllm_fl.dispatch import OpManager

    manager = OpManager(registry)
    resolved: list[Any] = []
    threads = [threading.Thread(target=lambda: resolved.append(manager.resolve("silu_and_mul"))) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(resolved)) == 1


def test_plug_in_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: Any) -> None:
    from vllm_fl.dispatch.discovery import (
        clear_discovered_plugins,
        discover_from_env_modules,
        discover_plugins,
        get_discovered_plugins,
    )

    (tmp_path / "peer_plugin.py").write_text(
        "from vllm_fl.dispatch.types import OpImpl, BackendImplKind\n"
        "def vllm_fl_register(registry):\n"
        "    registry.register_impl(OpImpl(op_name='moe_sum', impl_id='vendor.p', kind=BackendImplKind.VENDOR,\n"
        "                                  fn=lambda input, output: None, vendor='p'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", "peer_plugin")
    assert discover_from_env_modules(registry) == 1
    assert discover_plugins(registry) == 0
    assert get_discovered_plugins() == [("peer_plugin", "env", True)]
    clear_discovered_plugins()
    assert get_discovered_plugins() == []
    assert registry.get_implementation("moe_sum", "vendor.p").is_available()


def test_flaggems_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fl.config import reset_settings
    from vllm_fl.utils import get_flag_gems_whitelist_blacklist, get_flaggems_all_ops, use_flaggems_op

    assert use_flaggems_op("mm")
    assert not use_flaggems_op("mm", default=False)
    assert get_flag_gems_whitelist_blacklist() == (None, None)
    monkeypatch.setenv("VLLM_FL_FLAGOS_BLACKLIST", "mm,addmm")
    reset_settings()
    assert [use_flaggems_op("mm"), use_flaggems_op("silu")] == [False, True]
    assert get_flag_gems_whitelist_blacklist() == (None, ["addmm", "mm"])
    monkeypatch.delenv("VLLM_FL_FLAGOS_BLACKLIST")
    monkeypatch.setenv("VLLM_FL_FLAGOS_WHITELIST", "mm")
    reset_settings()
    assert [use_flaggems_op("mm"), use_flaggems_op("silu")] == [True, False]
    assert get_flag_gems_whitelist_blacklist() == (["mm"], None)
    monkeypatch.setenv("USE_FLAGGEMS", "0")
    reset_settings()
    assert not use_flaggems_op("mm")
    monkeypatch.setattr("vllm_fl.flagos.aten.flaggems_table", lambda: [("mm", "mm"), ("mm.out", "mm_out"), ("a", "mm")])
    assert get_flaggems_all_ops() == ["mm", "mm_out"]
    monkeypatch.setattr("vllm_fl.flagos.aten.flaggems_table", lambda: None)
    with pytest.raises(ImportError, match="FlagGems is not installed; pip install --no-deps flag-gems"):
        get_flaggems_all_ops()


@pytest.fixture
def levels() -> Iterator[None]:
    root = logging.getLogger("vllm_fl")
    level = root.level
    yield
    root.setLevel(level)
    logging.getLogger("vllm_fl.test").setLevel(logging.NOTSET)


def test_logging(levels: None, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm_fl.dispatch import get_logger, set_log_level
    from vllm_fl.errors import ConfigError

    logger = get_logger("vllm_fl.test")
    assert get_logger("acme").name == "vllm_fl.acme"
    set_log_level("WARNING")
    logger.info("quiet")
    logger.warning("loud")
    set_log_level("debug", "vllm_fl.test")
    logger.debug("chatty")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition("] ")[2] for line in lines] == ["loud", "chatty"]
    assert lines[0].startswith("WARNING ")
    assert not logging.getLogger("vllm_fl").propagate
    with pytest.raises(ConfigError) as caught:
        set_log_level("WARNIN")
    assert str(caught.value) == (
        "set_log_level: 'WARNIN' is not a log level (DEBUG, INFO, WARNING, ERROR, CRITICAL); did you mean 'WARNING'?"
    )
