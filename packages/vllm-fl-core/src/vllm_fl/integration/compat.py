"""Every shim and monkey patch: the one place of this distribution that changes vLLM or torch.

Each says which releases need it, by which feature it is recognised, and when it can go. All are applied by feature,
never by version number, at most once a process, and only where our platform is the current one (the declaration of
our environment variables excepted).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vllm_fl.logging import get_logger

__all__ = [
    "declare_environment",
    "define_missing_symbols",
    "dispatch_top_k_top_p",
    "install",
    "prefer_linear_kernels",
    "register_kernel_fallbacks",
    "skip_kernel_warmup",
]


def install() -> None:
    """Apply everything. Safe to call again."""
    # Has the platform load its compiled kernels first, if it has any: a symbol of theirs must not be defined twice.
    import vllm._custom_ops

    declare_environment()
    define_missing_symbols()
    _dispatch_repetition_penalties(vllm._custom_ops)


def declare_environment(only_set: bool = False) -> None:
    """Tell vLLM's check of unknown ``VLLM_*`` variables about ours.

    Needed by 0.26 to 0.33; recognised by ``vllm.envs.environment_variables``; can go when vLLM lets a plug-in declare
    variables. The values given to vLLM are None: they would otherwise enter the compile-cache key, which must change
    with the selection (see FLPlatform) and not with the text of a variable or a log level.

    Args:
        only_set: declare only what is set now, so that vLLM's own state stays untouched otherwise.
    """
    from vllm import envs

    from vllm_fl.config import ENVIRONMENT

    known = getattr(envs, "environment_variables", None)
    if not isinstance(known, dict):
        return
    for name in ENVIRONMENT:
        if name.startswith("VLLM_") and (not only_set or name in os.environ):
            known.setdefault(name, _declared)


def _declared() -> None:
    return None


_ROUTER = (
    "(Tensor(a0!) topk_weights, Tensor(a1!) topk_indices, Tensor(a2!) token_expert_indices, Tensor gating_output,"
    " bool renormalize, Tensor? bias, {}Tensor? is_padding=None) -> ()"
)

#: ``namespace::symbol`` -> (schema, our operator, how many of the leading arguments it takes).
_SYMBOLS: dict[str, tuple[str, str, int]] = {
    "_C::compute_slot_mapping_kernel_impl": (
        "(Tensor query_start_loc, Tensor positions, Tensor block_table, Tensor(a3!) slot_mapping, int block_size)"
        " -> ()",
        "compute_slot_mapping",
        5,
    ),
    "_C::apply_repetition_penalties_": (
        "(Tensor(a0!) logits, Tensor prompt_mask, Tensor output_mask, Tensor repetition_penalties) -> ()",
        "apply_repetition_penalties",
        4,
    ),
    # Rows marked in `is_padding` are nobody's tokens; routing them like the others harms nothing.
    "_moe_C::topk_softmax": (_ROUTER.format(""), "topk_softmax", 6),
    "_moe_C::topk_sigmoid": (_ROUTER.format("float routed_scaling_factor=1.0, "), "topk_sigmoid", 7),
}

_GREEDY = (
    "(Tensor(a0!) output, Tensor ends, Tensor drafted, Tensor likeliest, Tensor bonus, Tensor? is_greedy, int longest)"
    " -> ()"
)
_RANDOM = (
    "(Tensor(a0!) output, Tensor ends, Tensor drafted, Tensor? draft_probs, Tensor target_probs, Tensor bonus,"
    " Tensor recovered, Tensor uniform, Tensor is_greedy, int longest, int vocabulary, bool certain) -> ()"
)
_RECOVERED = (
    "(Tensor(a0!) output, Tensor ends, Tensor drafted, Tensor? draft_probs, Tensor target_probs, Tensor inverse,"
    " int vocabulary, bool certain) -> ()"
)

#: Keeps the definitions alive: they vanish with their Library.
_libraries: dict[str, Any] = {}


def define_missing_symbols() -> None:
    """Define the ``torch.ops`` symbols that vLLM calls unconditionally and that no compiled extension has defined.

    Needed by 0.26 to 0.33 without compiled kernels; recognised by the absence of the symbol, so that vLLM's own
    kernel always wins; can go when these calls go through a registry of vLLM.
    """
    for symbol, (schema, operator, taken) in _SYMBOLS.items():
        _define(symbol, schema, _to_operator(operator, taken))
    # CPUWorker binds memory to a NUMA node with it; without the extension memory stays where the kernel puts it.
    _define("_C::init_cpu_memory_env", "(int[] node_ids) -> ()", lambda node_ids: None)
    # Graph wrappers hold the outputs of captured graphs by it, so that the graphs' memory pool can take them back.
    _define("_C::weak_ref_tensor", "(Tensor input) -> Tensor", _weak_ref_tensor)
    _define_rejection_sampling()


def _define_rejection_sampling() -> None:
    """Define what decides on speculative drafts, and replace vLLM's fallback that repeats a value for each draft.

    Needed by 0.26 to 0.33 without Triton and without compiled kernels; recognised by the absence of the symbols; can go
    when vLLM has these functions in PyTorch. The fallback writes into a converted copy unless the values are int64:
    temperatures and limits would be lost.
    """
    import torch

    from vllm_fl.integration import rejection

    ours = not hasattr(torch.ops._C, "rejection_greedy_sample_kernel_impl")
    for symbol, schema, function in (
        ("rejection_greedy_sample", _GREEDY, rejection.accept_greedily),
        ("rejection_random_sample", _RANDOM, rejection.accept_at_random),
        ("sample_recovered_tokens", _RECOVERED, rejection.draw_recovered),
    ):
        _define(f"_C::{symbol}_kernel_impl", schema, function)
    if not ours:
        return
    from vllm.utils import cpu_triton_utils

    def expand_kernel(
        output: Any, values: Any, ends: Any, replace_from: int, replace_to: int, MAX_NUM_TOKENS: int | None = None
    ) -> None:
        output.copy_(rejection.expand(torch.where(values == replace_from, replace_to, values), ends))

    cpu_triton_utils._expand_kernel_impl = expand_kernel  # vLLM 0.31 and later
    if hasattr(cpu_triton_utils, "expand_kernel"):
        cpu_triton_utils.expand_kernel.func = expand_kernel


def _to_operator(name: str, taken: int) -> Callable[..., None]:
    from vllm_fl.dispatch import bind

    op = bind(name)
    return lambda *args: op.fn(*args[:taken])


def _weak_ref_tensor(tensor: Any) -> Any:
    """A tensor over the memory of `tensor` that does not keep it allocated."""
    import torch

    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return tensor.new_empty(0).set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())


def _define(symbol: str, schema: str, function: Callable[..., Any]) -> None:
    import torch

    namespace, _, name = symbol.partition("::")
    if hasattr(getattr(torch.ops, namespace), name):
        return
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    _libraries[namespace].define(name + schema)
    _libraries[namespace].impl(name, function, "CompositeExplicitAutograd")


@functools.cache
def register_kernel_fallbacks() -> None:
    """Replace vLLM's Triton kernels by the PyTorch code of its CPU platform, where Triton has no device.

    Needed by 0.31 to 0.33, which ask the platform for it; can go when vLLM does it for every platform. Once a process:
    vLLM asks with every engine, searches all modules each time, and warns of what it replaces.
    """
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.register_triton_kernel_overrides()
        _override_slot_mapping()


def _override_slot_mapping() -> None:
    """Send vLLM's Triton kernel of slot mappings to dispatch where vLLM's own fallback for it does not fit.

    Needed by 0.32.0 without Triton, whose fallback has two parameters more than the kernel and gets wrong arguments;
    recognised by the numbers of parameters, and by the size of a block being the kernel's eighth; can go with 0.32.
    """
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils.cpu_triton_utils import _compute_slot_mapping_kernel_impl as fallback
    from vllm.v1.worker.block_table import ComputeSlotMappingKernel

    from vllm_fl.dispatch import bind

    names = ComputeSlotMappingKernel.kernel.arg_names
    if len(names) == len(inspect.signature(fallback).parameters) or names[7:8] != ("KV_CACHE_BLOCK_SIZE",):
        return
    op = bind("compute_slot_mapping")

    def compute_slot_mapping(
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: Any,
        positions: Any,
        block_table: Any,
        block_table_stride: int,
        slot_mapping: Any,
        block_size: int,
        *context_parallel: int,
    ) -> None:
        op.fn(query_start_loc, positions, block_table, slot_mapping, block_size)

    register_kernels({"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping})


def guard_accelerator(device_type: str) -> None:
    """Make ``torch.accelerator`` housekeeping do nothing on a host without an accelerator, where it raises.

    Needed by 0.26 to 0.33 for a platform on the CPU: the shutdown of an engine and vLLM's cleanup of a process call it
    unless the platform is vLLM's own CPU platform. Recognised by the functions themselves; can go when vLLM asks the
    platform.
    """
    import torch

    if device_type != "cpu":
        return
    for name in ("empty_cache", "empty_host_cache", "synchronize"):
        original = getattr(torch.accelerator, name, None)
        if original is not None and not hasattr(original, "_vllm_fl"):
            setattr(torch.accelerator, name, _unless_absent(original))


def _unless_absent(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if torch.accelerator.is_available() else None

    guarded._vllm_fl = True  # type: ignore[attr-defined]
    return guarded


def _dispatch_repetition_penalties(custom_ops: ModuleType) -> None:
    """Send ``_custom_ops.apply_repetition_penalties`` to dispatch.

    Needed by 0.26 to 0.33: off CUDA vLLM uses its own PyTorch code without asking anyone. Recognised by the function
    and its parameters; can go when the sampler has a hook.
    """
    from vllm_fl.dispatch import bind

    op = bind("apply_repetition_penalties")

    def apply_repetition_penalties(logits: Any, prompt_mask: Any, output_mask: Any, repetition_penalties: Any) -> None:
        op.fn(logits, prompt_mask, output_mask, repetition_penalties)

    _patch(custom_ops, apply_repetition_penalties)


def dispatch_top_k_top_p() -> None:
    """Send the sampler's ``apply_top_k_top_p`` to dispatch. To be called in a worker whose model runner is imported.

    Needed by 0.26 to 0.33, whose sampler chooses between Triton and PyTorch itself; recognised by the function's first
    parameters; can go when the sampler has a hook. Modules that have imported the function by name get ours, too.
    Where vLLM samples with FlashInfer or another library's fused kernel, it does not call the function.
    """
    from vllm.v1.sample.ops import topk_topp_sampler

    from vllm_fl.dispatch import bind

    original = topk_topp_sampler.apply_top_k_top_p
    if getattr(original, "_vllm_fl", False):
        return
    if list(inspect.signature(original).parameters)[:3] != ["logits", "k", "p"]:
        _warn_unknown(topk_topp_sampler, "apply_top_k_top_p")
        return
    op = bind("apply_top_k_top_p")

    def apply_top_k_top_p(logits: Any, k: Any, p: Any, **hints: Any) -> Any:
        if k is not None or p is not None:
            op.fn(logits, k, p)
        return logits

    apply_top_k_top_p._vllm_fl = True  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("apply_top_k_top_p") is original:
            names["apply_top_k_top_p"] = apply_top_k_top_p


def prefer_linear_kernels(**kernels: type) -> None:
    """Have vLLM ask these kernels first, of quantised linear layers on this platform.

    Needed by 0.26 to 0.33, whose ``register_linear_kernel`` puts a kernel last and has no kind for blocks; recognised
    by the tables; can go when it has both.

    Args:
        kernels: name of vLLM's table of kernels by platform, and the kernel.
    """
    from vllm.model_executor.kernels import linear
    from vllm.platforms import current_platform

    for table, kernel in kernels.items():
        by_platform = getattr(linear, table, None)
        if by_platform is None:
            _warn_unknown(linear, table)
            continue
        present = by_platform.setdefault(current_platform._enum, [])
        if kernel not in present:
            present.insert(0, kernel)


def skip_kernel_warmup() -> None:
    """Have vLLM's GPU worker warm up no kernels. To be called for a platform outside of vLLM's tree.

    Needed by 0.26 to 0.33: it knows the kernels of CUDA builds, and imports models to look for them, which fails in a
    build without kernels (0.26) or takes seconds. Recognised by the function in the worker's module; can go when it
    asks the platform.
    """
    from vllm.v1.worker import gpu_worker

    if hasattr(gpu_worker, "kernel_warmup"):
        gpu_worker.kernel_warmup = _nothing


def _nothing(worker: Any) -> None:
    """There is nothing to warm up."""


def _patch(module: ModuleType, replacement: Callable[..., Any]) -> None:
    """Put `replacement` in the place of the function of the same name, if its parameters are those we know."""
    name = replacement.__name__
    original = getattr(module, name, None)
    if getattr(original, "_vllm_fl", False):
        return
    if original is None or list(inspect.signature(original).parameters) != list(
        inspect.signature(replacement).parameters
    ):
        _warn_unknown(module, name)
        return
    replacement._vllm_fl = True  # type: ignore[attr-defined]
    setattr(module, name, replacement)


def _warn_unknown(module: ModuleType, name: str) -> None:
    get_logger(__name__).warning(
        "%s.%s is not the function that vllm-fl knows: vLLM's own code serves it, dispatch does not",
        module.__name__,
        name,
    )
