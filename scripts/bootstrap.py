#!/usr/bin/env python3
"""Creates what vllm-fl needs to run from a bare clone. Needs Python 3.10 or newer, network to PyPI, nothing else.

    python3 scripts/bootstrap.py env                          the environment .venv: torch, vLLM without kernels, the packages
    python3 scripts/bootstrap.py vllm-wheel --output DIR      only the wheel of vLLM without kernels (built once, then cached)
    python3 scripts/bootstrap.py quickstart [--serve] [...]   env, then `vllm-fl quickstart` with the same arguments

Progress goes to standard error; the output of pip is kept in a log file that an error names. What was built is cached in
$XDG_CACHE_HOME/vllm-fl (~/.cache/vllm-fl). Exit codes: 0 done, 2 wrong arguments, 3 the machine lacks something or a step
failed, 130 interrupted; `quickstart` goes on with the codes of `vllm-fl quickstart`.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 10):  # noqa: UP036 - the reader of this message runs an older Python
    sys.exit(
        "Error: vllm-fl needs Python 3.10 or newer; {} is Python {}.{}.\n"
        "Remedy: run this script with a newer one, for example `python3.11 {}`.".format(
            sys.executable, sys.version_info[0], sys.version_info[1], " ".join(sys.argv)
        )
    )

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_VERSION = "2.13.0"
VLLM_VERSION = "0.28.0"
PACKAGES = ("vllm-fl-core", "vllm-fl-reference")
BUILD_TOOLS = (
    "pip>=24.1", "setuptools>=77.0.3,<81", "setuptools-scm>=8", "setuptools-rust", "wheel", "packaging", "jinja2",
    "hatchling>=1.26", "editables",
)  # fmt: skip
EXTRAS = ("accelerate>=1.1", "gguf>=0.17")  # transformers reads the GGUF file of the quickstart model with them
STAMP = ".vllm-fl-environment.json"
STAMP_FORMAT = 1
GIB = 1 << 30
ROOM_CPU, ROOM_CUDA = 3 * GIB, 10 * GIB
PROGRESS_EVERY = 30.0
"""Seconds between two progress lines when standard error is not a terminal."""

FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"No space left on device|Disk quota exceeded",
        "The disk is full.",
        "Free some space (the environment takes 3 GiB, the caches 1 GiB; TMPDIR, XDG_CACHE_HOME and PIP_CACHE_DIR move the "
        "temporary and cached files) and run the same command again.",
    ),
    (
        r"Temporary failure in name resolution|Name or service not known|NameResolutionError|Network is unreachable|"
        r"Failed to establish a new connection|NewConnectionError|ConnectTimeoutError|Connection refused|ProxyError",
        "The package index cannot be reached.",
        "Check the network, and the proxy settings (HTTPS_PROXY) and PIP_INDEX_URL if your site has its own; then run the "
        "same command again.",
    ),
    (
        r"CERTIFICATE_VERIFY_FAILED|SSLError",
        "The package index's certificate is not trusted.",
        "Set PIP_CERT to the certificate bundle of your site, then run the same command again.",
    ),
    (
        r"ReadTimeoutError|IncompleteRead|Connection broken|Connection reset|do not match the hashes|BadZipFile",
        "A download was interrupted.",
        "Run the same command again: the finished steps are kept.",
    ),
    (
        r"No matching distribution found for (?P<what>\S+)",
        "The package index has no {what} for this Python and machine.",
        "Use Python 3.10 to 3.13 on Linux; if PIP_INDEX_URL or PIP_NO_INDEX is set, make sure that it offers {what}.",
    ),
)


class BootstrapError(Exception):
    """A failure that the reader can act on: what happened, what to do, and the log that has the details."""

    def __init__(self, message: str, remedy: str, log: Path | None = None) -> None:
        super().__init__(message)
        self.message, self.remedy, self.log = message, remedy, log

    def __str__(self) -> str:
        tail = f"\nLog: {self.log}" if self.log else ""
        return f"Error: {self.message}\nRemedy: {self.remedy}{tail}"


def cache_dir() -> Path:
    """The user's cache directory of vllm-fl (the same as `vllm_fl.quickstart.cache.cache_dir`)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "vllm-fl"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Steps


