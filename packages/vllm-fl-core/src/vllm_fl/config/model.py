"""The typed model of one layer: which keys there are, which values they take, and the message for any other.

Values arrive as text, lists of text and mappings (see :mod:`.document`); environment variables bring text. The rules
below turn both into the same typed values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from vllm_fl.dispatch.types import TOKEN_FORMS, parse_token
from vllm_fl.errors import ConfigError, did_you_mean

from .document import is_not
from .keys import KEYS

PREFERENCES = ("flagos", "vendor", "reference")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")
EVERY = "*"  #: in a restriction: no restriction, whatever the layers below say

_BOOLEANS = "true/false, yes/no, on/off or 1/0"
_LIST = "a list or names separated by commas"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_LABEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")
_BYTES = re.compile(r"([0-9]{1,12}) ?(KiB|MiB)?")
_SHIFTS = {"": 0, "KiB": 10, "MiB": 20}
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def _error(text: str) -> PydanticCustomError:
    # The text goes through as a parameter: pydantic would take braces in it for parameters of its own.
    return PydanticCustomError("config", "{text}", {"text": text})


def _text(value: Any, expected: str) -> str:
    if not isinstance(value, str):
        raise _error(is_not(value, expected))
    if not value.strip():
        raise _error(f"{value!r} is empty; expected {expected}")
    return value.strip()


def parse_boolean(value: Any) -> bool:
    """true/1/yes/on or false/0/no/off in any case; anything else is an error."""
    if isinstance(value, bool):
        return value
    word = _text(value, f"a boolean ({_BOOLEANS})").lower()
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    raise _error(f"{value!r} is not a boolean ({_BOOLEANS}){did_you_mean(word, TRUE_WORDS + FALSE_WORDS)}")


def _one_of(options: Sequence[str], fold: Callable[[str], str] = str) -> Callable[[Any], str]:
    allowed = f"one of {', '.join(options)}"

    def check(value: Any) -> str:
        word = fold(_text(value, allowed))
        if word not in options:
            raise _error(f"{value!r} is not {allowed}{did_you_mean(word, options)}")
        return word

    return check


def _matching(pattern: re.Pattern[str], expected: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        word = _text(value, expected)
        if not pattern.fullmatch(word):
            raise _error(f"{value!r} is not {expected}")
        return word

    return check


def expanded(text: str) -> Path:
    """The path, with ``~`` as the home directory; the ``~name`` of a user who does not exist stays as it is."""
    return Path(os.path.expanduser(text))


def check_token(value: Any) -> str:
    """A token of one of the forms; whether the vendor or the implementation exists is asked later."""
    token = _text(value, f"a token ({TOKEN_FORMS})")
    try:
        parse_token(token)
    except ConfigError as error:
        raise _error(str(error)) from None
    return token


def _split(separator: str, expected: str) -> Callable[[Any], list[Any]]:
    def split(value: Any) -> list[Any]:
        if isinstance(value, (list, tuple)):
            return list(value)
        if not isinstance(value, str):
            raise _error(is_not(value, expected))
        if not value.strip():
            return []
        parts = [part.strip() for part in value.split(separator)]
        if "" in parts:
            raise _error(f"{value!r} has an empty entry; expected {expected}")
        return parts

    return split


def is_edit(entries: Iterable[str]) -> bool:
    """Whether a (checked) list edits the list of the layer below, ``+op`` and ``-op``, instead of replacing it."""
    return any(entry.startswith(("+", "-")) for entry in entries)


def _entry(check: Callable[[Any], str]) -> Callable[[Any], str]:
    def check_entry(value: Any) -> str:
        if value == EVERY:
            return EVERY
        sign, name = (value[0], value[1:]) if isinstance(value, str) and value[:1] in ("+", "-") else ("", value)
        return sign + check(name)

    return check_entry


def _whole_list(every: bool) -> Callable[[list[str]], list[str]]:
    def check(entries: list[str]) -> list[str]:
        if EVERY in entries and not every:
            raise _error(f"{EVERY!r} has no meaning here; name the entries")
        if EVERY in entries and len(set(entries)) > 1:
            raise _error(f"{EVERY!r} means every one and stands alone; remove it or the other entries")
        edits = [entry for entry in entries if is_edit([entry])]
        plain = [entry for entry in entries if entry not in edits]
        if edits and plain:
            raise _error(
                f"mixes plain entries ({', '.join(plain)}) with edits ({', '.join(edits)}); write only plain entries, "
                "which replace the list of the layer below, or only +NAME and -NAME, which edit it"
            )
        both = sorted({entry[1:] for entry in edits if {f"+{entry[1:]}", f"-{entry[1:]}"} <= set(edits)})
        if both:
            raise _error(f"both adds and removes {', '.join(both)}; keep one of the two")
        return entries

    return check


def _seconds(value: Any) -> float:
    expected = "a number of seconds above 0"
    word = _text(value, expected)
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise _error(f"{value!r} is not {expected}")
    return seconds


def _bytes_up_to(limit: int) -> Callable[[Any], int]:
    expected = f"a number of bytes up to {limit}, such as 65536, 64KiB or 8MiB"

    def check(value: Any) -> int:
        match = _BYTES.fullmatch(_text(value, expected))
        size = int(match[1]) << _SHIFTS[match[2] or ""] if match else limit + 1
        if size > limit:
            raise _error(f"{value!r} is not {expected}")
        return size

    return check


def _some_tokens(tokens: list[str]) -> list[str]:
    if not tokens:
        raise _error(f"names no token; expected at least one of {TOKEN_FORMS}, or no entry for the operator")
    twice = sorted({token for token in tokens if tokens.count(token) > 1})
    if twice:
        raise _error(f"names {', '.join(twice)} more than once; the order needs each token once")
    return tokens


def _mapping_of(expected: str) -> Callable[[Any], dict[str, Any]]:
    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _error(is_not(value, f"a mapping of {expected}"))
        return value

    return check


def _parameter(value: Any) -> str | dict[str, str]:
    if isinstance(value, dict) and value:
        return {bucket: _text(one, f"a value for the bucket {bucket!r}") for bucket, one in value.items()}
    return _text(value, "a value, or a mapping of buckets to values, such as 'decode: 4'")


def _any_case(word: str) -> str:
    return "".join(f"[{letter.upper()}{letter}]" if letter.isalpha() else letter for letter in word)


_TEXT_SCHEMA = {"type": "string"}
_LIST_SCHEMA = {"anyOf": [{"type": "array", "items": _TEXT_SCHEMA}, _TEXT_SCHEMA]}
_BOOLEAN_SCHEMA = {
    "anyOf": [
        {"type": "boolean"},
        {"enum": [0, 1]},
        {"type": "string", "pattern": f"^({'|'.join(map(_any_case, TRUE_WORDS + FALSE_WORDS))})$"},
    ]
}


_operator = _matching(_NAME, "the name of an operator")
_vendor = _matching(_LABEL, "the name of a vendor")

Boolean = Annotated[bool, BeforeValidator(parse_boolean), WithJsonSchema(_BOOLEAN_SCHEMA)]
Preference = Annotated[str, BeforeValidator(_one_of(PREFERENCES)), WithJsonSchema({"enum": list(PREFERENCES)})]
LogLevel = Annotated[str, BeforeValidator(_one_of(LOG_LEVELS, str.upper)), WithJsonSchema(_TEXT_SCHEMA)]
Label = Annotated[str, BeforeValidator(_matching(_LABEL, "the name of a backend")), WithJsonSchema(_TEXT_SCHEMA)]
PathText = Annotated[Path, BeforeValidator(lambda value: expanded(_text(value, "a path")))]
Communicator = Annotated[
    str, BeforeValidator(_matching(_LABEL, "the name of a communicator")), WithJsonSchema(_TEXT_SCHEMA)
]
Seconds = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, _TEXT_SCHEMA]}),
]
CustomBytes = Annotated[
    int,
    BeforeValidator(_bytes_up_to(8 << 20)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0, "maximum": 8 << 20}, _TEXT_SCHEMA]}),
]
Modules = Annotated[
    list[Annotated[str, BeforeValidator(_matching(_MODULE, "the name of a module"))]],
    BeforeValidator(_split(",", _LIST)),
    WithJsonSchema(_LIST_SCHEMA),
]
Tokens = Annotated[
    list[Annotated[str, BeforeValidator(check_token)]],
    BeforeValidator(_split("|", "a list of tokens or tokens separated by '|'")),
    AfterValidator(_some_tokens),
    WithJsonSchema(_LIST_SCHEMA),
]
OpBackends = Annotated[
    dict[Annotated[str, BeforeValidator(_operator)], Tokens],
    BeforeValidator(_mapping_of("operators to tokens, such as 'rms_norm: [vendor, flagos]'")),
]
_VALUE_SCHEMA = {"type": ["string", "integer", "boolean"]}
ParameterValue = Annotated[
    Any,
    BeforeValidator(_parameter),
    WithJsonSchema({"anyOf": [_VALUE_SCHEMA, {"type": "object", "additionalProperties": _VALUE_SCHEMA}]}),
]
ImplementationParameters = Annotated[
    dict[str, ParameterValue], BeforeValidator(_mapping_of("parameters to values, such as 'warps: 4'"))
]
OperatorParameters = Annotated[
    dict[Annotated[str, BeforeValidator(_matching(_LABEL, "the id of an implementation"))], ImplementationParameters],
    BeforeValidator(_mapping_of("implementations to parameters, such as 'flagos.triton: {warps: 4}'")),
]
Parameters = Annotated[
    dict[Annotated[str, BeforeValidator(_operator)], OperatorParameters],
    BeforeValidator(_mapping_of("operators to implementations, such as 'rms_norm: {flagos.triton: {warps: 4}}'")),
]

_OperatorEntry = Annotated[str, BeforeValidator(_entry(_operator))]
_VendorEntry = Annotated[str, BeforeValidator(_entry(_vendor))]
_names = BeforeValidator(_split(",", _LIST))
_collection = AfterValidator(_whole_list(every=False))
_restriction = AfterValidator(_whole_list(every=True))

OperatorSet = Annotated[list[_OperatorEntry], _names, _collection, WithJsonSchema(_LIST_SCHEMA)]
OperatorRestriction = Annotated[list[_OperatorEntry], _names, _restriction, WithJsonSchema(_LIST_SCHEMA)]
VendorSet = Annotated[list[_VendorEntry], _names, _collection, WithJsonSchema(_LIST_SCHEMA)]
VendorRestriction = Annotated[list[_VendorEntry], _names, _restriction, WithJsonSchema(_LIST_SCHEMA)]


def _key(name: str) -> Any:
    return Field(default=None, description=KEYS[name].help)


class LayerModel(BaseModel):
    """What one layer may say. A key that is not set says nothing; the layer below decides."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="vllm-fl configuration")

    prefer: Preference = _key("prefer")
    strict: Boolean = _key("strict")
    op_backends: OpBackends = _key("op_backends")
    parameters: Parameters = _key("parameters")
    allow_vendors: VendorRestriction = _key("allow_vendors")
    deny_vendors: VendorSet = _key("deny_vendors")
    use_flaggems: Boolean = _key("use_flaggems")
    flagos_whitelist: OperatorRestriction = _key("flagos_whitelist")
    flagos_blacklist: OperatorSet = _key("flagos_blacklist")
    oot_enabled: Boolean = _key("oot_enabled")
    oot_whitelist: OperatorRestriction = _key("oot_whitelist")
    oot_blacklist: OperatorSet = _key("oot_blacklist")
    prefer_enabled: Boolean = _key("prefer_enabled")
    platform: Label = _key("platform")
    comm: Communicator = _key("comm")
    comm_timeout: Seconds = _key("comm_timeout")
    comm_custom_all_reduce: Boolean = _key("comm_custom_all_reduce")
    comm_custom_max_bytes: CustomBytes = _key("comm_custom_max_bytes")
    plugin_modules: Modules = _key("plugin_modules")
    log_level: LogLevel = _key("log_level")
    dispatch_debug: Boolean = _key("dispatch_debug")
    oplist_path: PathText = _key("oplist_path")
    trace_dir: PathText = _key("trace_dir")


def json_schema() -> dict[str, Any]:
    """JSON schema of a configuration file, for editors."""
    schema = LayerModel.model_json_schema()
    for description in schema["properties"].values():
        description.pop("default", None)  # null is the model's "not set", not a value that a file may give
    return schema
