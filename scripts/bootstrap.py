#!/usr/bin/env python3
"""Creates what vllm-fl needs to run from a bare clone. Needs Python 3.10 or newer, network to PyPI, nothing else.

    python3 scripts/bootstrap.py env [--also NAME ...]       .venv with torch, vLLM without kernels and the packages
    python3 scripts/bootstrap.py vllm-wheel --output DIR     only the wheel of vLLM without kernels
    python3 scripts/bootstrap.py quickstart [--serve] [...]  env, then `vllm-fl quickstart` with the same arguments

Progress goes to standard error; the output of pip is kept in a log file that an error names. The wheel of vLLM is built
once and cached in $XDG_CACHE_HOME/vllm-fl (~/.cache/vllm-fl). Exit codes: 0 done, 2 wrong arguments, 3 the machine
lacks something or a step failed, 130 interrupted; `quickstart` goes on with those of `vllm-fl quickstart`.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steps import BootstrapError, Steps, cache_dir, clean_environment, locked, say

ROOT = Path(__file__).resolve().parent.parent
TORCH_VERSION = "2.13.0"
VLLM_VERSION = "0.28.0"
PACKAGES = ("vllm-fl-core", "vllm-fl-reference")
ALSO = ("nvidia", "ascend", "comm")
BUILD_TOOLS = (
    "pip>=24.1", "setuptools>=77.0.3,<81", "setuptools-scm>=8", "setuptools-rust", "wheel", "packaging", "jinja2",
    "hatchling>=1.26", "editables",
)  # fmt: skip
EXTRAS = ("accelerate>=1.1", "gguf>=0.17")  # transformers reads the GGUF file of the quickstart model with them
STAMP = ".vllm-fl-environment.json"
STAMP_FORMAT = 1
GIB = 1 << 30
ROOM_CPU, ROOM_CUDA = 3 * GIB, 10 * GIB


# The environment


def pip(python: Path, *arguments: str) -> list[str]:
    # -I: neither PYTHONPATH nor the user's site directory may satisfy a requirement
    return [str(python), "-I", "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments]


def pip_install(python: Path, *arguments: str) -> list[str]:
    # Python compiles what it imports; pip would compile all of torch and transformers, in one process
    return pip(python, "install", "--no-compile", *arguments)


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


def read_stamp(venv: Path) -> dict[str, Any]:
    """The stamp of an environment; {} if there is none or it cannot be read."""
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: Path, key: str, also: dict[str, str] | None = None) -> None:
    partial = venv / (STAMP + ".partial")
    partial.write_text(json.dumps({"path": str(venv), "key": key, "also": also or {}}) + "\n", encoding="utf-8")
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
        if find_spec(module) is None:
            version = f"{sys.version_info[0]}.{sys.version_info[1]}"
            raise BootstrapError(
                f"Python {version} at {sys.executable} has no module {module}, which makes environments.",
                f"Install it (Debian and Ubuntu: apt install python{version}-venv), then run the same command again.",
            )
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    write_stamp(venv, "")  # from here on the directory is ours, though not complete
    steps.run("Create the environment", [sys.executable, "-I", "-m", "venv", str(venv)], clean_environment())


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
        "Note: pip would take the CUDA build of torch here. It works on a CPU, but downloads 3 GB and takes 8 GB.\n"
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
    steps.run("Install pip and build tools", pip_install(python, "--upgrade", *BUILD_TOOLS), clean_environment())
    if not installed_version(python, "torch"):
        cuda = torch_is_cuda_build(python)
        if cuda:
            announce_cuda_build(venv)
    steps.run(f"Install torch {TORCH_VERSION}", pip_install(python, f"torch=={TORCH_VERSION}"), clean_environment())


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
            steps.run(f"Install vLLM {VLLM_VERSION}", pip_install(python, *pin, str(wheel)), clean_environment())
            editable = [word for name in PACKAGES for word in ("-e", str(ROOT / "packages" / name))]
            command = pip_install(python, *pin, "--no-build-isolation", *editable, *EXTRAS)
            steps.run("Install the packages", command, clean_environment())
        write_stamp(venv, environment_key(venv))
        say(f"Environment ready in {time.monotonic() - start:.0f} s: {venv}")


def install_also(venv: Path, names: Sequence[str]) -> None:
    """Adds further packages of this repository, editable, where they are missing or declare themselves otherwise."""
    packages = {name: ROOT / "packages" / f"vllm-fl-{name}" for name in names}
    digests = {name: hashlib.sha256((p / "pyproject.toml").read_bytes()).hexdigest() for name, p in packages.items()}
    also: dict[str, str] = dict(read_stamp(venv).get("also", {}))
    missing = [name for name in names if also.get(name) != digests[name]]
    if not missing:
        return
    steps = Steps(len(missing), cache_dir() / "logs" / "bootstrap.log")
    for name in missing:
        command = pip_install(venv_python(venv), "--no-deps", "--no-build-isolation", "-e", str(packages[name]))
        steps.run(f"Install vllm-fl-{name}", command, clean_environment())
        also[name] = digests[name]
        write_stamp(venv, environment_key(venv), also)


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
    env = commands.add_parser("env", parents=[shared, remake], help="create or update the environment")
    env.add_argument("--also", nargs="+", default=[], choices=ALSO, metavar="NAME", help=f"add {', '.join(ALSO)}")
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
    if arguments.command == "env":
        install_also(venv, arguments.also)
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
        say(f"Error: {error}\nRemedy: check the space and permissions of that place, then run the same command again.")
        return 3
    except KeyboardInterrupt:
        say("\nInterrupted. Run the same command again: the finished steps are kept.")
        return 130


if __name__ == "__main__":
    sys.exit(main())
