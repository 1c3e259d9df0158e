"""Features of vLLM that the CPU reference platform has in part: what is asked for and cannot be served is refused."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from vllm_fl.errors import ConfigError
from vllm_fl.logging import get_logger

__all__ = ["settle_lora", "settle_speculation"]

#: Ways of drafting that need no kernel of vLLM's.
_DRAFTS = ("custom_class", "medusa", "ngram", "suffix")


def settle_speculation(vllm_config: Any) -> None:
    """Check the way of drafting.

    Raises:
        ConfigError: it needs kernels that are not there, or a package that is not installed.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method not in _DRAFTS:
        raise ConfigError(
            f"--speculative-config: drafting by method {speculative.method!r} needs kernels that the CPU reference"
            " platform does not have; choose 'ngram', or leave the option out"
        )
    if speculative.method == "ngram" and find_spec("numba") is None:
        raise ConfigError(
            "--speculative-config: vLLM's method 'ngram' needs numba, which is not installed;"
            " remedy: pip install 'vllm-fl-reference[speculation]'"
        )


def settle_lora(vllm_config: Any) -> None:
    """Switch torch.compile off where adapters are enabled, and check the model.

    Raises:
        ConfigError: the model has experts.
    """
    if vllm_config.lora_config is None:
        return
    from vllm.config import CompilationMode

    if vllm_config.model_config.get_num_experts():
        raise ConfigError(
            "--enable-lora: the CPU reference platform has no adapters for mixtures of experts; merge the adapter into"
            " the checkpoint (merge_and_unload() of PEFT) and serve that"
        )
    compilation = vllm_config.compilation_config
    if compilation.mode not in (None, CompilationMode.NONE):
        get_logger(__name__).warning(
            "--enable-lora: adapters change from step to step, which a compiled graph cannot follow on the CPU"
            " reference platform; torch.compile is switched off"
        )
    compilation.mode = CompilationMode.NONE
