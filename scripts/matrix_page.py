"""docs/compatibility.md, from the results of scripts/matrix.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = """\
# Which vLLM, which model

Written by `scripts/matrix.py` from `tests/matrix/results.json`; a test compares the two. Every cell was run: a tiny
model with random weights, float32, eager (`-compiled`: under torch.compile), on the CPU platform with the reference
operators and vLLM without compiled kernels. "passed" means that the greedy tokens are those of transformers on the same
checkpoint, for prompts of 1 to 300 tokens, four at a time with prompts in pieces and the prefix cache, and one at a
time; for an embedding model, that the embeddings differ by less than 1e-5. Whatever else a cell says has its reason
below the table.

A column with a device was run there, on vLLM with its compiled kernels and the platform of that device
(`scripts/matrix.py --here FILE`, and `--collect FILE` on the machine that has the repository).

`-mla`: DeepSeek's attention to latents, vLLM's default; the other cells of these models compute it as plain heads
(`VLLM_MLA_DISABLE=1`), which is how vLLM has MiniCPM3 too. `bert` is what the BGE embedding models are, `phi3` what
Phi-4 and Phi-4-mini are (`Phi3ForCausalLM` in their configurations). transformers has no MiniCPM4: vLLM's class for it
runs `minicpm4` on a checkpoint of Granite, which computes the same from other names for the scales. Qwen3.5 and Gemma 3
are the text part.
"""
TAIL = """\
## Run it

    .cache/tools/bin/tox run -e vllm0330                      one version
    .cache/tools/bin/tox run -m matrix                        all, and this document anew
    python scripts/matrix.py --versions 0.33.0 --models llama

The environments stand on `.venv` and are kept, with vLLM's wheels, in `$XDG_CACHE_HOME/vllm-fl` (`~/.cache/vllm-fl`).
`make test` runs seven of these models on the development version, 0.28.0 (`tests/e2e/test_models.py`), and four on the
oldest and the newest version, and checks that this document belongs to the results; the versions between run only when
the matrix does.
"""
PACKAGES = ("torch", "transformers", "Python")


def version_key(column: str) -> tuple[tuple[int, ...], str]:
    """Order of "0.28.0" and "0.26.0, DEVICE": by version, then by device."""
    version, _, device = column.partition(",")
    return tuple(int(part) for part in version.split(".")), device


def render(results: dict[str, Any], more: Sequence[str] = ()) -> str:
    """The document; `more` are lines of further sections."""
    versions = list(results["environments"])
    cells = {(cell["model"], cell["vllm"]): cell for cell in results["cells"]}
    models = sorted({cell["model"] for cell in results["cells"]})
    table = [["Model", *versions]]
    for model in models:
        table.append([f"`{model}`", *(mark(cells.get((model, version))) for version in versions)])
    environments = [["vLLM", *PACKAGES]]
    for version, packages in results["environments"].items():
        environments.append([version, *(packages[name] for name in PACKAGES)])
    matrix = [HEAD, *rows(table), "", *reasons(results["cells"]), "## Versions", "", *rows(environments), ""]
    return "\n".join([*matrix, *more, TAIL])


def mark(cell: dict[str, Any] | None) -> str:
    return "not run" if cell is None else str(cell["outcome"])


def rows(table: list[list[str]]) -> list[str]:
    """Lines of a Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(row)} |" for row in table]
    return [lines[0], "|" + "---|" * len(table[0]), *lines[1:]]


def reasons(cells: list[dict[str, Any]]) -> list[str]:
    """A section that says, for each model and reason, which versions it holds for; nothing if all passed."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell["outcome"] != "passed":
            found.setdefault((cell["model"], cell["outcome"], cell["reason"]), []).append(cell["vllm"])
    if not found:
        return []
    table = [["Model", "vLLM", "", "Reason"]]
    for (model, outcome, reason), versions in sorted(found.items()):
        table.append([f"`{model}`", ", ".join(versions), outcome, reason.replace("|", "\\|")])
    return ["## What does not pass", "", *rows(table), ""]
