"""Shims: applied once, only where something is missing, and forwarding to dispatch."""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

import pytest
import torch

from vllm_fl.integration import compat


def test_install_may_be_called_again() -> None:
    import vllm._custom_ops as custom_ops

    before = custom_ops.apply_repetition_penalties, torch.accelerator.empty_cache
    compat.install()
    compat.install()
    assert (custom_ops.apply_repetition_penalties, torch.accelerator.empty_cache) == before


def test_an_existing_symbol_wins() -> None:
    library = torch.library.Library("fl_compat_test", "FRAGMENT")
    library.define("present(int x) -> int")
    library.impl("present", lambda x: x + 1, "CompositeExplicitAutograd")
    for name in ("present", "absent"):
        compat._define(f"fl_compat_test::{name}", "(int x) -> int", lambda x: -x)
    assert torch.ops.fl_compat_test.present(1) == 2
    assert torch.ops.fl_compat_test.absent(1) == -1


def test_slot_mapping_symbol(spy: Any) -> None:
    seen = spy("compute_slot_mapping")
    slots = torch.full((8,), 77, dtype=torch.int64)
    torch.ops._C.compute_slot_mapping_kernel_impl(
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.tensor([3, 4, 0, 1, 2]),
        torch.tensor([[5, 6], [2, 9]], dtype=torch.int32),
        slots,
        4,
    )
    assert slots.tolist() == [23, 24, 8, 9, 10, -1, -1, -1]
    assert seen.calls == 1


@pytest.mark.parametrize("function", ["symbol", "python"])
def test_repetition_penalties(function: str, spy: Any) -> None:
    import vllm._custom_ops as custom_ops

    call = custom_ops.apply_repetition_penalties
    if function == "symbol":
        call = torch.ops._C.apply_repetition_penalties_
    seen = spy("apply_repetition_penalties")
    logits = torch.tensor([[4.0, -4.0, 4.0, -4.0]])
    prompt = torch.tensor([[True, False, False, False]])
    output = torch.tensor([[False, True, False, False]])
    call(logits, prompt, output, torch.tensor([2.0]))
    assert logits.tolist() == [[2.0, -8.0, 4.0, -4.0]]
    assert seen.calls == 1


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_router_symbols(scoring: str, spy: Any) -> None:
    import vllm._custom_ops as custom_ops

    seen = spy(f"topk_{scoring}")
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    weights, ids, order = torch.empty(2, 2), torch.empty(2, 2, dtype=torch.int32), torch.empty(2, 2, dtype=torch.int32)
    getattr(custom_ops, f"topk_{scoring}")(weights, ids, order, logits, True, None)
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    expected = scores.gather(1, torch.tensor([[1, 2], [0, 2]]))
    assert ids.tolist() == [[1, 2], [0, 2]]
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True))
    assert seen.calls == 1


def test_accelerator_housekeeping_does_nothing_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as vLLM has made the platform; no plug-in need be loaded."""
    if torch.accelerator.is_available():
        pytest.skip("this host has an accelerator")
    from vllm.platforms import current_platform

    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, inspect.unwrap(getattr(torch.accelerator, name)))
    type(current_platform)()
    assert torch.accelerator.empty_cache() is None
    assert torch.accelerator.synchronize() is None


def test_accelerator_housekeeping_reaches_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = compat._unless_absent(lambda value: value + 1)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert guarded(1) == 2


def test_our_variables_are_known_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In vLLM's check with `hard_fail`, which `--fail-on-environ-validation` asks for."""
    from vllm import envs
    from vllm.platforms import current_platform

    check = getattr(current_platform, "validate_environ", None) or envs.validate_environ
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    check(True)
    monkeypatch.setenv("VLLM_FL_PREFFER", "reference")
    with pytest.raises(ValueError, match="VLLM_FL_PREFFER"):
        check(True)


def test_our_variables_are_not_in_the_compile_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    before = envs.compile_factors()
    monkeypatch.setenv("VLLM_FL_LOG_LEVEL", "DEBUG")
    assert envs.compile_factors() == before


@pytest.mark.parametrize("original", [None, lambda a, b, c: None], ids=["absent", "other parameters"])
def test_a_function_that_is_not_known_is_left_alone(original: Any, warnings: list[str]) -> None:
    module = types.ModuleType("vllm.some_module")
    if original is not None:
        module.known = original  # type: ignore[attr-defined]

    def known(a: int, b: int) -> None:
        raise AssertionError("called")

    compat._patch(module, known)
    assert getattr(module, "known", None) is original
    assert warnings == [
        "vllm.some_module.known is not the function that vllm-fl knows: vLLM's own code serves it, dispatch does not"
    ]


KERNEL = (
    *("num_tokens", "max_num_tokens", "query_start_loc_ptr", "positions_ptr", "block_table_ptr", "block_table_stride"),
    *("slot_mapping_ptr", "KV_CACHE_BLOCK_SIZE", "TOTAL_CP_WORLD_SIZE", "TOTAL_CP_RANK", "PAD_ID"),
)


