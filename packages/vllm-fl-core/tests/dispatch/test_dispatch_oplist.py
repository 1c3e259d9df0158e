"""The oplist: every kind, first uses, one file a rank, created safely."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dispatch_helpers import flagos, reference, silu, vendor

from vllm_fl.dispatch import call_op, get_default_manager, oplist, reset_default_manager, reset_global_policy


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Start a default manager with three kinds that writes its oplist to the returned path."""
    monkeypatch.setattr(oplist, "_rank", None)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def start(path: Path | None = None) -> Path:
        path = path or tmp_path / "oplist.txt"
        monkeypatch.setenv("FLAGGEMS_ENABLE_OPLIST_PATH", str(path))
        reset_default_manager()
        reset_global_policy()
        get_default_manager().registry.register_many(
            [
                flagos("silu_and_mul", silu(0)),
                vendor("acme", "moe_sum", lambda input, output: None),
                vendor("acme", "gelu_and_mul", lambda x, approximate="none": _refuse()),
                reference("gelu_and_mul", lambda x, approximate="none": x),
            ]
        )
        return path

    return start


def _refuse() -> Any:
    raise NotImplementedError


def use() -> None:
    for _ in range(3):
        call_op("silu_and_mul", 1)
        call_op("moe_sum", 1, 2)
        call_op("gelu_and_mul", 1)


LINES = [
    "[DEBUG] vllm_fl.dispatch.ops.silu_and_mul: default.flagos",
    "[DEBUG] vllm_fl.dispatch.ops.moe_sum: vendor.acme",
    "[DEBUG] vllm_fl.dispatch.ops.gelu_and_mul: reference.torch",
]


def test_first_use_of_each_kind(record: Callable[..., Path]) -> None:
    path = record()
    assert not path.exists()
    use()
    assert path.read_text().splitlines() == LINES
    assert path.stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    get_default_manager().registry.register_impl(reference("silu_and_mul", silu(0)))
    call_op("silu_and_mul", 1)
    assert list(tmp_path.iterdir()) == []


def test_one_file_a_rank(record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("RANK", "2")
    path = record()
    use()
    assert (path.parent / "oplist.rank2.txt").read_text().splitlines() == LINES
    oplist.set_rank(3)
    use()
    assert (path.parent / "oplist.rank3.txt").read_text().splitlines() == LINES
    monkeypatch.setattr(oplist, "_rank", None)
    monkeypatch.delenv("RANK")
    assert oplist.current_rank() == 5
    monkeypatch.setenv("LOCAL_RANK", "x")
    assert oplist.current_rank() == 0


def test_lines_are_appended(record: Callable[..., Path]) -> None:
    path = record()
    path.write_text("[DEBUG] flag_gems.ops.mm: GEMS MM\n")
    use()
    assert path.read_text().splitlines() == ["[DEBUG] flag_gems.ops.mm: GEMS MM", *LINES]


def test_no_file_stays_open(record: Callable[..., Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        record()  # each time with another manager
        use()
    assert len(os.listdir("/proc/self/fd")) == before


def test_child_writes_for_itself(record: Callable[..., Path]) -> None:
    path = record()
    use()
    pid = os.fork()
    if pid == 0:
        try:
            oplist.set_rank(1)
            use()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert path.read_text().splitlines() == LINES
    assert (path.parent / "oplist.rank1.txt").read_text().splitlines() == LINES


def symbolic_link(path: Path) -> str:
    target = path.parent / "victim"
    target.write_text("precious")
    path.symlink_to(target)
    return f"{path} is a symbolic link, which is not followed; name the file itself"


def hard_link(path: Path) -> str:
    target = path.parent / "victim"
    target.write_text("precious")
    path.hardlink_to(target)
    return f"{path} has 2 names (hard links); remove it or name another file"


def pipe(path: Path) -> str:
    os.mkfifo(path)
    os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return f"{path} is not a plain file; remove it or name another file"


def no_directory(path: Path) -> str:
    path.parent.rmdir()
    return f"[Errno 2] No such file or directory: '{path}'"


@pytest.mark.parametrize("trap", [symbolic_link, hard_link, pipe, no_directory], ids=lambda trap: trap.__name__)
def test_traps(trap: Callable[[Path], str], record: Callable[..., Path], tmp_path: Path, warnings: list[str]) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    path = folder / "oplist.txt"
    problem = trap(path)
    record(path)
    use()
    assert warnings == [f"environment variable FLAGGEMS_ENABLE_OPLIST_PATH: no oplist is written: {problem}"]
    victim = folder / "victim"
    assert not victim.exists() or victim.read_text() == "precious"


def test_file_of_somebody_else(
    record: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    path = record()
    path.write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    use()
    assert path.read_text() == ""
    assert f"{path} belongs to user {path.stat().st_uid}; remove it or name another file" in warnings[0]
