"""scripts/bootstrap.py: what makes it start over, what it says when something is missing, what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import bootstrap
import steps

SCRIPT = Path(bootstrap.__file__)
Record = list[tuple[str, list[str]]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm-fl"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with the pyprojects of the packages only."""
    for name in bootstrap.PACKAGES:
        package = tmp_path / "clone" / "packages" / name
        package.mkdir(parents=True)
        (package / "pyproject.toml").write_text(f'[project]\nname = "{name}"\n')
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path / "clone")
    return tmp_path / "clone"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Steps are recorded instead of run; those that make a file make it."""
    done: Record = []

    def run(self: steps.Steps, title: str, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        done.append((title, list(argv)))
        if "venv" in argv:
            python = Path(argv[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.symlink_to(sys.executable)
        if "wheel" in argv and "--no-deps" in argv:
            write_wheel(Path(argv[argv.index("-w") + 1]), argv[-1].partition("==")[2])

    monkeypatch.setattr(steps.Steps, "run", run)
    monkeypatch.setattr(bootstrap, "torch_is_cuda_build", lambda _python: False)
    monkeypatch.setattr(bootstrap, "check_machine", lambda _venv, _room: None)
    return done


def write_wheel(folder: Path, version: str) -> Path:
    path = folder / f"vllm-{version}-cp3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    return path


def titles(record: Record) -> list[str]:
    return [title for title, _ in record]


def test_first_run_installs_everything_in_order(clone: Path, record: Record) -> None:
    venv = clone / ".venv"
    bootstrap.make_environment(venv)
    assert titles(record) == [
        "Create the environment",
        "Install pip and build tools",
        "Install torch 2.13.0",
        "Build vLLM 0.28.0 without kernels",
        "Install vLLM 0.28.0",
        "Install the packages",
    ]
    assert bootstrap.is_current(venv)
    last = record[-1][1]
    assert [last[i + 1] for i, word in enumerate(last) if word == "-e"] == [
        str(clone / "packages" / name) for name in bootstrap.PACKAGES
    ]


def test_second_run_does_nothing(clone: Path, record: Record, capfd: pytest.CaptureFixture[str]) -> None:
    bootstrap.make_environment(clone / ".venv")
    record.clear()
    capfd.readouterr()
    bootstrap.make_environment(clone / ".venv")
    assert record == []
    assert capfd.readouterr().err == ""


def test_further_packages_are_added_once(clone: Path, record: Record) -> None:
    for name in ("nvidia", "comm"):
        package = clone / "packages" / f"vllm-fl-{name}"
        package.mkdir()
        (package / "pyproject.toml").write_text(f'[project]\nname = "vllm-fl-{name}"\n')
    venv = clone / ".venv"
    bootstrap.make_environment(venv)
    record.clear()
    for _ in range(2):
        bootstrap.install_also(venv, ["nvidia", "comm"])
    assert titles(record) == ["Install vllm-fl-nvidia", "Install vllm-fl-comm"]
    assert bootstrap.is_current(venv)
    (clone / "packages" / "vllm-fl-comm" / "pyproject.toml").write_text('[project]\nname = "changed"\n')
    bootstrap.install_also(venv, ["nvidia", "comm"])
    assert titles(record)[2:] == ["Install vllm-fl-comm"]
    bootstrap.make_environment(venv, recreate=True)
    bootstrap.install_also(venv, ["nvidia"])
    assert titles(record)[-1] == "Install vllm-fl-nvidia"


def change_pyproject(clone: Path) -> None:
    with (clone / "packages" / "vllm-fl-core" / "pyproject.toml").open("a") as file:
        file.write("dependencies = []\n")


def lose_interpreter(clone: Path) -> None:
    (clone / ".venv" / "bin" / "python").unlink()


def damage_stamp(clone: Path) -> None:
    (clone / ".venv" / bootstrap.STAMP).write_text("{")


@pytest.mark.parametrize("change", [change_pyproject, lose_interpreter, damage_stamp])
def test_what_makes_an_environment_outdated(clone: Path, record: Record, change: Callable[[Path], None]) -> None:
    bootstrap.make_environment(clone / ".venv")
    change(clone)
    assert not bootstrap.is_current(clone / ".venv")


def test_new_version_makes_an_environment_outdated(
    clone: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap.make_environment(clone / ".venv")
    monkeypatch.setattr(bootstrap, "VLLM_VERSION", "0.28.1")
    assert not bootstrap.is_current(clone / ".venv")


def test_changed_pyproject_keeps_environment_and_wheel(
    clone: Path, record: Record, capfd: pytest.CaptureFixture[str]
) -> None:
    bootstrap.make_environment(clone / ".venv")
    change_pyproject(clone)
    record.clear()
    bootstrap.make_environment(clone / ".venv")
    assert "Create the environment" not in titles(record)
    assert "Build vLLM 0.28.0 without kernels" not in titles(record)
    assert bootstrap.is_current(clone / ".venv")
    assert "Build vLLM 0.28.0 without kernels: cached\n" in capfd.readouterr().err


def test_recreate_starts_over(clone: Path, record: Record) -> None:
    bootstrap.make_environment(clone / ".venv")
    (clone / ".venv" / "leftover").touch()
    record.clear()
    bootstrap.make_environment(clone / ".venv", recreate=True)
    assert titles(record)[0] == "Create the environment"
    assert not (clone / ".venv" / "leftover").exists()


def test_failed_step_is_taken_up_again(clone: Path, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = steps.Steps.run

    def fail(self: steps.Steps, title: str, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        recorded(self, title, argv, env)
        if title.startswith("Install torch"):
            raise steps.BootstrapError("no", "again")

    with monkeypatch.context() as patch:
        patch.setattr(steps.Steps, "run", fail)
        with pytest.raises(steps.BootstrapError):
            bootstrap.make_environment(clone / ".venv")
    assert not bootstrap.is_current(clone / ".venv")
    record.clear()
    bootstrap.make_environment(clone / ".venv")
    assert titles(record)[0] == "Install pip and build tools"
    assert bootstrap.is_current(clone / ".venv")


@pytest.mark.parametrize("recreate", [False, True])
def test_directory_of_somebody_else_is_left_alone(clone: Path, record: Record, recreate: bool) -> None:
    venv = clone / ".venv"
    venv.mkdir()
    (venv / "precious").touch()
    with pytest.raises(steps.BootstrapError) as caught:
        bootstrap.make_environment(venv, recreate=recreate)
    assert str(caught.value) == (
        f"Error: {venv} exists and was not made by this script at this place.\n"
        "Remedy: Remove it, pass --recreate to replace it, or choose another place with --venv."
    )
    assert (venv / "precious").exists()
    assert record == []


def test_recreate_replaces_an_environment_of_somebody_else(clone: Path, record: Record) -> None:
    venv = clone / ".venv"
    venv.mkdir()
    (venv / "pyvenv.cfg").touch()
    bootstrap.make_environment(venv, recreate=True)
    assert bootstrap.is_current(venv)


def test_python_without_ensurepip(clone: Path, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(steps.BootstrapError) as caught:
        bootstrap.make_environment(clone / ".venv")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert str(caught.value) == (
        f"Error: Python {version} at {sys.executable} has no module ensurepip, which makes environments.\n"
        f"Remedy: Install it (Debian and Ubuntu: apt install python{version}-venv), then run the same command again."
    )
    assert not (clone / ".venv").exists()


def test_too_little_space(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 30))
    with pytest.raises(steps.BootstrapError) as caught:
        bootstrap.check_machine(clone / ".venv", bootstrap.ROOM_CPU)
    assert str(caught.value) == (
        f"Error: {clone} has 1.0 GiB free; the environment takes about 3 GiB.\n"
        "Remedy: Free some space, or choose another place with --venv."
    )


def test_python_too_old() -> None:
    code = (
        "import runpy, sys\nsys.version_info = (3, 9, 1, 'final', 0)\ndel sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: vllm-fl needs Python 3.10 or newer; {sys.executable} is Python 3.9.\n"
        f"Remedy: run this script with a newer one, for example `python3.11 {SCRIPT}`.\n"
    )


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("OSError: [Errno 28] No space left on device", "Install torch: The disk is full."),
        (
            "NewConnectionError: Failed to establish a new connection",
            "Install torch: The package index cannot be reached.",
        ),
        ("[Errno -3] Temporary failure in name resolution", "Install torch: The package index cannot be reached."),
        ("SSLError CERTIFICATE_VERIFY_FAILED", "Install torch: The package index's certificate is not trusted."),
        ("ReadTimeoutError: Read timed out.", "Install torch: A download was interrupted."),
        (
            "ERROR: No matching distribution found for torch==2.13.0",
            "Install torch: The package index has no torch==2.13.0 for this Python and machine.",
        ),
        ("one\nerror: command 'cc' failed\ntwo\n", "Install torch failed: error: command 'cc' failed"),
        ("", "Install torch failed: no output"),
    ],
)
def test_failures_say_what_happened(tmp_path: Path, output: str, message: str) -> None:
    error = steps.explain_failure("Install torch", output, tmp_path / "log")
    assert error.message == message
    assert error.remedy
    assert str(error).endswith(f"\nLog: {tmp_path / 'log'}")


def test_failed_command_names_log_and_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runner = steps.Steps(2, tmp_path / "log")
    runner.run("Work", [sys.executable, "-c", "print('No space left on device, it says')"])
    with pytest.raises(steps.BootstrapError) as caught:
        runner.run("Break", [sys.executable, "-c", "import sys; sys.exit('ERROR: it broke')"])
    assert caught.value.message == "Break failed: ERROR: it broke", "only the output of the failed step counts"
    assert "it broke" in (tmp_path / "log").read_text()
    shown = capfd.readouterr().err
    assert "[1/2] Work: done in" in shown
    assert "[2/2] Break: failed after" in shown


def test_interruption_leaves_no_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})\nimport bootstrap, steps\nfrom pathlib import Path\n"
        f"runner = steps.Steps(1, Path({str(tmp_path / 'log')!r}))\n"
        f"bootstrap.run = lambda _: runner.run('Wait', [sys.executable, '-c', {child!r}])\n"
        "sys.exit(bootstrap.main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: pid_file.exists() and pid_file.read_text() != "")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    shown = process.stderr.read()
    assert process.wait(timeout=30) == 130
    assert shown.endswith("Interrupted. Run the same command again: the finished steps are kept.\n")
    assert not Path(f"/proc/{pid_file.read_text()}").exists()
    process.stderr.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# The wheel of vLLM


def test_damaged_wheel_is_built_again(clone: Path, record: Record) -> None:
    folder, found = bootstrap.cached_wheel(Path(sys.executable), "0.28.0")
    assert found is None
    folder.mkdir(parents=True)
    (folder / "vllm-0.28.0-cp3-none-any.whl").write_bytes(b"PK\x03\x04 half a wheel")
    wheel = bootstrap.vllm_wheel(Path(sys.executable), "0.28.0", steps.Steps(1, clone / "log"))
    assert zipfile.is_zipfile(wheel)
    assert titles(record) == ["Build vLLM 0.28.0 without kernels"]
    assert [path.name for path in folder.iterdir()] == [wheel.name]


def test_wheel_command_builds_in_a_temporary_environment_once(
    clone: Path, cache: Path, record: Record, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["vllm-wheel", "--version", "0.30.0", "--output", str(clone / "out"), "--venv", str(clone / ".venv")]
    assert bootstrap.run(arguments) == 0
    wheel = clone / "out" / "vllm-0.30.0-cp3-none-any.whl"
    assert capfd.readouterr().out == f"{wheel}\n"
    assert zipfile.is_zipfile(wheel)
    assert titles(record)[-1] == "Build vLLM 0.30.0 without kernels"
    assert not list(cache.glob("build-environment-*"))
    record.clear()
    assert bootstrap.run(arguments) == 0
    assert record == []


def test_wheel_is_built_without_kernels(clone: Path, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []
    recorded = steps.Steps.run

    def run(self: steps.Steps, title: str, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        seen.append(env or {})
        recorded(self, title, argv, env)

    monkeypatch.setattr(steps.Steps, "run", run)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    bootstrap.vllm_wheel(Path(sys.executable), "0.28.0", steps.Steps(1, clone / "log"))
    assert seen[0]["VLLM_TARGET_DEVICE"] == "empty"
    assert seen[0]["VLLM_VERSION_OVERRIDE"] == "0.28.0"
    assert "PYTHONPATH" not in seen[0]


# Which torch pip would take


@pytest.mark.parametrize(
    ("version", "requires", "expected"),
    [
        ("2.13.0+cpu", ["filelock"], False),
        ("2.13.0", ["filelock", 'nvidia-nccl==2; platform_system == "Linux"'], True),
        ("2.13.0", ["filelock", 'cuda-toolkit==13; platform_machine == "no-such-machine"'], False),
        ("2.13.0", ["filelock", 'nvidia-x; extra == "all"'], False),
    ],
    ids=["cpu", "cuda", "other-machine", "extra"],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has CUDA builds for Linux and Windows only")
def test_cuda_build_is_recognised(tmp_path: Path, version: str, requires: list[str], expected: bool) -> None:
    report = {"install": [{"metadata": {"name": "torch", "version": version, "requires_dist": requires}}]}
    assert bootstrap.torch_is_cuda_build(fake_pip(tmp_path, report)) is expected


def test_unknown_build_of_torch(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert bootstrap.torch_is_cuda_build(python) is None


def fake_pip(folder: Path, report: object) -> Path:
    """A `python` whose pip answers --report with `report`."""
    (folder / "answer.json").write_text(json.dumps(report))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nwhile [ "$1" != "--report" ]; do shift; done\ncp "{folder}/answer.json" "$2"\n')
    python.chmod(0o755)
    return python


def test_cuda_build_is_announced_before_the_download(
    clone: Path, record: Record, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "torch_is_cuda_build", lambda _python: True)
    monkeypatch.setattr(bootstrap, "installed_version", lambda _python, _name: None)
    recorded = steps.Steps.run
    shown: dict[str, str] = {}

    def run(self: steps.Steps, title: str, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        shown[title] = capfd.readouterr().err
        recorded(self, title, argv, env)

    monkeypatch.setattr(steps.Steps, "run", run)
    bootstrap.make_environment(clone / ".venv")
    assert "PIP_EXTRA_INDEX_URL" in shown["Install torch 2.13.0"]


# The command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["env", "--bogus"], "unrecognized arguments: --bogus"),
        (["vllm-wheel"], "the following arguments are required: --output"),
        (["vanish"], "invalid choice: 'vanish'"),
        ([], "the following arguments are required: command"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bootstrap.run(arguments)
    assert caught.value.code == 2
    assert message in capfd.readouterr().err


def test_quickstart_hands_its_arguments_on(clone: Path, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def execve(_program: str, command: list[str], _environment: dict[str, str]) -> None:
        started.append(command)

    monkeypatch.setattr(os, "execve", execve)
    venv = clone / "env"
    bootstrap.run(["quickstart", "--venv", str(venv), "--serve", "--port", "8123"])
    assert started == [[str(venv / "bin" / "python"), "-m", "vllm_fl", "quickstart", "--serve", "--port", "8123"]]


def test_no_network(tmp_path: Path) -> None:
    """The real script and the real pip, with an index that nobody serves."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "env", "--venv", str(tmp_path / "env")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "Error: Install pip and build tools: The package index cannot be reached.\nRemedy: " in done.stderr
    assert "Traceback" not in done.stderr
    assert Path(done.stderr.splitlines()[-1].removeprefix("Log: ")).exists()
