"""What a worker of vLLM does for a comparison; mixed into its class by vLLM's option ``worker_extension_cls``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_fl.dispatch import get_default_manager, policy_context, set_global_policy
from vllm_fl.policies import from_plain

from .places import Filters, Tracker, tensors_of
from .shadow import Shadow
from .values import measure

#: Bytes of hidden states that a rank keeps for the second run; what comes later is not compared.
LIMIT = 2 << 30
#: How far the output of a layer may be off by rounding that has added up, relative to the entry and to the root mean
#: square of all entries.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


class CompareWorker:
    """Answers ``collective_rpc`` by name; without a call of it, it does nothing at all."""

    rank: int

    def fl_use_policy(self, policy: Mapping[str, Any]) -> dict[str, str]:
        """Select by `policy` from now on; operator to the implementation that is chosen."""
        set_global_policy(from_plain(policy))
        return _chosen()

    def fl_chosen_by(self, policy: Mapping[str, Any]) -> dict[str, list[str]]:
        """Operator to the implementations that `policy` would accept, in order, as variants: with their parameters."""
        with policy_context(from_plain(policy)):
            selections = get_default_manager().selections()
        return {name: [c.variant for c in s.accepted] for name, s in selections.items() if s.accepted}

    def fl_shadow_start(
        self, second: Mapping[str, Any], filters: dict[str, Any], dumps: str | None, states: str
    ) -> None:
        """Compute every call a second time by the policy `second`; keep the outputs of the layers in `states`."""
        self._fl_states: dict[tuple[int, str], list[Any]] = {}
        self._fl_states_path = states
        self._fl_kept = 0
        self._fl_filters = Filters.from_plain(filters)
        self._fl_tracker = Tracker(self.get_model(), self._fl_keep)  # type: ignore[attr-defined]
        directory = Path(dumps) if dumps is not None else None
        self._fl_shadow = Shadow(
            get_default_manager(),
            from_plain(second),
            self._fl_filters,
            self.rank,
            lambda: self._fl_tracker.place,
            directory,
        )
        get_default_manager().watch(self._fl_shadow)

    def fl_shadow_stop(self) -> dict[str, Any]:
        """Stop; every pair of implementations that was seen, and whether all layers could be kept."""
        get_default_manager().unwatch(self._fl_shadow)
        self._fl_tracker.remove()
        torch.save(self._fl_states, self._file_of_states())
        result = {
            "rank": self.rank,
            "pairings": [pairing.as_plain() for pairing in self._fl_shadow.pairings.values()],
            "steps": self._fl_tracker.step,
            "all_layers": self._fl_kept <= LIMIT,
        }
        del self._fl_shadow, self._fl_tracker, self._fl_states
        return result

    def fl_layers_start(self, filters: dict[str, Any], states: str) -> None:
        """Compare the outputs of the layers with those that an earlier run kept in `states`."""
        self._fl_states_path = states
        self._fl_filters = Filters.from_plain(filters)
        self._fl_states = torch.load(self._file_of_states(), weights_only=True)
        self._fl_layers: list[dict[str, Any]] = []
        self._fl_tracker = Tracker(self.get_model(), self._fl_check)  # type: ignore[attr-defined]

    def fl_layers_stop(self) -> dict[str, Any]:
        """Stop; the differences of each layer and step."""
        self._fl_tracker.remove()
        result = {"rank": self.rank, "layers": self._fl_layers}
        del self._fl_tracker, self._fl_states, self._fl_layers
        return result

    def _file_of_states(self) -> Path:
        return Path(self._fl_states_path) / f"layers-rank{self.rank}.pt"

    def _fl_keep(self, name: str, output: Any) -> None:
        place = self._fl_tracker.place
        if self._fl_kept > LIMIT or not self._fl_filters.takes(place, self.rank):
            return
        tensors = [tensor.detach().to("cpu", copy=True) for tensor in tensors_of(output)]
        self._fl_kept += sum(tensor.nbytes for tensor in tensors)
        self._fl_states[place.step, name] = tensors

    def _fl_check(self, name: str, output: Any) -> None:
        place = self._fl_tracker.place
        expected = self._fl_states.get((place.step, name))
        if expected is None:
            return
        for index, (got, want) in enumerate(zip(tensors_of(output), expected, strict=False)):
            relative = _TOLERANCES.get(got.dtype, 0.0)
            size = float(want.double().square().mean().sqrt()) if want.numel() else 0.0
            found = measure(got.detach().cpu(), want, (relative, relative * size), f"output {index}")
            self._fl_layers.append({"step": place.step, "module": name, **found.as_dict()})


def _chosen() -> dict[str, str]:
    selections = get_default_manager().selections()
    return {name: s.chosen.impl.impl_id for name, s in selections.items() if s.chosen is not None}
