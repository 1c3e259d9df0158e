"""Checks the names of a new backend and fills in the templates."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_fl.errors import ConfigError
from vllm_fl.version import __version__

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]*")
#: Names of modules of the distribution, which the backend's own module stands beside.
_MODULES = ("conformance", "device", "impl", "platform", "plugin", "register_ops", "worker")
#: Words that mean something else in a token or in VLLM_FL_PLATFORM.
_TOKENS = ("flagos", "impl", "reference", "vendor")
#: Distributions of vllm-fl that are no backends.
_OWN = ("comm", "core")

#: Template -> path in the distribution. Templates of the device are left out on the CPU, and the other way round.
_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "tox.ini": "tox.ini",
    "ci.yml": ".github/workflows/ci.yml",
    "init.py": "src/{package}/__init__.py",
    "py.typed": "src/{package}/py.typed",
    "plugin.py": "src/{package}/plugin.py",
    "device.py": "src/{package}/device.py",
    "backend.py": "src/{package}/{module}.py",
    "impl_init.py": "src/{package}/impl/__init__.py",
    "activation.py": "src/{package}/impl/activation.py",
    "normalization.py": "src/{package}/impl/normalization.py",
    "rotary.py": "src/{package}/impl/rotary.py",
    "attention.py": "src/{package}/impl/attention.py",
    "register_ops.py": "src/{package}/register_ops.py",
    "platform_cpu.py": "src/{package}/platform.py",
    "platform_device.py": "src/{package}/platform.py",
    "worker.py": "src/{package}/worker.py",
    "backend.yaml": "src/{package}/{name}.yaml",
    "conformance.yaml": "src/{package}/conformance.yaml",
    "test_conformance.py": "tests/test_{module}_conformance.py",
    "test_backend.py": "tests/test_{module}_backend.py",
}
_ON_CPU = {"platform_cpu.py"}
_ON_DEVICE = {"device.py", "platform_device.py", "worker.py"}


@dataclass(frozen=True)
class NewBackend:
    """The names of a new backend.

    Args:
        name: the backend's and the vendor's name, as in ``VLLM_FL_PLATFORM=NAME``.
        device: the device's name in PyTorch; ``"cpu"`` for operators on the CPU.
        sdk: the module that registers the device with PyTorch.

    Raises:
        ConfigError: a name cannot be used.
    """

    name: str
    device: str = "cpu"
    sdk: str = ""

    def __post_init__(self) -> None:
        _check_name(self.name, self.module)
        if not _IDENTIFIER.fullmatch(self.device):
            raise ConfigError(
                f"--device {self.device!r} is not the name of a PyTorch device, such as cpu or npu, without an index"
            )
        if not self.sdk:
            object.__setattr__(self, "sdk", "" if self.on_cpu else f"torch_{self.device}")
        elif not re.fullmatch(r"[A-Za-z_]\w*", self.sdk) or self.on_cpu:
            named = "it is not the name of a top-level module, such as torch_npu"
            reason = "the CPU needs none" if self.on_cpu else named
            raise ConfigError(f"--sdk {self.sdk!r}: {reason}")

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def module(self) -> str:
        """The name as part of an identifier."""
        return self.name.replace("-", "_")

    @property
    def package(self) -> str:
        return f"vllm_fl_{self.module}"

    @property
    def distribution(self) -> str:
        return f"vllm-fl-{self.name.replace('_', '-')}"

    @property
    def folder(self) -> str:
        """Name of the folder that it is written to by default."""
        return f"{self.name}-backend"

    @cached_property
    def values(self) -> dict[str, Any]:
        """What the templates are filled with."""
        words = [word.capitalize() for word in re.split("[-_]", self.name)]
        major, minor = (int(part) for part in __version__.split(".")[:2])
        return {
            "name": self.name,
            "module": self.module,
            "package": self.package,
            "distribution": self.distribution,
            "title": " ".join(words),
            "cls": "".join(words),
            "device": self.device,
            "sdk": self.sdk,
            "low": f"{major}.{minor}",
            "high": f"{major}.{minor + 1}",
            "series": f"{major}.{minor}",
        }

    def render(self) -> dict[str, str]:
        """Path in the distribution -> text."""
        from jinja2 import Environment, StrictUndefined

        environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
        left_out = _ON_DEVICE if self.on_cpu else _ON_CPU
        folder = files(__package__) / "templates"
        return {
            path.format_map(self.values): environment.from_string(
                (folder / f"{template}.j2").read_text(encoding="utf-8")
            ).render(self.values)
            for template, path in _FILES.items()
            if template not in left_out
        }


def write(backend: NewBackend, folder: Path) -> list[Path]:
    """Write the distribution into `folder`, which must not exist or be empty; returns the files.

    Raises:
        ConfigError: `folder` is not empty, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise ConfigError(f"{str(folder)!r} {what}; name another folder with --dir, or remove it")
    paths = []
    for name, text in backend.render().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _check_name(name: str, module: str) -> None:
    if not _NAME.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")
        hint = f"; did you mean {near!r}?" if near and _NAME.fullmatch(near) else ""
        raise ConfigError(
            f"{name!r} cannot be a backend's name: lower-case letters, digits, '-' and '_', from a letter on{hint}"
        )
    if keyword.iskeyword(module) or module in _MODULES or name in _TOKENS:
        kind = "a keyword of Python" if keyword.iskeyword(module) else "a name that vllm-fl or the distribution uses"
        raise ConfigError(f"{name!r} cannot be a backend's name: it is {kind}; take your company's or your chip's")
    from vllm_fl.plugins import installed_backends

    taken = {backend.entry_point: backend.distribution for backend in installed_backends()}
    if name in taken:
        raise ConfigError(f"a backend {name!r} is installed already, by {taken[name]}; choose another name")
    if name in _OWN:
        raise ConfigError(f"{name!r} cannot be a backend's name: vllm-fl-{name} is a distribution of vllm-fl itself")
    if find_spec(f"vllm_fl_{module}") is not None:
        raise ConfigError(f"a module vllm_fl_{module} is installed already; choose another name than {name!r}")
