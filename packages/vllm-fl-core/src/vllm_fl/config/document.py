"""Reads a YAML file into text, lists and mappings, and remembers the line and column of everything in it.

Scalars stay text: ``strict: on`` arrives as ``"on"``, so that one set of rules judges files and environment variables,
and a message can show the value as it was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union

import yaml

from vllm_fl.errors import did_you_mean

from .problems import Problem

Raw = Union[None, str, "list[Raw]", "dict[str, Raw]"]
Location = tuple[str | int, ...]  #: keys and list indices from the top of the document to a value

_NULL = "tag:yaml.org,2002:null"
_KINDS = ("null", "bool", "int", "float", "str", "timestamp", "merge", "value", "seq", "map")
_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in _KINDS)
_SIZE_LIMIT = 1 << 20
_DEPTH_LIMIT = 5  # parameters, an operator, an implementation, a parameter, a bucket


@dataclass
class Document:
    """What a file says, and where: `marks` of values and `key_marks` of keys are (line, column), both from 1."""

    name: str
    raw: dict[str, Raw] = field(default_factory=dict)
    marks: dict[Location, tuple[int, int]] = field(default_factory=dict)
    key_marks: dict[Location, tuple[int, int]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, location: Sequence[str | int], at_key: bool = False) -> str:
        """``file:line:column`` of a value (or of its key), or of the innermost thing around it that the file has."""
        path = tuple(location)
        while path:
            if at_key and path in self.key_marks:
                return self.at(self.key_marks[path])
            if path in self.marks:
                return self.at(self.marks[path])
            path = path[:-1]
        return self.at(self.marks.get((), (1, 1)))

    def at(self, mark: tuple[int, int]) -> str:
        return f"{self.name}:{mark[0]}:{mark[1]}"


def read_path(path: Path, name: str, where: str) -> Document:
    """Read the file at `path`; a file that cannot be read is a problem at `where`, one that is wrong, inside `name`."""
    document = Document(name)
    try:
        with path.open("rb") as file:
            data = file.read(_SIZE_LIMIT + 1)
    except FileNotFoundError:
        near = did_you_mean(path.name, _siblings(path))
        text = f"file {str(path)!r} does not exist{near or '; give the path of a YAML file'}"
        document.problems.append(Problem(where, "", text))
    except IsADirectoryError:
        document.problems.append(Problem(where, "", f"{str(path)!r} is a directory; give the path of a YAML file"))
    except OSError as error:
        text = f"file {str(path)!r} cannot be read: {error.strerror or error}; give the path of a readable YAML file"
        document.problems.append(Problem(where, "", text))
    else:
        _fill(document, data)
    return document


def parse(data: bytes, name: str) -> Document:
    """Read `data`, the content of the file `name`."""
    document = Document(name)
    _fill(document, data)
    return document


def _siblings(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    except OSError:
        return []


def _fill(document: Document, data: bytes) -> None:
    if len(data) > _SIZE_LIMIT:
        text = f"the file is larger than {_SIZE_LIMIT} bytes, which no configuration needs"
        document.problems.append(Problem(document.at((1, 1)), "", text))
        return
    try:
        root = yaml.compose(data.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line, column = _line_and_column(data[: error.start])
        text = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        document.problems.append(Problem(document.at((line, column)), "", text))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = document.at((mark.line + 1, mark.column + 1) if mark else (1, 1))
        document.problems.append(Problem(place, "", f"not valid YAML: {error.problem or error.context}"))
    except yaml.reader.ReaderError as error:
        line, column = _line_and_column(data.decode("utf-8-sig")[: error.position].encode())
        text = f"not valid YAML: the character {chr(error.character)!r} is not allowed"
        document.problems.append(Problem(document.at((line, column)), "", text))
    except RecursionError:
        document.problems.append(Problem(document.at((1, 1)), "", "not usable: nested too deeply"))
    else:
        _Converter(document).top(root)


def _line_and_column(before: bytes) -> tuple[int, int]:
    text = before.decode("utf-8-sig", errors="replace")
    return text.count("\n") + 1, len(text) - (text.rfind("\n") + 1) + 1


class _Converter:
    """Turns yaml nodes into plain values; notes the place of each and every problem on the way."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def top(self, root: yaml.Node | None) -> None:
        if root is None:  # nothing but comments: the file overrides nothing
            return
        self.document.marks[()] = _mark(root)
        if isinstance(root, yaml.MappingNode):
            self.document.raw = self._mapping(root, ())
            return
        kind = "a list" if isinstance(root, yaml.SequenceNode) else f"the text {root.value!r}"
        text = f"the file holds {kind}; expected a mapping of keys to values, such as 'prefer: vendor'"
        self._problem(root, (), text)

    def _convert(self, node: yaml.Node, path: Location) -> Raw:
        self.document.marks[path] = _mark(node)
        if node.tag not in _TAGS:
            self._problem(node, path, f"the tag {node.tag!r} has no meaning here; remove it")
            return None
        if isinstance(node, yaml.ScalarNode):
            return None if node.tag == _NULL else str(node.value)
        if len(path) >= _DEPTH_LIMIT:  # an alias that contains itself ends here, too
            self._problem(node, path, "nested too deeply")
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self._convert(child, (*path, index)) for index, child in enumerate(node.value)]
        return self._mapping(node, path)

    def _mapping(self, node: yaml.Node, path: Location) -> dict[str, Raw]:
        values: dict[str, Raw] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, path, "a key must be a plain word")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key in values:
                first = self.document.key_marks[here][0]
                self._problem(key_node, here, f"given twice, first in line {first}; keep one of them")
                continue
            self.document.key_marks[here] = _mark(key_node)
            values[key] = self._convert(value_node, here)
        return values

    def _problem(self, node: yaml.Node, path: Location, text: str) -> None:
        self.document.problems.append(Problem(self.document.at(_mark(node)), dotted(path), text))


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def dotted(path: Sequence[str | int]) -> str:
    """The keys of a path, ``op_backends.rms_norm``; list indices are left out, since the column shows them."""
    return ".".join(part for part in path if isinstance(part, str))


def is_not(value: Any, expected: str) -> str:
    """The message for a raw value of the wrong kind, a mapping where a list is expected, for instance."""
    if value is None:
        return f"has no value; expected {expected}"
    kind = "a mapping" if isinstance(value, Mapping) else "a list" if isinstance(value, (list, tuple)) else repr(value)
    return f"{kind} is not {expected}"
