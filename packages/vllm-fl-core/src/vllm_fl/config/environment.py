"""The environment variables: one table of all of them, and the layer that they make."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vllm_fl.errors import nearest

from .document import Location, Raw, dotted
from .keys import KEYS, shown_default
from .layer import Layer, typed_layer
from .problems import Problem

PREFIX = "VLLM_FL_"


@dataclass(frozen=True)
class Variable:
    """One environment variable; `key` is the configuration key that it sets, if it sets one."""

    type: str
    default: str
    help: str
    key: str | None = None


def _variable(key: str, type: str | None = None, help: str | None = None) -> Variable:
    value = KEYS[key].default
    default = {True: "1", False: "0"}[value] if isinstance(value, bool) else shown_default(key)
    text = (type or KEYS[key].type).replace("list", "names separated by commas")
    return Variable(text, default, help or KEYS[key].help, key)


#: Every variable that vllm-fl reads. Their values are read once a process, when the configuration is first needed.
ENVIRONMENT: Mapping[str, Variable] = MappingProxyType(
    {
        "VLLM_FL_CONFIG": Variable(
            "path of a YAML file", "", "A file of keys. What it names wins over every other layer."
        ),
        "VLLM_FL_TUNED": Variable(
            "auto",
            "",
            "Take the orders that `vllm-fl tune` has found for this model on this device; "
            "what a file or the environment orders for an operator wins.",
        ),
        "VLLM_FL_PLATFORM": _variable("platform"),
        "VLLM_FL_PREFER": _variable("prefer"),
        "VLLM_FL_PREFER_ENABLED": _variable(
            "prefer_enabled",
            help="False: vLLM behaves as if vllm-fl were not installed, whatever a file says: no file is read.",
        ),
        "VLLM_FL_STRICT": _variable("strict"),
        "VLLM_FL_PER_OP": _variable(
            "op_backends",
            "`op=a|b;op=c`",
            "Which implementations to try for an operator, in this order. Tokens as in `op_backends`.",
        ),
        "VLLM_FL_OP_CONFIG": _variable(
            "op_backends",
            'JSON object `{"op": "a"}`',
            "The same as JSON; wins over `VLLM_FL_PER_OP` where both name an operator.",
        ),
        "VLLM_FL_ALLOW_VENDORS": _variable("allow_vendors"),
        "VLLM_FL_DENY_VENDORS": _variable("deny_vendors"),
        "USE_FLAGGEMS": _variable("use_flaggems"),
        "VLLM_FL_FLAGOS_WHITELIST": _variable("flagos_whitelist"),
        "VLLM_FL_FLAGOS_BLACKLIST": _variable("flagos_blacklist"),
        "VLLM_FL_FLAGOS_BLACKLIST_APPEND": _variable(
            "flagos_blacklist",
            help="These operators do not use flagos either; added to `VLLM_FL_FLAGOS_BLACKLIST` if that is set, "
            "else to the platform's list.",
        ),
        "VLLM_FL_OOT_ENABLED": _variable("oot_enabled"),
        "VLLM_FL_OOT_WHITELIST": _variable("oot_whitelist"),
        "VLLM_FL_OOT_BLACKLIST": _variable("oot_blacklist"),
        "VLLM_FL_COMM": _variable("comm"),
        "VLLM_FL_COMM_TIMEOUT": _variable("comm_timeout"),
        "VLLM_FL_COMM_CUSTOM_ALL_REDUCE": _variable("comm_custom_all_reduce"),
        "VLLM_FL_COMM_CUSTOM_MAX_BYTES": _variable("comm_custom_max_bytes"),
        "VLLM_FL_LOG_LEVEL": _variable("log_level"),
        "VLLM_FL_DISPATCH_DEBUG": _variable("dispatch_debug"),
        "VLLM_FL_PLUGIN_MODULES": _variable("plugin_modules"),
        "VLLM_FL_TRACE_DIR": _variable("trace_dir"),
        "FLAGGEMS_ENABLE_OPLIST_PATH": _variable("oplist_path"),
        "FLAGCX_CUSTOM_OP_ENABLE": Variable(
            "0 or 1", "", "FlagCX's own variable for its all-reduce kernels; see `comm_custom_all_reduce`."
        ),
        "FLAGCX_PATH": Variable(
            "path of a directory or of libflagcx.so",
            "",
            "Where FlagCX is; selects its communicator, that of vllm-fl-comm, unless `comm` says otherwise.",
        ),
    }
)

_TUNED_BY_PLATFORM = "implementations are chosen by 'op_backends' (VLLM_FL_PER_OP)"

#: Variables of vllm-plugin-FL that have no effect here, and what to use instead. A trailing * stands for any ending.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "VLLM_FL_IO_DUMP*": "'vllm-fl compare MODEL --dump DIR' keeps inputs of operators; unset it",
        "VLLM_FL_OP_FAST_PATH": "every call site is bound to its implementation, there is no slow path; unset it",
        "VLLM_FL_HOPPER_LONG_CONTEXT_OPT": _TUNED_BY_PLATFORM,
        "VLLM_FL_FLAGOS_MM_SHAPE_AWARE": _TUNED_BY_PLATFORM,
        "VLLM_FL_FLAGOS_MM_DECODE_MAX_M": _TUNED_BY_PLATFORM,
        "VLLM_FL_SKIP_FULL_GRAPH_REPLAY_SYNC": "vLLM's own graph capture is used; unset it",
        "VLLM_FL_ENABLE_MOE_METHOD_OOT": "use VLLM_FL_OOT_WHITELIST or VLLM_FL_OOT_BLACKLIST",
    }
)

_SPECIAL = ("VLLM_FL_CONFIG", "VLLM_FL_PER_OP", "VLLM_FL_OP_CONFIG", "VLLM_FL_FLAGOS_BLACKLIST_APPEND")
_BY_KEY = {v.key: name for name, v in ENVIRONMENT.items() if v.key is not None and name not in _SPECIAL}


def variable_place(name: str) -> str:
    return f"environment variable {name}"


def environment_layers(environ: Mapping[str, str]) -> tuple[list[Layer], list[Problem], list[str]]:
    """The layers of the environment from low to high, the problems, and warnings about variables without effect.

    ``VLLM_FL_OP_CONFIG`` lies over ``VLLM_FL_PER_OP``, and ``VLLM_FL_FLAGOS_BLACKLIST_APPEND`` edits what lies below
    it; as layers of their own they need no other rule than that of merging.
    """
    problems, warnings = _names(environ)
    raw: dict[str, Raw] = {key: environ[name] for key, name in _BY_KEY.items() if name in environ}
    found = [_typed(raw, None)]
    readers = {
        "VLLM_FL_PER_OP": _per_op,
        "VLLM_FL_OP_CONFIG": _op_config,
        "VLLM_FL_FLAGOS_BLACKLIST_APPEND": _append,
    }
    for name, reader in readers.items():
        if name in environ:
            try:
                found.append(_typed(reader(environ[name]), name))
            except ValueError as error:
                problems.append(Problem(variable_place(name), "", str(error)))
    problems.extend(problem for _, layer_problems in found for problem in layer_problems)
    return [layer for layer, _ in found], problems, warnings


def _names(environ: Mapping[str, str]) -> tuple[list[Problem], list[str]]:
    problems, warnings = [], []
    for name in sorted(environ):
        if name in ENVIRONMENT or not name.upper().startswith(PREFIX):
            continue
        instead = _unsupported(name)
        if instead:
            warnings.append(f"{variable_place(name)} has no effect here: {instead}")
        else:
            problems.append(Problem(variable_place(name), "", _unknown(name)))
    return problems, warnings


def _unsupported(name: str) -> str | None:
    for pattern, instead in UNSUPPORTED.items():
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return instead
    return None


def _unknown(name: str) -> str:
    # Compared without the common prefix, which would make any two names look alike.
    endings = {known.removeprefix(PREFIX): known for known in ENVIRONMENT}
    near = nearest(name[len(PREFIX) :], endings)
    hint = f"did you mean {endings[near]!r}?" if near else f"known variables: {', '.join(ENVIRONMENT)}"
    return f"there is no such variable; {hint}"


def _typed(raw: Mapping[str, Raw], name: str | None) -> tuple[Layer, list[Problem]]:
    def place(location: Location, at_key: bool) -> str:
        return variable_place(name or _BY_KEY[str(location[0])])

    layer, problems = typed_layer(raw, "environment", place)
    # The variable names its key already; an operator in it is worth naming.
    return layer, [Problem(p.where, dotted(p.key.split(".")[1:]), p.text) for p in problems]


def _per_op(text: str) -> dict[str, Raw]:
    """``op1=a|b;op2=c``"""
    operators: dict[str, Raw] = {}
    for part in text.split(";") if text.strip() else ():
        op_name, equals, tokens = (piece.strip() for piece in part.partition("="))
        if not equals or not op_name:
            raise ValueError(f"{part.strip()!r} in {text!r} is not of the form op=token|token;op=token")
        _no_repeat(op_name, operators)
        operators[op_name] = tokens
    return {"op_backends": operators}


def _op_config(text: str) -> dict[str, Raw]:
    """``{"op": "token"}``, or a list of tokens for an operator."""
    example = """such as '{"rms_norm": "vendor"}'"""
    try:
        operators = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{text!r} is not JSON ({error.msg} at {place}); expected an object {example}") from None
    if not isinstance(operators, dict):
        raise ValueError(f"{text!r} is not a JSON object; expected an object {example}")
    return {"op_backends": operators}


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        _no_repeat(key, result)
        result[key] = value
    return result


def _no_repeat(op_name: str, seen: Mapping[str, object]) -> None:
    if op_name in seen:
        raise ValueError(f"{op_name!r} is given twice; keep one of the two")


def _append(text: str) -> dict[str, Raw]:
    names = [part.strip() for part in text.split(",")] if text.strip() else []
    signed = [name for name in names if name.startswith(("+", "-")) or name == "*"]
    if signed:
        raise ValueError(f"{signed[0]!r} is not a plain name; this variable only adds names, without a sign")
    # No name, no key: an empty list would not add nothing, it would replace the list below.
    return {"flagos_blacklist": [f"+{name}" for name in names]} if names else {}
