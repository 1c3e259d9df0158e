"""The environments of scripts/matrix.py: one for each vLLM, on top of a base environment that has torch.

An environment holds only what differs from its base: a path file makes the packages of the base visible, and pip adds
vLLM without kernels and the newest version of whatever it does not accept of the base's. So one takes seconds, and
some 100 MB.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

from bootstrap import pip_install, torch_pinned, venv_python, vllm_wheel
from steps import BootstrapError, Steps, cache_dir, clean_environment, locked

REPORTED = ("torch", "transformers", "vllm")


def describe(python: Path) -> dict[str, str]:
    """Versions that a result depends on, of another environment."""
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "print(json.dumps({'Python': platform.python_version(), **{n: m.version(n) for n in sys.argv[1:]}}))"
    )
    done = subprocess.run(
        [str(python), "-I", "-c", code, *REPORTED], capture_output=True, text=True, check=True, env=clean_environment()
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def describe_here() -> tuple[str, dict[str, str]]:
    """(vLLM's version and the device, versions) of this Python and machine."""
    from vllm.platforms import current_platform

    found = {"Python": platform.python_version(), **{name: version(name) for name in REPORTED}}
    return f"{found['vllm']}, {current_platform.get_device_name()}", found


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def prepare(vllm: str, base: Path) -> Path:
    """The Python of an environment with this vLLM; made, with its wheel, when it is not there.

    Args:
        vllm: its version.
        base: an environment with torch, pip and the packages under test, such as that of scripts/bootstrap.py.

    Raises:
        BootstrapError: a step failed, or the base has no torch.
    """
    base_python = venv_python(base)
    if not base_python.exists():
        raise BootstrapError(f"{base} is no environment.", "Make it with `python scripts/bootstrap.py env`.")
    packages = site_packages(base_python)
    name = f"vllm-{vllm}-{hashlib.sha256(str(packages).encode()).hexdigest()[:8]}"
    folder, log = cache_dir() / "matrix" / name, cache_dir() / "logs" / f"matrix-{name}.log"
    python, complete = venv_python(folder), folder / "complete"
    with locked(f"matrix-{name}"):
        if complete.exists():
            return python
        steps = Steps(3, log)
        wheel = vllm_wheel(base_python, vllm, steps)
        shutil.rmtree(folder, ignore_errors=True)
        command = [str(base_python), "-I", "-m", "venv", "--without-pip", str(folder)]
        steps.run(f"Create the environment of vLLM {vllm}", command, clean_environment())
        # addsitedir reads the base's own path files, too: editable installations stand in those.
        line = f"import site; site.addsitedir({str(packages)!r})\n"
        (site_packages(python) / "base.pth").write_text(line, encoding="utf-8")
        with torch_pinned(base_python) as pin:
            # vLLM's files of models with a vision part import torchvision, which the build without kernels leaves out.
            command = pip_install(python, *pin, "--upgrade-strategy", "only-if-needed", str(wheel), "torchvision")
            steps.run(f"Install vLLM {vllm}", command, clean_environment())
        complete.touch()
    return python
