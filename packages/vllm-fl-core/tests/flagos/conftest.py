"""Kernel tests run on the accelerator if there is one, and else in Triton's interpreter, in a process of their own.

A test that asks for the fixture `device` launches kernels. Without an accelerator only the interpreter can do that, and
the interpreter must be chosen (TRITON_INTERPRET=1) before anything imports Triton. All such tests of a session
therefore run in one child process, whose reports become the reports of this one. The workers of pytest-xdist share it:
the first one that needs it starts it, with as many workers. With TRITON_INTERPRET=1 set by the caller they run here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_flag_gems
import pytest
from filelock import FileLock
from kernel_inputs import DEVICE, INTERPRETED
from simulated_driver import Machine

from vllm_fl.dispatch.types import AVAILABLE
from vllm_fl.flagos import aten, availability, flaggems
from vllm_fl.flagos.kernels import launch
from vllm_fl.plugins import PlatformChoice

FOLDER = Path(__file__).parent
REPORTS = "FLAGOS_TEST_REPORTS"  # names the file that the child writes its reports to
CHILD_TIMEOUT = 1500

_children: dict[Path, dict[str, list[dict[str, Any]]]] = {}


@pytest.fixture
def device() -> str:
    """The torch device on which kernels run: the accelerator's, or "cpu" in the interpreter."""
    return DEVICE


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A simulated driver in the place of Triton's."""
    assert launch.is_expected(), "this Triton calls compiled kernels in another way"
    return Machine(monkeypatch)


@pytest.fixture
def flag_gems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The stand-in, as an installed FlagGems that nothing has imported yet."""
    module = fake_flag_gems.make()
    monkeypatch.setitem(sys.modules, "flag_gems", module)
    for name in ("GEMS_VENDOR", "FLAGGEMS_DB_URL", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # so that what the import sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLAGGEMS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("vllm_fl.plugins.resolve_platform", lambda: PlatformChoice(None, "none"))
    monkeypatch.setattr(
        availability, "triton_info", lambda: availability.TritonInfo("3.6.0", "triton 3.6.0", False, ("acme",))
    )
    monkeypatch.setattr(aten, "flaggems_aten", lambda: AVAILABLE)
    monkeypatch.setattr(aten, "flaggems_version", lambda: aten.CHECKED)
    monkeypatch.setattr(aten, "REPLACED", frozenset({"mm", "mm_out", "a function that this FlagGems lacks"}))
    aten._done.clear()
    flaggems._import.cache_clear()
    yield module
    flaggems._import.cache_clear()
    aten._done.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _belongs_to_child(item):
            item.add_marker(pytest.mark.timeout(CHILD_TIMEOUT + 60))


def _belongs_to_child(item: pytest.Item) -> bool:
    is_ours = item.path.is_relative_to(FOLDER) and "device" in getattr(item, "fixturenames", ())
    return is_ours and DEVICE == "cpu" and not INTERPRETED


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not _belongs_to_child(item):
        return None
    reports = _reports_of_child(item.session).get(item.nodeid, [])
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in reports or [_missing(item)]:
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What the test before this one left set up for its module is pytest's to undo, which it would do in this place.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _missing(item: pytest.Item) -> dict[str, Any]:
    text = f"{item.nodeid} has no report: the child process ended early\n{_children_output.get('text', '')}"
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
    data: dict[str, Any] = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
    return data


_children_output: dict[str, str] = {}


def _reports_of_child(session: pytest.Session) -> dict[str, list[dict[str, Any]]]:
    """nodeid -> reports of every test that belongs to the child; it runs when the first of them is due."""
    root = session.config.rootpath
    if root not in _children:
        folder = _folder_of_run(session.config)
        output = folder / "output.txt"
        with FileLock(folder / "lock"):
            if not output.exists():
                _run_child([item.nodeid for item in session.items if _belongs_to_child(item)], root, output)
        _children_output["text"] = output.read_text(encoding="utf-8")[-4000:]
        _children[root] = _read(output.with_name("reports.jsonl"))
    return _children[root]


def _folder_of_run(config: pytest.Config) -> Path:
    """A folder that all workers of this run share."""
    base = Path(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    folder = (base.parent if hasattr(config, "workerinput") else base) / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


def _run_child(names: list[str], root: Path, output: Path) -> None:
    arguments = output.with_name("arguments.txt")
    arguments.write_text("\n".join(names), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-o", f"cache_dir={output.parent}", f"@{arguments}"]
    workers = os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if workers is not None:
        command += ["-n", workers, "--dist", "loadfile"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", REPORTS: str(output.with_name("reports.jsonl"))}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_XDIST_")}
    with open(output, "w", encoding="utf-8") as file:
        try:
            subprocess.run(
                command, cwd=root, env=environment, stdout=file, stderr=file, timeout=CHILD_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            file.write(f"\nstopped after {CHILD_TIMEOUT} s")


def _read(target: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    lines = target.read_text(encoding="utf-8").splitlines() if target.exists() else []
    for line in lines:
        data = json.loads(line)
        found.setdefault(data["nodeid"], []).append(data)
    return found


class _Recorder:
    """In the child: writes each report, so that a crash loses only the test that crashed."""

    def __init__(self, config: pytest.Config, target: str) -> None:
        self.config = config
        self.target = target

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        data.pop("node", None)  # pytest-xdist's worker
        with open(self.target, "a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    target = os.environ.get(REPORTS)
    if target and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(config, target), "flagos-recorder")
