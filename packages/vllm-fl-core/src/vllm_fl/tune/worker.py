"""What a worker of vLLM does for the tuner; mixed into its class by vLLM's option ``worker_extension_cls``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm_fl.compare.worker import CompareWorker
from vllm_fl.dispatch import SelectionPolicy, get_default_manager, policy_context
from vllm_fl.dispatch.parameters import settings_of, text_of
from vllm_fl.integration.graphs import Exchange, obstacle
from vllm_fl.integration.layers.native import follow_selection, left_to_vllm
from vllm_fl.policies import from_plain
from vllm_fl.profile.worker import ProfileWorker

#: Name, allowed values and default of what may be varied.
PlainDimension = tuple[str, list[str], str]


class TuneWorker(ProfileWorker, CompareWorker):
    """Is profiled, and selects by one policy after the other."""

    _fl_exchange: Exchange | None = None

    def fl_exchange_graphs(self) -> str:
        """Let compiled code and graphs follow the policy from now on; why that cannot be, or nothing."""
        reason = obstacle(self)
        if not reason:
            self._fl_exchange = Exchange(self)
        return reason

    def fl_survey(self, begin: bool) -> None:
        """Call it before and after a workload, which shows what graphs and code have to have."""
        if self._fl_exchange is not None:
            self._fl_exchange.survey(begin)

    def fl_use_policy(self, policy: Mapping[str, Any]) -> dict[str, str]:
        """Select by `policy` from now on; operator to the implementation that is chosen."""
        with _thawed():
            chosen = super().fl_use_policy(policy)
        custom_ops = self.vllm_config.compilation_config.custom_ops  # type: ignore[attr-defined]
        self._fl_native = follow_selection(self.get_model(), custom_ops)  # type: ignore[attr-defined]
        if self._fl_exchange is not None:
            self._fl_exchange.follow(self._fl_native)
        return chosen

    def fl_native_uses(self) -> dict[str, str]:
        """Operator to implementation, where a layer of vLLM's has taken over: there are no calls to be counted."""
        return self._fl_native

    def fl_left_to_vllm(self, policy: Mapping[str, Any]) -> list[str]:
        """Layers that compute otherwise here than in a new engine that selects by `policy`."""
        with _thawed(), policy_context(from_plain(policy)):
            return left_to_vllm(self.get_model())  # type: ignore[attr-defined]

    def fl_chosen_by(self, policy: Mapping[str, Any]) -> dict[str, list[str]]:
        """Operator to the variants that `policy` would accept, in order."""
        with _thawed():
            return super().fl_chosen_by(policy)

    def fl_dimensions(self) -> dict[str, dict[str, list[PlainDimension]]]:
        """Operator to implementation to its parameters, bucket by bucket."""
        found: dict[str, dict[str, list[PlainDimension]]] = {}
        for name, impls in get_default_manager().registry.snapshot().impls_by_op.items():
            for impl in impls:
                settings = settings_of(impl, SelectionPolicy())
                found.setdefault(name, {})[impl.impl_id] = [
                    (setting.name, list(setting.parameter.by_text), text_of(setting.value)) for setting in settings
                ]
        return found

    def fl_without_graphs(self, off: bool) -> None:
        """Run the model without compiled code and graphs, or with them again."""
        if self._fl_exchange is not None:
            self._fl_exchange.switch_off(off)


@contextmanager
def _thawed() -> Iterator[None]:
    """Within the block the selection may change, although graphs have it."""
    manager = get_default_manager()
    reason = manager.frozen
    manager.thaw()
    try:
        yield
    finally:
        if reason is not None:
            manager.freeze(reason)
