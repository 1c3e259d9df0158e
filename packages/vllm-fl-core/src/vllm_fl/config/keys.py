"""Every key of the configuration: its type, its default, what it does. The documentation is generated from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

#: How a key's values combine over the layers: the highest layer wins; per operator; per parameter; a set that may be
#: edited and whose absence means "every one" (restriction) or "none" (collection).
Merging = Literal["replace", "per operator", "per parameter", "restriction", "collection"]


@dataclass(frozen=True)
class Key:
    """One key of a configuration file."""

    type: str
    default: Any
    help: str
    merging: Merging = "replace"
    in_platform_file: bool = True  #: False: the choice belongs to the user, not to the vendor


KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "prefer": Key(
            "flagos, vendor or reference",
            "flagos",
            "The kind of implementation that is tried first for an operator that `op_backends` does not name.",
        ),
        "strict": Key(
            "boolean",
            False,
            "An implementation that fails stops the run with its own exception; no other implementation is tried.",
        ),
        "op_backends": Key(
            "mapping: operator to a list of tokens, or to text `a|b`",
            MappingProxyType({}),
            "Which implementations to try for an operator, in this order. "
            "Tokens: `flagos`, `reference`, `vendor`, `vendor:NAME`, `impl:ID`.",
            merging="per operator",
        ),
        "parameters": Key(
            "mapping: operator, implementation, parameter to a value, or to buckets with a value each",
            MappingProxyType({}),
            "Values of parameters that implementations declare, such as block sizes; `vllm-fl explain OP` lists them.",
            merging="per parameter",
        ),
        "allow_vendors": Key(
            "list",
            None,
            "Only these vendors' implementations are used. An empty list allows no vendor.",
            merging="restriction",
        ),
        "deny_vendors": Key(
            "list",
            frozenset(),
            "These vendors' implementations are not used, even where `allow_vendors` names them.",
            merging="collection",
        ),
        "use_flaggems": Key(
            "boolean",
            True,
            "False: no implementation of kind flagos is used and FlagGems is not enabled. "
            "Set to true: FlagGems also replaces the functions of ATen that it computes as PyTorch does.",
        ),
        "flagos_whitelist": Key(
            "list",
            None,
            "Only these operators use flagos; FlagGems replaces ATen functions in it. An empty list leaves none.",
            merging="restriction",
        ),
        "flagos_blacklist": Key(
            "list",
            frozenset(),
            "These operators do not use flagos.",
            merging="collection",
        ),
        "oot_enabled": Key(
            "boolean",
            True,
            "False: vLLM's layers are not replaced by layers that go through dispatch.",
        ),
        "oot_whitelist": Key(
            "list",
            None,
            "Only the layers of these names are replaced. An empty list leaves none.",
            merging="restriction",
        ),
        "oot_blacklist": Key(
            "list",
            frozenset(),
            "The layers of these names are not replaced.",
            merging="collection",
        ),
        "prefer_enabled": Key(
            "boolean",
            True,
            "False: vLLM behaves as if vllm-fl were not installed.",
            in_platform_file=False,
        ),
        "platform": Key(
            "name of an installed backend",
            None,
            "The platform to use. Without it, the one backend whose probe succeeds is used.",
            in_platform_file=False,
        ),
        "comm": Key(
            "name of an installed communicator, or native",
            None,
            "The library that ranks communicate by; `native`: the platform's own. "
            "Without it, a communicator is used if its own variable is set (`FLAGCX_PATH`), else the platform's own.",
            in_platform_file=False,
        ),
        "comm_timeout": Key(
            "seconds",
            600.0,
            "How long an operation between ranks may take before it is given up, with an error that names it.",
            in_platform_file=False,
        ),
        "comm_custom_all_reduce": Key(
            "boolean",
            None,
            "FlagCX's own all-reduce kernels are used where every rank can. "
            "Without it, `FLAGCX_CUSTOM_OP_ENABLE` decides, and they are off if that is not set.",
            in_platform_file=False,
        ),
        "comm_custom_max_bytes": Key(
            "bytes, or a number with KiB or MiB; at most 8MiB",
            8 << 20,
            "The largest message for FlagCX's own all-reduce kernels.",
        ),
        "plugin_modules": Key(
            "list",
            (),
            "Modules that register further implementations.",
            in_platform_file=False,
        ),
        "log_level": Key(
            "DEBUG, INFO, WARNING, ERROR or CRITICAL",
            "INFO",
            "Level of the loggers of vllm-fl.",
            in_platform_file=False,
        ),
        "dispatch_debug": Key(
            "boolean",
            False,
            "Log the table of operators and implementations when dispatch starts.",
            in_platform_file=False,
        ),
        "oplist_path": Key(
            "path",
            None,
            "Record which implementation served each operator in this file.",
            in_platform_file=False,
        ),
        "trace_dir": Key(
            "path of a directory",
            None,
            "Each process writes its selection trace there when it is asked, by `vllm-fl explain --live`.",
            in_platform_file=False,
        ),
    }
)

#: Keys that other programs' files have and that do nothing here, with what to use instead.
REPLACED_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "action": "it has no effect here; tuning is a command, 'vllm-fl tune MODEL'",
        "io_dump": "inputs of operators are kept by a command, 'vllm-fl compare MODEL --dump DIR'; remove the key",
        "per_op": "the key is 'op_backends'",
    }
)


def shown_default(name: str) -> str:
    """The default of a key as one would write it; empty if there is none to write."""
    value = KEYS[name].default
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value and value % (1 << 20) == 0:
        return f"{value >> 20}MiB"
    return f"{value:g}" if isinstance(value, (int, float)) else value if isinstance(value, str) else ""
