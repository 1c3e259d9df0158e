"""A simulated driver and compiler, for what the host does around a launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.runtime.jit import JITFunction

from vllm_fl.flagos.kernels import launch


class Machine:
    """A driver and a compiler that write down what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.ran: list[tuple[Any, ...]] = []
        self.device = 0
        active = SimpleNamespace(
            get_current_device=lambda: self.device, get_current_stream=lambda device: f"stream of {device}"
        )
        monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
        monkeypatch.setattr(JITFunction, "run", self._compile)
        launch.is_expected()  # asked before JITFunction.run was replaced

    def _compile(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        number = len(self.compiled)
        self.compiled.append({"args": args, "grid": grid, **kwargs})
        return SimpleNamespace(
            run=lambda *args: self.ran.append(args), function=f"function {number}", packed_metadata=f"metadata {number}"
        )