class Steps:
    """Runs commands one after another: one progress line each, their output in one log file."""

    def __init__(self, total: int, log: Path) -> None:
        self.total, self.log, self.number = total, log, 0
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")

    def run(self, title: str, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        """Runs `argv` with its output appended to the log; raises BootstrapError when it fails."""
        self.number += 1
        label = f"[{self.number}/{self.total}] {title}"
        start = time.monotonic()
        begin = self.log.stat().st_size
        with self.log.open("ab") as log:
            log.write(f"\n$ {' '.join(argv)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                list(argv),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=env,
                start_new_session=True,
            )
            with _stopped_with_us(process):
                self._wait(process, label, start)
        seconds = time.monotonic() - start
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        if process.returncode == 0:
            say(f"{clear}{label}: done in {seconds:.0f} s")
            return
        say(f"{clear}{label}: failed after {seconds:.0f} s")
        raise explain_failure(title, _read_from(self.log, begin), self.log)

    def skip(self, title: str, why: str) -> None:
        self.number += 1
        say(f"[{self.number}/{self.total}] {title}: {why}")

    def _wait(self, process: subprocess.Popen[bytes], label: str, start: float) -> None:
        terminal = sys.stderr.isatty()
        if not terminal:
            say(f"{label} ...")
        due = start + (0.2 if terminal else PROGRESS_EVERY)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
                return
            now = time.monotonic()
            if now < due:
                continue
            due = now + (0.2 if terminal else PROGRESS_EVERY)
            if terminal:
                width = shutil.get_terminal_size().columns - 1
                line = f"{label} ... {now - start:.0f} s  {_last_line(self.log)}"
                print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)
            else:
                say(f"{label} ... {now - start:.0f} s")


@contextlib.contextmanager
def _stopped_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the process and its children when this script is interrupted, so that nothing stays behind."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode("utf-8", "replace")


