"""The repository as the checks see it: its files, and its modules as syntax trees."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "packages/vllm-fl-core/src/vllm_fl"
PACKAGES = tuple(sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")))


@functools.cache
def tracked_files(suffix: str = "") -> tuple[Path, ...]:
    """Every file that git tracks or would track (not what .gitignore names), with this suffix."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {ROOT / name for name in listed.split("\0") if name.endswith(suffix) and name}
    return tuple(sorted(path for path in files if path.is_file()))


def modules(*folders: Path) -> Iterator[tuple[str, ast.Module]]:
    """(path relative to the repository, syntax tree) of every tracked Python module below `folders`."""
    for path in tracked_files(".py"):
        if any(path.is_relative_to(folder) for folder in folders):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"), str(path))


def product() -> Iterator[tuple[str, ast.Module]]:
    """The modules that are shipped in a wheel."""
    return modules(*(package / "src" for package in PACKAGES))


def imported_names(tree: ast.AST) -> Iterator[tuple[ast.stmt, str, str]]:
    """(statement, dotted module or object imported, name that it is bound to) of every absolute import in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}", alias.asname or alias.name
