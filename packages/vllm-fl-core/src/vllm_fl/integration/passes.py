"""vLLM's pass manager for inductor, on a platform without vLLM's compiled kernels."""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.compilation.passes.vllm_inductor_pass import VllmInductorPass


class NoPass(VllmInductorPass):
    """Leaves the graph as it is."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        return


class FLPassManager(PostGradPassManager):
    """vLLM's, without the pass that undoes the functionalisation of vLLM's compiled kernels where there are none.

    That pass looks up ``_C.rotary_embedding`` in any case; with no such kernel in the graph it has nothing to do.
    """

    def configure(self, config: Any) -> None:
        super().configure(config)
        if not hasattr(torch.ops._C, "rotary_embedding"):
            self.fix_functionalization = NoPass(config)