@pytest.mark.parametrize(("more", "overridden"), [(0, False), (2, True)], ids=["fits", "two parameters more"])
def test_slot_mapping_goes_to_dispatch_where_the_fallback_of_vllm_does_not_fit(
    more: int, overridden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of vLLM 0.32 that it looks at are simulated."""
    import vllm.utils.cpu_triton_utils
    import vllm.v1.worker.block_table

    def fallback(*args: Any) -> None:
        raise AssertionError("called")

    names = [*KERNEL, "block_size", "BLOCKS_PER_KV_BLOCK"][: len(KERNEL) + more]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    fallback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    registered: dict[str, Any] = {}
    dispatcher = types.ModuleType("vllm.triton_utils.dispatcher")
    dispatcher.register_kernels = registered.update  # type: ignore[attr-defined]
    kernel = types.SimpleNamespace(kernel=types.SimpleNamespace(arg_names=KERNEL))
    monkeypatch.setitem(sys.modules, dispatcher.__name__, dispatcher)
    monkeypatch.setattr(vllm.utils.cpu_triton_utils, "_compute_slot_mapping_kernel_impl", fallback)
    monkeypatch.setattr(vllm.v1.worker.block_table, "ComputeSlotMappingKernel", kernel, raising=False)

    compat._override_slot_mapping()

    assert list(registered) == ["vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"] * overridden
    if overridden:
        slots = torch.full((4,), 9)
        start, positions = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3, 4, 5])
        table = torch.tensor([[7, 5]], dtype=torch.int32)
        (launch,) = registered.values()
        launch(3, 4, start, positions, table, 2, slots, 4, 1, 0, -1)
        assert slots.tolist() == [31, 20, 21, -1]


def test_top_k_and_top_p_go_to_dispatch_wherever_the_sampler_calls_them(spy: Any) -> None:
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    compat.dispatch_top_k_top_p()
    compat.dispatch_top_k_top_p()
    seen = spy("apply_top_k_top_p")
    for module in (topk_topp_sampler, rejection_sampler):
        logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]])
        assert module.apply_top_k_top_p(logits, torch.tensor([2, 3]), torch.tensor([1.0, 0.5])) is logits
        assert logits.isinf().tolist() == [[True, False, False], [True, False, True]]
        assert module.apply_top_k_top_p(logits, None, None) is logits
    topk_topp_sampler.apply_top_k_top_p(logits, None, torch.ones(2), has_topp_only_rows=True)  # of vLLM 0.33
    assert seen.calls == 3


def test_a_sampler_that_is_not_known_is_left_alone(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    def other(scores: Any, k: Any, p: Any) -> Any:
        raise AssertionError("called")

    monkeypatch.setattr(topk_topp_sampler, "apply_top_k_top_p", other)
    compat.dispatch_top_k_top_p()
    assert topk_topp_sampler.apply_top_k_top_p is other
    assert warnings == [
        "vllm.v1.sample.ops.topk_topp_sampler.apply_top_k_top_p is not the function that vllm-fl knows: vLLM's own code"
        " serves it, dispatch does not"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_a_value_for_each_draft(dtype: torch.dtype) -> None:
    """Through vLLM's fallback, which keeps integers of 64 bits only."""
    from vllm.utils import cpu_triton_utils

    output, values = torch.zeros(5, dtype=dtype), torch.tensor([7, 0, 3], dtype=dtype)
    ends = torch.tensor([2, 4, 5], dtype=torch.int32)
    cpu_triton_utils._expand_kernel_impl(output, values, ends, 0, 1, MAX_NUM_TOKENS=8)
    assert output.tolist() == [7, 7, 1, 1, 3]


def test_drafts_are_judged_through_the_fallbacks_of_vllm() -> None:
    """With the integers of 32 bits that vLLM passes."""
    from vllm.utils import cpu_triton_utils as fallbacks

    ends, drafted = torch.tensor([2, 3], dtype=torch.int32), torch.tensor([4, 1, 2], dtype=torch.int32)
    bonus = torch.tensor([[8], [9]], dtype=torch.int32)
    greedy, drawn = (torch.full((2, 3), -1, dtype=torch.int32) for _ in range(2))
    likeliest = torch.tensor([4, 1, 3])
    fallbacks._rejection_greedy_sample_kernel_impl(greedy, ends, drafted, likeliest, bonus, None, 2)
    assert greedy.tolist() == [[4, 1, 8], [3, -1, -1]]
    target = torch.nn.functional.one_hot(torch.tensor([4, 3, 2]), 5).float()
    recovered = torch.empty(3, dtype=torch.int32)
    fallbacks._sample_recovered_tokens_kernel_impl(
        recovered, ends, drafted, None, target, torch.ones(2, 5), 5, NO_DRAFT_PROBS=True
    )
    fallbacks._rejection_random_sample_kernel_impl(
        drawn, ends, drafted, None, target, bonus, recovered, torch.full((3,), 0.5, dtype=torch.float64),
        torch.zeros(2, dtype=torch.bool), 2, 5, NO_DRAFT_PROBS=True,
    )  # fmt: skip
    assert drawn.tolist() == [[4, 3, -1], [2, 9, -1]]
