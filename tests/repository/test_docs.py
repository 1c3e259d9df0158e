"""What the documents say is so: links lead somewhere, commands and names exist, examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository_tree import ROOT, tracked_files

from vllm_fl.config import ENVIRONMENT, UNSUPPORTED

DOCUMENTS = tracked_files(".md")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^ *```", re.MULTILINE | re.DOTALL)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _prose(path: Path) -> str:
    """The text of a document without its code blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def _anchors(path: Path) -> set[str]:
    """The anchors that a forge makes from the headings of a document."""
    headings = re.findall(r"^#+ +(.+?) *$", _prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken_links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(<?([^)\s>]+)>?\)", re.sub(r"`[^`\n]*`", "", _prose(path))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in _anchors(linked):
            yield f"{target}: no such heading; there are {sorted(_anchors(linked))}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links(path: Path) -> None:
    assert list(_broken_links(path)) == []


def test_index_lists_every_document() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    documents = [path for path in DOCUMENTS if path.is_relative_to(ROOT / "docs") and path.name != "index.md"]
    assert [_name(path) for path in documents if f"({path.relative_to(ROOT / 'docs')})" not in index] == []


def _python_blocks() -> list[tuple[str, str]]:
    """(place, code) of the Python examples in the README that need no vLLM and no GPU."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [
        (text.count("\n", 0, m.start()) + 1, m["body"]) for m in FENCE.finditer(text) if m["language"] == "python"
    ]
    return [
        (f"README.md:{line}", body) for line, body in blocks if not re.search(r"^\s*(import|from) vllm\b(?!_)", body)
    ]


def test_readme_has_examples() -> None:
    assert len(_python_blocks()) >= 2


@pytest.mark.parametrize(("place", "code"), _python_blocks(), ids=lambda value: value if "\n" not in value else "code")
def test_readme_example_runs(place: str, code: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{place}\n{done.stderr}"


def _commands(path: Path) -> str:
    """Everything in a document that is code: indented and fenced blocks, and spans."""
    text = path.read_text(encoding="utf-8")
    indented = re.findall(r"^ {4,}\S.*$", text, re.MULTILINE)
    return "\n".join([*(m["body"] for m in FENCE.finditer(text)), *indented, *re.findall(r"`([^`\n]+)`", text)])


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = set(re.findall(r"^ *make (?:[A-Z]+=\S+ )?([a-z][a-z0-9-]*)", _commands(path), re.MULTILINE))
    assert used - targets == set()


def _test_environments() -> list[str]:
    """The names in tox.ini; ``[testenv:{a,b}]`` is two of them."""
    sections = re.findall(r"^\[testenv:(\S+)\]", (ROOT / "tox.ini").read_text(encoding="utf-8"), re.MULTILINE)
    return [name for section in sections for name in section.strip("{}").split(",")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_tox_environments_exist(path: Path) -> None:
    sections = set(_test_environments())
    used = set(re.findall(r"tox (?:run )?-e ([a-z0-9-]+)", _commands(path)))
    assert used - sections == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_paths_exist(path: Path) -> None:
    """Paths from the top of the repository that stand in code, such as `scripts/bootstrap.py`."""
    used = re.findall(r"(?<![\w/.-])((?:scripts|tests|docs|packages|examples|benchmarks)/[\w./*-]+)", _commands(path))
    assert [name for name in used if not list(ROOT.glob(name.rstrip("./")))] == []


def test_every_test_environment_is_documented() -> None:
    tox = (ROOT / "tox.ini").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^env_list = (.+)$", tox, re.MULTILINE)
    sections = _test_environments()
    # `make test` runs all but those of the matrix, vLLM's own tests, the longest end-to-end tests, and those that are
    # parts of `packages`.
    parts = {"core", "reference", "nvidia", "ascend", "comm"}
    apart = {name for name in sections if name.startswith("vllm") or name == "e2e-more"} | parts
    assert sorted(listed.split(", ")) == sorted(set(sections) - apart)
    document = (ROOT / "docs/development.md").read_text(encoding="utf-8")
    assert [name for name in sections if f"`{name}`" not in document] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_variables_exist(path: Path) -> None:
    """Every variable of ours that a document names is one that the configuration knows, or knows to refuse."""
    used = set(re.findall(r"\bVLLM_FL_[A-Z_]+[A-Z]\b", path.read_text(encoding="utf-8")))
    known = [*ENVIRONMENT, *UNSUPPORTED, *(name.removesuffix("*") for name in UNSUPPORTED)]
    assert used - set(known) == set()