def _last_line(path: Path) -> str:
    size = path.stat().st_size
    lines = _read_from(path, max(0, size - 2000)).replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def explain_failure(title: str, output: str, log: Path) -> BootstrapError:
    """Turns the output of a failed step into an error that says what to do."""
    for pattern, message, remedy in FAILURES:
        found = re.search(pattern, output)
        if found:
            names = found.groupdict()
            return BootstrapError(f"{title}: {message.format(**names)}", remedy.format(**names), log)
    lines = [line for line in output.splitlines() if line.strip()]
    last = next(
        (line.strip() for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output"
    )
    return BootstrapError(
        f"{title} failed: {last[:300]}", "Read the log; `--recreate` starts with a new environment.", log
    )


# The environment


def pip(python: Path, *arguments: str) -> list[str]:
    # -I: neither PYTHONPATH nor the user's site directory may satisfy a requirement
    return [str(python), "-I", "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]


def clean_environment(**extra: str) -> dict[str, str]:
    """The process environment without what would send pip's work elsewhere."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
    return {**{k: v for k, v in os.environ.items() if k not in dropped}, **extra}


def venv_python(venv: Path) -> Path:
    return venv / "bin" / "python"


def environment_key(venv: Path) -> str:
    """A hash of everything that decides what is in the environment: versions, requirements, pyprojects, paths."""
    digest = hashlib.sha256()
    for part in (STAMP_FORMAT, TORCH_VERSION, VLLM_VERSION, BUILD_TOOLS, EXTRAS, ROOT, venv):
        digest.update(f"{part}\n".encode())
    for name in PACKAGES:
        digest.update((ROOT / "packages" / name / "pyproject.toml").read_bytes())
    return digest.hexdigest()


def read_stamp(venv: Path) -> dict[str, str]:
    """The stamp of an environment; {} if there is none or it cannot be read."""
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: Path, key: str) -> None:
    partial = venv / (STAMP + ".partial")
    partial.write_text(json.dumps({"path": str(venv), "key": key}) + "\n", encoding="utf-8")
    os.replace(partial, venv / STAMP)


def is_current(venv: Path) -> bool:
    """Whether the environment is complete and made from these very versions and pyprojects."""
    return venv_python(venv).exists() and read_stamp(venv).get("key") == environment_key(venv)


def check_machine(venv: Path, room: int) -> None:
    """Raises BootstrapError where the environment cannot be made here."""
    if os.name != "posix":
        raise BootstrapError("vLLM runs on Linux and macOS only.", "Use Linux, or WSL on Windows.")
    parent = next(path for path in (venv, *venv.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if free < room and not venv_python(venv).exists():
        raise BootstrapError(
            f"{parent} has {free / GIB:.1f} GiB free; the environment takes about {room / GIB:.0f} GiB.",
            "Free some space, or choose another place with --venv.",
        )


def prepare_venv(venv: Path, recreate: bool, steps: Steps) -> None:
    """Makes the virtual environment, or keeps the one that an earlier run began."""
    stamp = read_stamp(venv)
    ours = stamp.get("path") == str(venv)
    if venv.exists() and any(venv.iterdir()) and not ours and not (recreate and (venv / "pyvenv.cfg").exists()):
        raise BootstrapError(
            f"{venv} exists and was not made by this script at this place.",
            "Remove it, pass --recreate to replace it, or choose another place with --venv.",
        )
    if ours and not recreate and venv_python(venv).exists():
        steps.skip("Create the environment", f"kept {venv}")
        return
    for module in ("venv", "ensurepip"):
        if not _has_module(module):
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise BootstrapError(
                f"Python {version} at {sys.executable} has no module {module}, which makes environments.",
                f"Install it (Debian and Ubuntu: apt install python{version}-venv), then run the same command again.",
            )
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    write_stamp(venv, "")  # from here on the directory is ours, though not complete
    steps.run("Create the environment", [sys.executable, "-I", "-m", "venv", str(venv)], clean_environment())


def _has_module(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def torch_is_cuda_build(python: Path) -> bool | None:
    """Whether pip would install a torch that needs NVIDIA's libraries; None if pip does not say."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = pip(
            python, "install", "--quiet", "--dry-run", "--no-deps", "--report", str(report), f"torch=={TORCH_VERSION}"
        )
        done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
        if done.returncode or not report.exists():
            return None
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    if not installs:
        return False
    metadata = installs[0]["metadata"]
    if "+cpu" in metadata["version"] or not sys.platform.startswith("linux"):
        return False
    wanted = [r for r in metadata.get("requires_dist", ()) if re.match(r"(nvidia|cuda)-", r) and "extra ==" not in r]
    return any("platform_machine" not in r or os.uname().machine in r for r in wanted)


def announce_cuda_build(venv: Path) -> None:
    say(
        "Note: pip would take the CUDA build of torch here: it works on a CPU, but downloads about 3 GB and takes about 8 GB.\n"
        "      For the CPU build (0.2 GB), stop with Ctrl-C, set PIP_EXTRA_INDEX_URL to the index of CPU wheels that\n"
        '      PyTorch\'s installation page shows for "CPU", and run the same command again.'
    )
    check_machine(venv, ROOM_CUDA)
    if sys.stderr.isatty():
        for left in range(10, 0, -1):
            print(f"\r      Going on in {left} s ", end="", file=sys.stderr, flush=True)
            time.sleep(1)
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def install_torch(venv: Path, steps: Steps) -> None:
    python = venv_python(venv)
    steps.run("Install pip and build tools", pip(python, "install", "--upgrade", *BUILD_TOOLS), clean_environment())
    if not installed_version(python, "torch"):
        cuda = torch_is_cuda_build(python)
        if cuda:
            announce_cuda_build(venv)
    steps.run(f"Install torch {TORCH_VERSION}", pip(python, "install", f"torch=={TORCH_VERSION}"), clean_environment())


def installed_version(python: Path, distribution: str) -> str | None:
    """The version of a distribution in another environment, or None."""
    code = (
        "import importlib.metadata as m, sys\n"
        "try: print(m.version(sys.argv[1]))\n"
        "except m.PackageNotFoundError: sys.exit(1)"
    )
    done = subprocess.run([str(python), "-I", "-c", code, distribution], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def make_environment(venv: Path, recreate: bool = False) -> None:
    """Creates or updates the environment; does nothing when it is current."""
    with locked("environment-" + hashlib.sha256(str(venv).encode()).hexdigest()[:12]):
        if not recreate and is_current(venv):
            return
        check_machine(venv, ROOM_CPU)
        start = time.monotonic()
        log = cache_dir() / "logs" / "bootstrap.log"
        say(f"Preparing {venv} (once; pip's output is in {log})")
        steps = Steps(6, log)
        prepare_venv(venv, recreate, steps)
        install_torch(venv, steps)
        python = venv_python(venv)
        wheel = vllm_wheel(python, VLLM_VERSION, steps)
        with torch_pinned(python) as pin:
            steps.run(f"Install vLLM {VLLM_VERSION}", pip(python, "install", *pin, str(wheel)), clean_environment())
            editable = [word for name in PACKAGES for word in ("-e", str(ROOT / "packages" / name))]
            command = pip(python, "install", *pin, "--no-build-isolation", *editable, *EXTRAS)
            steps.run("Install the packages", command, clean_environment())
        write_stamp(venv, environment_key(venv))
        say(f"Environment ready in {time.monotonic() - start:.0f} s: {venv}")


@contextlib.contextmanager
def torch_pinned(python: Path) -> Iterator[list[str]]:
    """pip arguments that keep the installed torch, whatever the other requirements would like."""
    version = installed_version(python, "torch")
    with tempfile.TemporaryDirectory() as folder:
        constraint = Path(folder) / "constraint.txt"
        constraint.write_text(f"torch=={version}\n" if version else "", encoding="utf-8")
        yield ["--constraint", str(constraint)]


# The wheel of vLLM without kernels


def cached_wheel(python: Path, version: str) -> tuple[Path, Path | None]:
    """(cache folder of this vLLM and Python, the complete wheel in it or None)."""
    code = "import sys, sysconfig; print(f'cp{sys.version_info[0]}{sys.version_info[1]}-{sysconfig.get_platform()}')"
    tag = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    folder = cache_dir() / "wheels" / f"vllm-{version}-without-kernels-{tag}"
    wheels = sorted(folder.glob(f"vllm-{version}-*.whl"))
    return folder, next((wheel for wheel in wheels if zipfile.is_zipfile(wheel)), None)


def vllm_wheel(python: Path, version: str, steps: Steps) -> Path:
    """The wheel of vLLM without kernels for `python` (which has torch and the build tools), built at most once."""
    title = f"Build vLLM {version} without kernels"
    with locked("vllm-wheel"):
        folder, wheel = cached_wheel(python, version)
        if wheel:
            steps.skip(title, "cached")
            return wheel
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as build:
            environment = clean_environment(VLLM_TARGET_DEVICE="empty", VLLM_VERSION_OVERRIDE=version)
            arguments = (
                "wheel",
                "--no-deps",
                "--no-build-isolation",
                "--no-binary",
                "vllm",
                "--no-cache-dir",
                "-w",
                build,
            )
            steps.run(title, pip(python, *arguments, f"vllm=={version}"), environment)
            built = next(Path(build).glob("vllm-*.whl"))
            os.replace(built, folder / built.name)
        return folder / built.name


def build_wheel_alone(version: str, output: Path, venv: Path) -> Path:
    """Puts the wheel into `output`, using the environment if there is one, else a temporary one with torch."""
    output.mkdir(parents=True, exist_ok=True)
    python = venv_python(venv) if is_current(venv) else Path(sys.executable)
    _, wheel = cached_wheel(python, version)
    if wheel is None:
        cache_dir().mkdir(parents=True, exist_ok=True)
        steps = Steps(1 if is_current(venv) else 4, cache_dir() / "logs" / "vllm-wheel.log")
        if is_current(venv):
            wheel = vllm_wheel(python, version, steps)
        else:
            with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="build-environment-") as folder:
                temporary = Path(folder) / "venv"
                prepare_venv(temporary, False, steps)
                install_torch(temporary, steps)
                wheel = vllm_wheel(venv_python(temporary), version, steps)
    target = output / wheel.name
    if not (target.exists() and target.samefile(wheel)):
        partial = output / (wheel.name + ".partial")
        shutil.copyfile(wheel, partial)
        os.replace(partial, target)
    return target


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time: two runs neither build twice nor install into each other."""
    import fcntl

    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another run of this script ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Command line


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="bootstrap.py", description="Creates what vllm-fl needs to run from a bare clone."
    )
    commands = top.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--venv", type=Path, default=ROOT / ".venv", metavar="DIR", help="the environment (default: .venv)"
    )
    remake = argparse.ArgumentParser(add_help=False)
    remake.add_argument("--recreate", action="store_true", help="start with a new environment")
    commands.add_parser("env", parents=[shared, remake], help="create or update the environment")
    wheel = commands.add_parser("vllm-wheel", parents=[shared], help="build and cache vLLM without kernels")
    wheel.add_argument("--version", default=VLLM_VERSION, help=f"of vLLM (default: {VLLM_VERSION})")
    wheel.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="where to put the wheel; its path is printed"
    )
    commands.add_parser(
        "quickstart", parents=[shared, remake], help="env, then `vllm-fl quickstart`; further arguments go to it"
    )
    return top


def run(argv: Sequence[str]) -> int:
    arguments, rest = parser().parse_known_args(argv)
    if rest and arguments.command != "quickstart":
        parser().error(f"unrecognized arguments: {' '.join(rest)}")
    venv = Path(os.path.abspath(arguments.venv))
    if arguments.command == "vllm-wheel":
        print(build_wheel_alone(arguments.version, arguments.output.resolve(), venv))
        return 0
    make_environment(venv, arguments.recreate)
    if arguments.command == "quickstart":
        command = [str(venv_python(venv)), "-m", "vllm_fl", "quickstart", *rest]
        sys.stderr.flush()
        os.execve(command[0], command, clean_environment())
    return 0


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(sys.argv[1:])
    except BootstrapError as error:
        say(str(error))
        return 3
    except OSError as error:
        say(
            f"Error: {error}\nRemedy: check the space and the permissions of that place, then run the same command again."
        )
        return 3
    except KeyboardInterrupt:
        say("\nInterrupted. Run the same command again: the finished steps are kept.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
