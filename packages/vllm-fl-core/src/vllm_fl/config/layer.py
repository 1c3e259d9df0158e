"""One layer of the configuration: typed values, and the origin of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_fl.dispatch.parameters import flat
from vllm_fl.errors import did_you_mean

from .document import Document, Location, Raw, dotted, parse, read_path
from .keys import KEYS, REPLACED_KEYS
from .model import LayerModel
from .problems import LayerName, Origin, Problem

_WRONG_KEY = "[key]"  # pydantic's mark for a wrong key of a mapping

#: Path of an origin: (key,), (key, item), ("op_backends", operator, token) or ("parameters", *path of a parameter).
OriginPath = tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """What one layer says.

    Args:
        values: key to value. Sets are tuples of entries as they were written: plain names, or ``+name`` and ``-name``
            that edit the layer below, or ``*``. ``op_backends`` is a mapping of operators to tuples of tokens,
            ``parameters`` one of :class:`~vllm_fl.dispatch.parameters.ParameterPath` to text.
        origins: where each key, item (without its sign) and token stands.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[OriginPath, Origin] = field(default_factory=dict)


def typed_layer(
    raw: Mapping[str, Raw], layer: LayerName, place: Callable[[Location, bool], str]
) -> tuple[Layer, list[Problem]]:
    """Check `raw` against the model; `place` says where a value, or (True) its key, stands.

    What has a problem is not in the layer, everything else is, so that its names can be judged too.
    """
    try:
        model = LayerModel.model_validate(dict(raw))
    except ValidationError as error:
        details = error.errors(include_url=False)
        sound, _ = typed_layer(_sound(raw, [detail["loc"] for detail in details]), layer, place)
        return sound, [_problem(detail, place) for detail in details]
    values: dict[str, Any] = {}
    origins: dict[OriginPath, Origin] = {}
    for key in sorted(model.model_fields_set):
        value = getattr(model, key)
        origins[(key,)] = Origin(layer, place((key,), True))
        if isinstance(value, list):
            for index, entry in enumerate(value):
                origins[(key, entry.lstrip("+-"))] = Origin(layer, place((key, index), False))
            value = tuple(value)
        elif key == "parameters":
            value = flat(value)
            for path in value:
                place_of: OriginPath = (key, *path)
                origins[place_of] = Origin(layer, place((key, *filter(None, path)), True))
        elif isinstance(value, dict):
            for op_name, tokens in value.items():
                origins[(key, op_name)] = Origin(layer, place((key, op_name), True))
                for index, token in enumerate(tokens):
                    origins[(key, op_name, token)] = Origin(layer, place((key, op_name, index), False))
            value = {op_name: tuple(tokens) for op_name, tokens in value.items()}
        values[key] = value
    return Layer(values, origins), []


def _sound(raw: Mapping[str, Raw], wrong: Iterable[Location]) -> dict[str, Raw]:
    """`raw` without what is wrong. A wrong token becomes a right one, so that the others keep their places."""
    sound = dict(raw)
    for key, *rest in wrong:
        operators = sound.get(str(key))
        if key != "op_backends" or not rest or not isinstance(operators, dict):
            sound.pop(str(key), None)
            continue
        op_name, kept = str(rest[0]), dict(operators)
        if rest[-1] == _WRONG_KEY:
            kept.pop(op_name, None)
        elif op_name in kept:
            kept[op_name] = _sound_tokens(kept[op_name], rest[1:])
        sound[str(key)] = kept
    return sound


def _sound_tokens(tokens: Raw, wrong: Sequence[int | str]) -> Raw:
    parts = [part.strip() for part in tokens.split("|")] if isinstance(tokens, str) else tokens
    if not wrong or not isinstance(parts, list):
        return ["flagos"]
    replacement = next((token for token in ("flagos", "vendor", "reference") if token not in parts), None)
    mended = [replacement if index == wrong[0] else part for index, part in enumerate(parts)]
    return [part for part in mended if part is not None]


def _problem(detail: Any, place: Callable[[Location, bool], str]) -> Problem:
    location: Location = tuple(detail["loc"])
    if detail["type"] == "extra_forbidden":
        key = str(location[0])
        return Problem(place(location, True), "", _unknown_key(key))
    if location[-1] == _WRONG_KEY:
        return Problem(place(location[:-1], True), dotted(location[:1]), detail["msg"])
    return Problem(place(location, False), dotted(location), detail["msg"])


def _unknown_key(key: str) -> str:
    if key in REPLACED_KEYS:
        return f"unknown key {key!r}: {REPLACED_KEYS[key]}"
    return f"unknown key {key!r} (known: {', '.join(KEYS)}){did_you_mean(key, KEYS)}"


def file_layer(path: Path, where: str) -> tuple[Layer, list[Problem]]:
    """The layer of a user's file; `where` names the file's origin if it cannot be read (a variable, for instance)."""
    return _document_layer(read_path(path, str(path), where), "file")


def platform_layer(data: bytes, name: str) -> tuple[Layer, list[Problem]]:
    """The layer of a platform file, which may not set what belongs to the user."""
    document = parse(data, f"platform file {name}")
    layer, problems = _document_layer(document, "platform")
    text = "a platform file may not set this key, the choice is the user's; remove it"
    for key in document.raw:
        if key in KEYS and not KEYS[key].in_platform_file:
            problems.append(Problem(document.place((key,), True), key, text))
    return layer, sorted(problems, key=line_and_column)


def _document_layer(document: Document, layer: LayerName) -> tuple[Layer, list[Problem]]:
    checked, problems = typed_layer(document.raw, layer, document.place)
    # A value that the document itself complains about is None in `raw`, and the model would complain again.
    seen = {(problem.where, problem.key) for problem in document.problems}
    found = document.problems + [p for p in problems if (p.where, p.key) not in seen]
    return checked, sorted(found, key=line_and_column)


def line_and_column(problem: Problem) -> tuple[int, int]:
    """Where in its file a problem is; (0, 0) if it is about the file as a whole."""
    parts = problem.where.rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        return int(parts[1]), int(parts[2])
    return 0, 0
