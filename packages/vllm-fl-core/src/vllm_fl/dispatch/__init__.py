"""Operator dispatch: which implementation of an operator serves a call.

    from vllm_fl.dispatch import bind, call_op

    y = call_op("silu_and_mul", x)

    silu_and_mul = bind("silu_and_mul")   # at a call site that is used often
    y = silu_and_mul.fn(x)

Importing this package imports neither torch nor vLLM, and registers nothing: that happens at the first call.
"""

from __future__ import annotations

from vllm_fl.logging import get_logger, set_log_level

from .backend import Backend, op_options, register_backend
from .bound import BoundOp
from .default import bind, call_op, get_default_manager, reset_default_manager, resolve_op
from .discovery import (
    PLUGIN_GROUP,
    PLUGIN_MODULES_ENV,
    PluginReport,
    clear_discovered_plugins,
    discover_plugins,
    get_discovered_plugins,
    plugin_reports,
)
from .failures import FailureRecord
from .freezing import (
    FrozenDispatchManifest,
    freeze_dispatch,
    get_frozen_dispatch_manifest,
    is_dispatch_frozen,
    thaw_dispatch,
)
from .manager import OpManager
from .parameters import Bucket, Parameter, ParameterPath, Setting
from .policy import (
    PREFER_DEFAULT,
    PREFER_REFERENCE,
    PREFER_VENDOR,
    PolicyManager,
    SelectionPolicy,
    get_policy,
    policy_context,
    policy_from_config,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from .registry import OpRegistry, OpRegistrySnapshot
from .selection import Candidate, Environment, Selection, select
from .types import Availability, BackendImplKind, BackendPriority, OpImpl, Token, match_token, parse_token

#: Names of vllm-plugin-FL for what has another name here.
VLLMFLBackendBase = Backend
CachedOp = bind

__all__ = [
    # Calling
    "bind",
    "call_op",
    "resolve_op",
    "BoundOp",
    "CachedOp",
    # Manager and registry
    "OpManager",
    "OpRegistry",
    "OpRegistrySnapshot",
    "get_default_manager",
    "reset_default_manager",
    # Implementations and backends
    "Availability",
    "Backend",
    "BackendImplKind",
    "BackendPriority",
    "Bucket",
    "OpImpl",
    "Parameter",
    "VLLMFLBackendBase",
    "op_options",
    "register_backend",
    # Policy
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "ParameterPath",
    "PolicyManager",
    "SelectionPolicy",
    "Token",
    "get_policy",
    "match_token",
    "parse_token",
    "policy_context",
    "policy_from_config",
    "reset_global_policy",
    "set_global_policy",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
    # Selection
    "Candidate",
    "Environment",
    "Selection",
    "Setting",
    "select",
    # Failures
    "FailureRecord",
    # Freezing
    "FrozenDispatchManifest",
    "freeze_dispatch",
    "get_frozen_dispatch_manifest",
    "is_dispatch_frozen",
    "thaw_dispatch",
    # Discovery
    "PLUGIN_GROUP",
    "PLUGIN_MODULES_ENV",
    "PluginReport",
    "clear_discovered_plugins",
    "discover_plugins",
    "get_discovered_plugins",
    "plugin_reports",
    # Logging
    "get_logger",
    "set_log_level",
]
