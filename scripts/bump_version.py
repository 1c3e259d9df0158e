"""Change the version that all distributions of this repository share, at every place that states it.

    python3 scripts/bump_version.py 0.2.0 --dry-run     # shows the changed lines, writes nothing
    python3 scripts/bump_version.py 0.2.0

Needs only the standard library. The places: vllm_fl/version.py, `version` and the exact sibling pins in each
packages/*/pyproject.toml, and a new section in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION_FILE = "packages/vllm-fl-core/src/vllm_fl/version.py"
CHANGELOG = "CHANGELOG.md"
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?(?:\.dev\d+)?")


class BumpError(Exception):
    """A place does not state the version that it should, or the new version is not one."""


def current_version(texts: Mapping[str, str]) -> str:
    """The version that version.py states.

    Raises:
        BumpError: it states none.
    """
    match = re.search(r'^__version__ = "([^"]+)"$', texts[VERSION_FILE], re.MULTILINE)
    if match is None:
        raise BumpError(f'{VERSION_FILE}: no line __version__ = "..."')
    return match[1]


def bump(texts: Mapping[str, str], new: str) -> dict[str, str]:
    """The files that change, by path, with their new text.

    Args:
        texts: path relative to the repository -> text, for each file that states the version.
        new: the new version, as in ``0.2.0``, ``0.2.0rc1`` or ``0.2.0.dev1``.

    Raises:
        BumpError: `new` is no version or the present one, or a file does not state the present version where it
            should, or pins a sibling to another one.
    """
    if not VERSION.fullmatch(new):
        raise BumpError(f"{new!r} is not a version; write MAJOR.MINOR.PATCH, then optionally aN, bN, rcN or .devN")
    old = current_version(texts)
    if new == old:
        raise BumpError(f"the version is {old} already")
    changed = {}
    for path, text in texts.items():
        if path == CHANGELOG:
            changed[path] = _open_section(text, new)
        elif path == VERSION_FILE:
            changed[path] = _replace_once(path, text, f'__version__ = "{old}"', f'__version__ = "{new}"')
        else:
            changed[path] = _bump_pins(
                path, _replace_once(path, text, f'version = "{old}"', f'version = "{new}"'), old, new
            )
    return changed


def _replace_once(path: str, text: str, old: str, new: str) -> str:
    lines = text.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if line.strip() == old]
    if len(places) != 1:
        raise BumpError(f"{path}: expected one line {old}, found {len(places)}")
    lines[places[0]] = lines[places[0]].replace(old, new)
    return "".join(lines)


def _bump_pins(path: str, text: str, old: str, new: str) -> str:
    for name, pinned in re.findall(r'"(vllm-fl-[a-z]+)(.*?)"', text.partition("\ndependencies = ")[2]):
        if pinned and pinned != f"=={old}":
            raise BumpError(f"{path}: {name} is pinned {pinned!r}, expected '=={old}'")
    return re.sub(rf'"(vllm-fl-[a-z]+)=={re.escape(old)}"', rf'"\1=={new}"', text)


def _open_section(changelog: str, version: str) -> str:
    heading = f"## [{version}]"
    if heading in changelog:
        return changelog
    before, first, rest = changelog.partition("\n## [")
    if not first:
        raise BumpError(f"{CHANGELOG}: no section heading '## [version]'")
    return f"{before}\n{heading} - unreleased\n{first}{rest}"


def read_sites(root: Path = ROOT) -> dict[str, str]:
    """Every file that states the version, by path relative to `root`."""
    paths = [root / VERSION_FILE, *sorted(root.glob("packages/*/pyproject.toml")), root / CHANGELOG]
    return {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Change the version that all distributions share.")
    parser.add_argument("version", help="the new version, as in 0.2.0")
    parser.add_argument("--dry-run", action="store_true", help="show the changes, write nothing")
    options = parser.parse_args(argv)
    texts = read_sites()
    try:
        changed = bump(texts, options.version)
    except BumpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path, text in changed.items():
        before, after = texts[path].splitlines(), text.splitlines()
        print("\n".join(difflib.unified_diff(before, after, path, path, n=0, lineterm="")))
        if not options.dry_run:
            (ROOT / path).write_text(text, encoding="utf-8")
    print(f"{'would change' if options.dry_run else 'changed'} {len(changed)} files to {options.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
