"""What the workers of all backends share; mixed in before a worker class of vLLM."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.platforms import current_platform

from vllm_fl.config import get_settings
from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.oplist import set_rank
from vllm_fl.flagos.aten import enable_aten
from vllm_fl.tune.table import use_tuned

from .platform import native_vendor_of, stamp_selection

__all__ = ["FLWorkerMixin"]

#: Workers of this process whose graphs contain the selection; it is frozen as long as there are any.
_with_graphs: weakref.WeakSet[FLWorkerMixin] = weakref.WeakSet()


class FLWorkerMixin:
    """Ties the selection of operators to the life of the worker.

    The layers are replaced, ATen's functions too where that is asked for, and the selection of this very process enters
    the compile-cache key before the model is built; it is frozen while there are graphs that contain it. The ``fl_*``
    methods answer ``collective_rpc`` by name.
    """

    vllm_config: Any
    rank: int

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        from . import compat, layers

        parallel = self.vllm_config.parallel_config
        # Replicas of a dense model each count their ranks from 0; their index tells them apart.
        set_rank(parallel.data_parallel_index * parallel.world_size + self.rank)
        use_tuned(self.vllm_config)
        enable_aten(get_settings())
        native_vendor = native_vendor_of(self.vllm_config)
        layers.register(native_vendor)
        if native_vendor is None or not layers.are_served_by(native_vendor, "apply_top_k_top_p"):
            compat.dispatch_top_k_top_p()
        get_default_manager().prepare_compile()
        stamp_selection(self.vllm_config)
        return super().load_model(*args, **kwargs)  # type: ignore[misc]

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        if current_platform.is_out_of_tree():
            from . import compat

            compat.skip_kernel_warmup()
        result = super().compile_or_warm_up_model(*args, **kwargs)  # type: ignore[misc]
        if self._has_graphs():
            _with_graphs.add(self)
            weakref.finalize(self, _thaw_without_graphs)
            get_default_manager().freeze("vLLM has compiled or captured graphs of the model with it")
        return result

    def shutdown(self) -> None:
        _with_graphs.discard(self)
        _thaw_without_graphs()
        super().shutdown()  # type: ignore[misc]

    def fl_count_calls(self, enabled: bool = True) -> None:
        """Count the calls of operators in this process from zero, or stop counting."""
        get_default_manager().count_calls(enabled)

    def fl_call_counts(self) -> dict[str, dict[str, int]]:
        """operator -> impl_id -> calls in this process since counting began."""
        counts: dict[str, dict[str, int]] = {}
        for (operator, impl_id), calls in get_default_manager().call_counts().items():
            counts.setdefault(operator, {})[impl_id] = calls
        return counts

    def fl_selection(self) -> dict[str, str]:
        """operator -> impl_id that is chosen in this process, for each operator that has one."""
        selections = get_default_manager().selections()
        return {operator: s.chosen.impl.impl_id for operator, s in selections.items() if s.chosen is not None}

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        # vLLM would ask for its CUDA allocator, which serves sleep mode, on every platform that it does not know.
        if current_platform.is_out_of_tree():
            return nullcontext()
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
        return context

    def _has_graphs(self) -> bool:
        from vllm.config import CompilationMode, CUDAGraphMode

        config = self.vllm_config.compilation_config
        return config.mode != CompilationMode.NONE or config.cudagraph_mode != CUDAGraphMode.NONE


def _thaw_without_graphs() -> None:
    # By iteration, which passes over the worker that is being collected; len() still counts it.
    if not list(_with_graphs):
        get_default_manager().thaw()
