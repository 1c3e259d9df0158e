"""What a worker of vLLM does for a profile; mixed into its class by vLLM's option ``worker_extension_cls``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_fl.dispatch import get_default_manager

from .ranges import ModelRange, Ranges


class ProfileWorker:
    """Answers ``collective_rpc`` by name; without a call of :meth:`fl_profile_start` it does nothing at all."""

    rank: int

    def fl_profile_start(self) -> None:
        """Begin to record: every operator of torch, every kernel of the device, every dispatched call."""
        import torch

        self._fl_watcher = Ranges()
        self._fl_model = ModelRange(self.get_model())  # type: ignore[attr-defined]
        get_default_manager().watch(self._fl_watcher)
        self._fl_profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())
        self._fl_profiler.start()

    def fl_profile_stop(self, directory: str) -> dict[str, Any]:
        """Stop, and write the timeline to ``trace-rankN.json.gz`` in `directory`.

        Returns:
            "rank"; "trace", the file; "selection", operator to the implementation that is chosen here; "device_type".
        """
        import torch

        _wait_for_device()
        self._fl_profiler.stop()
        manager = get_default_manager()
        manager.unwatch(self._fl_watcher)
        self._fl_model.remove()
        path = Path(directory) / f"trace-rank{self.rank}.json.gz"
        self._fl_profiler.export_chrome_trace(str(path))
        del self._fl_profiler, self._fl_model, self._fl_watcher
        chosen = {name: s.chosen.impl.impl_id for name, s in manager.selections().items() if s.chosen is not None}
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return {
            "rank": self.rank,
            "trace": str(path),
            "selection": chosen,
            "device_type": device.type if device is not None else "cpu",
        }


def _wait_for_device() -> None:
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
