from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from vllm_fl.dispatch.types import Availability
from vllm_fl.plugins import loading, native, platform


class Site:
    """A folder on ``sys.path`` that distributions are written into, as an installer would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        name: str,
        version: str = "1.0",
        *,
        entry_points: Mapping[str, Mapping[str, str]] | None = None,
        requires: tuple[str, ...] = (),
        files: Mapping[str, str] | None = None,
    ) -> None:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = []
        for group, points in (entry_points or {}).items():
            groups += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(groups) + "\n")
        for path, text in (files or {}).items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_text(text)
        importlib.invalidate_caches()

    def backend(
        self,
        name: str,
        body: str = "return True",
        /,
        *,
        needs: tuple[str, ...] = (),
        top: str = "",
        **fields: object,
    ) -> None:
        """The distribution vllm-fl-NAME with one backend, whose module is NAME_plugin and runs `top` when imported.

        `body` is the probe's, `needs` the distribution's Requires-Dist, `fields` those of the descriptor.
        """
        given: dict[str, object] = {
            "name": name,
            "kind": "vendor",
            "vendor": name,
            "probe": f"{name}_plugin:probe",
            "platform": f"{name}_platform.Platform",
            **fields,
        }
        arguments = ", ".join(f"{key}={value!r}" for key, value in given.items())
        self.install(
            f"vllm-fl-{name}",
            entry_points={"vllm_fl.backends": {name: f"{name}_plugin:PLUGIN"}},
            requires=needs,
            files={
                f"{name}_plugin.py": f"""
{top}
from vllm_fl.dispatch.types import Availability
from vllm_fl.plugins import BackendPlugin
PLUGIN = BackendPlugin({arguments})
def probe():
    {body}
"""
            },
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An environment in which nothing but what the test installs brings entry points."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
        found = importlib.metadata.distributions(path=[str(folder)])
        return [point for distribution in found for point in distribution.entry_points if point.group == group]

    monkeypatch.setattr(loading, "entry_points", entry_points)
    monkeypatch.setattr(native, "entry_points", entry_points)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def is_native(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, str], None]:
    """``is_native(True, reason)``: what vLLM's own platforms are said to be."""

    def say(ok: bool, reason: str) -> None:
        monkeypatch.setattr(platform, "has_native_platform", lambda: Availability(ok, reason))

    return say


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, no_settings: None) -> None:
    for name in list(os.environ):
        if name.startswith(("VLLM_", "JAX_PLATFORMS")):
            monkeypatch.delenv(name)
