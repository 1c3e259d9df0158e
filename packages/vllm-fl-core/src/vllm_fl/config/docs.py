"""Writes the generated tables of docs/configuration.md: ``python -m vllm_fl.config.docs docs/configuration.md``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .environment import ENVIRONMENT, UNSUPPORTED
from .keys import KEYS, shown_default


def environment_table() -> str:
    """Every environment variable, as a Markdown table."""
    rows = [
        (f"`{name}`", v.type, f"`{v.default}`" if v.default else "", f"`{v.key}`" if v.key else "", v.help)
        for name, v in ENVIRONMENT.items()
    ]
    return _table(("Variable", "Value", "Default", "Key", "Meaning"), rows)


def key_table() -> str:
    """Every key of a configuration file, as a Markdown table."""
    rows = [
        (f"`{name}`", key.type, _default(name), "yes" if key.in_platform_file else "no", key.help)
        for name, key in KEYS.items()
    ]
    return _table(("Key", "Value", "Default", "In a platform file", "Meaning"), rows)


def unsupported_table() -> str:
    """Variables of vllm-plugin-FL without effect here, as a Markdown table."""
    return _table(("Variable", "Instead"), [(f"`{name}`", instead) for name, instead in UNSUPPORTED.items()])


def updated(text: str) -> str:
    """`text` with each part between ``<!-- generated: NAME -->`` and ``<!-- end -->`` written anew.

    Raises:
        KeyError: a part that is not known.
    """
    tables = {"environment": environment_table, "keys": key_table, "unsupported": unsupported_table}
    pattern = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{tables[match[2]]()}{match[3]}", text)


def main(arguments: Sequence[str]) -> int:
    """Write the tables anew in each of the files; 2 if none is named."""
    for name in arguments:
        path = Path(name)
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0 if arguments else 2


def _default(name: str) -> str:
    key, value = KEYS[name], KEYS[name].default
    if value is None:
        return "every one" if key.merging == "restriction" else ""
    shown = shown_default(name)
    return f"`{shown}`" if shown else "empty"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
