"""Who may know what: imports between distributions, vendors in core, changes to other people's modules."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from repository_tree import CORE, imported_names, modules, product

#: Where shims stand: core's, and those for what one device needs of vLLM's worker.
COMPAT = (
    "packages/vllm-fl-ascend/src/vllm_fl_ascend/compat.py",
    "packages/vllm-fl-core/src/vllm_fl/integration/compat.py",
)
SIBLINGS = {"vllm_fl_reference", "vllm_fl_nvidia", "vllm_fl_ascend", "vllm_fl_comm"}
HEAVY = {"torch", "vllm", "triton", "flag_gems", "torch_npu", "transformers"}

#: Names by which code would single out one maker's chips.
VENDOR_WORDS = {
    *("amd", "ascend", "cambricon", "cuda", "hip", "hpu", "huawei", "hygon", "iluvatar", "intel", "metax", "mlu"),
    *("moorethreads", "musa", "npu", "nvidia", "rocm", "tpu", "xpu"),
}
#: (module, word) -> why core may decide by it.
VENDOR_BRANCHES = {
    ("vllm_fl/plugins/native.py", "xpu"): "whether vLLM would run without us is asked device by device, as vLLM asks",
}
#: (module, what is assigned) -> why this is no monkey patch.
FOREIGN_ASSIGNMENTS = {
    ("vllm_fl_reference/worker.py", "torch.set_num_threads"): "puts back what vLLM's CPUWorker has replaced",
}

#: Modules that must be importable where neither torch nor vLLM is installed, in a process of their own each.
LIGHT_MODULES = (
    "vllm_fl",
    "vllm_fl.catalog",
    "vllm_fl.cli",
    "vllm_fl.config",
    "vllm_fl.diagnostics",
    "vllm_fl.dispatch",
    "vllm_fl.integration",
    "vllm_fl.plugins",
    "vllm_fl.profile",
    "vllm_fl.tune",
    "vllm_fl_reference",
    "vllm_fl_reference.plugin",
)


def test_core_imports_no_sibling() -> None:
    found = [
        f"{path}:{node.lineno} imports {name}"
        for path, tree in modules(CORE)
        for node, name, _ in imported_names(tree)
        if name.partition(".")[0] in SIBLINGS
    ]
    assert found == []


def test_the_command_line_is_on_top() -> None:
    """What a command does is a function of another package, which can be called without it."""
    found = [
        f"{path}:{node.lineno} imports {name}"
        for path, tree in modules(CORE)
        if "/vllm_fl/cli/" not in path and not path.endswith("/__main__.py")
        for node, name, _ in imported_names(tree)
        if name.startswith("vllm_fl.cli")
    ]
    assert found == []


def test_core_names_no_sibling_module() -> None:
    """Core finds the others through entry points; a module name in a string would be an import in disguise."""
    found = [
        f"{path}:{node.lineno} says {node.value!r}"
        for path, tree in modules(CORE)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
        if any(sibling in node.value for sibling in SIBLINGS)
    ]
    assert found == []


def _strings(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value


def _decisions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, string) of every string that a comparison, a match case, or startswith and its like decides by."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            parts: list[ast.AST] = [node.left, *node.comparators]
        elif isinstance(node, ast.match_case):
            parts = [node.pattern]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "split"}
        ):
            parts = list(node.args)
        else:
            continue
        for part in parts:
            for value in _strings(part):
                yield getattr(node, "lineno", 0) or getattr(part, "lineno", 0), value


def test_core_has_no_vendor_branch() -> None:
    found: dict[tuple[str, str], int] = {}
    for path, tree in modules(CORE):
        for line, value in _decisions(tree):
            for word in VENDOR_WORDS & set(value.lower().replace("-", "_").replace(":", "_").split("_")):
                found.setdefault((path.partition("src/")[2], word), line)
    assert set(found) == set(VENDOR_BRANCHES), f"vendor branches, with a line each: {found}"


def _foreign_names(tree: ast.AST) -> dict[str, str]:
    """Names in a module that are bound to somebody else's module or object, and what they are."""
    return {
        bound: name
        for _, name, bound in imported_names(tree)
        if not name.startswith("vllm_fl") and name.partition(".")[0] not in sys.stdlib_module_names
    }


def _root(node: ast.expr) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        return list(node.targets)
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    is_setattr = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"
    return [ast.Attribute(value=node.args[0], attr="?")] if is_setattr and node.args else []


def _patches(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, target) of every assignment to an attribute of something imported, and to sys.modules."""
    foreign = _foreign_names(tree)
    for node in ast.walk(tree):
        for target in _targets(node):
            text = ast.unparse(target)
            is_foreign = isinstance(target, ast.Attribute) and _root(target.value) in foreign
            if is_foreign or (isinstance(target, ast.Subscript) and text.startswith("sys.modules[")):
                yield node.lineno, text


def test_no_monkey_patch_outside_compat() -> None:
    found = {
        (path.partition("src/")[2], target): line
        for path, tree in product()
        if path not in COMPAT
        for line, target in _patches(tree)
    }
    assert set(found) == set(FOREIGN_ASSIGNMENTS), f"assignments, with a line each: {found}"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import torch\ntorch.compile = f", ["torch.compile"]),
        ("import torch.nn as nn\nnn.Linear.forward = f", ["nn.Linear.forward"]),
        ("from vllm import LLM\nLLM.generate = f", ["LLM.generate"]),
        ("def g():\n    import vllm\n    setattr(vllm, 'x', 1)", ["vllm.?"]),
        ("import vllm\ndel vllm.envs", ["vllm.envs"]),
        ("import sys\nsys.modules['torch'] = None", ["sys.modules['torch']"]),
        ("import torch\nself.torch = torch\ntorch = 1", []),
        ("import os\nos.environ['A'] = '1'", []),
        ("from vllm_fl import dispatch\ndispatch.x = 1", []),
    ],
)
def test_the_check_sees_a_monkey_patch(code: str, expected: list[str]) -> None:
    assert [target for _, target in _patches(ast.parse(code))] == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x == 'cuda'", ["cuda"]),
        ("if d in ('npu', 'gpu'): pass", ["npu", "gpu"]),
        ("name.startswith('cuda:')", ["cuda:"]),
        ("match v:\n    case 'nvidia': pass", ["nvidia"]),
        ("x = 'cuda'", []),
    ],
)
def test_the_check_sees_a_vendor_branch(code: str, expected: list[str]) -> None:
    assert [value for _, value in _decisions(ast.parse(code))] == expected


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_loads_nothing_heavy(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(json.loads(done.stdout.splitlines()[-1]))


def test_top_module_of_core_is_alone() -> None:
    code = "import json, sys, vllm_fl; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"pydantic", "rich", "typer", "yaml"} & set(json.loads(done.stdout))
