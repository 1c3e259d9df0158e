"""The simulation refuses what torch_npu's documentation does not allow; only so do the other tests say anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

HALF = torch.float16


def _attention(**changes: Any) -> None:
    """Two requests of 3 queries each on caches of 2 heads of 16."""
    arguments = {
        "query": torch.ones(2, 3, 4, 16, dtype=HALF),
        "key": torch.ones(5, 128, 32, dtype=HALF),
        "value": torch.ones(5, 128, 32, dtype=HALF),
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1),
        "actual_seq_qlen": [3, 3],
        "actual_seq_kvlen": [130, 3],
        "block_table": torch.tensor([[1, 2], [4, 77]], dtype=torch.int32),
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "input_layout": "BSND",
        "sparse_mode": 3,
        "block_size": 128,
        **changes,
    }
    torch.ops.npu.npu_fused_infer_attention_score_v2(**arguments)


def _scatter(**changes: Any) -> None:
    arguments = {
        "key": torch.ones(2, 2, 16),
        "value": torch.ones(2, 2, 16),
        "key_cache": torch.zeros(3, 8, 2, 16),
        "value_cache": torch.zeros(3, 8, 2, 16),
        "slot_mapping": torch.tensor([3, 9]),
        "cache_mode": "Norm",
        **changes,
    }
    torch.ops.npu.npu_scatter_pa_kv_cache(**arguments)


def _matmul(**changes: Any) -> None:
    arguments = {
        "x": [torch.ones(5, 8)],
        "weight": [torch.ones(3, 8, 4)],
        "group_list": torch.tensor([2, 0, 3]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
        **changes,
    }
    torch.ops.npu.npu_grouped_matmul(**arguments)


def _route(**changes: Any) -> None:
    arguments = {
        "x": torch.ones(2, 8),
        "expert_idx": torch.tensor([[0, 2], [1, 0]], dtype=torch.int32),
        "active_num": 4,
        "expert_num": 3,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "active_expert_range": [0, 3],
        **changes,
    }
    torch.ops.npu.npu_moe_init_routing_v2(**arguments)


def _gate(**changes: Any) -> None:
    arguments = {"x": torch.ones(2, 8), "k": 2, "group_count": 2, "k_group": 1, **changes}
    torch.ops.npu.npu_moe_gating_top_k(**arguments)


def _rotate(**changes: Any) -> None:
    angles = torch.ones(1, 5, 1, 8)
    arguments = {"input": torch.ones(1, 5, 2, 8), "r1": angles, "r2": angles, **changes}
    torch.ops.npu.npu_rotary_mul(**arguments)


def _norm(**changes: Any) -> None:
    arguments = {"x1": torch.ones(2, 8), "x2": torch.ones(2, 8), "gamma": torch.ones(8), **changes}
    torch.ops.npu.npu_add_rms_norm(**arguments)


def _nucleus(**changes: Any) -> None:
    arguments = {"logits": torch.ones(2, 8), "p": torch.ones(2), "k": torch.ones(2, dtype=torch.int32), **changes}
    torch.ops.npu.npu_top_k_top_p(**arguments)


def _strided(*shape: int) -> Tensor:
    return torch.ones(*shape[:-1], 2 * shape[-1], dtype=HALF)[..., ::2]


CALLS = (_attention, _scatter, _matmul, _route, _gate, _rotate, _norm, _nucleus)
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "float32": (_attention, {"query": torch.ones(2, 3, 4, 16)}, "query is of dtype torch.float32"),
    "dtypes differ": (_attention, {"key": torch.ones(5, 128, 32, dtype=torch.bfloat16)}, "dtypes differ"),
    "query with gaps": (_attention, {"query": _strided(2, 3, 4, 16)}, "query is not contiguous"),
    "keys with gaps": (_attention, {"key": _strided(5, 128, 32)}, "key is not contiguous"),
    "no mask": (_attention, {"atten_mask": None}, "sparse_mode=3 needs atten_mask"),
    "small mask": (_attention, {"atten_mask": torch.ones(3, 130, dtype=torch.bool)}, "not 2048 x 2048"),
    "lower mask": (_attention, {"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).tril()}, "upper triangle"),
    "float mask": (_attention, {"atten_mask": torch.ones(2048, 2048)}, "atten_mask is of dtype"),
    "block size": (_attention, {"block_size": 64}, "blocks of 64"),
    "small blocks": (
        _attention,
        {"block_size": 64, "key": torch.ones(9, 64, 32, dtype=HALF), "value": torch.ones(9, 64, 32, dtype=HALF)},
        "block_size=64",
    ),
    "long block table": (_attention, {"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "block_table is of dtype"),
    "short block table": (_attention, {"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table (2, 1)"),
    "block elsewhere": (_attention, {"block_table": torch.full((2, 2), 5, dtype=torch.int32)}, "blocks [5, 5] of 5"),
    "no lengths": (_attention, {"actual_seq_kvlen": None}, "needs actual_seq_kvlen"),
    "more queries than keys": (_attention, {"actual_seq_kvlen": [130, 2]}, "3 queries see 2 keys"),
    "heads do not divide": (_attention, {"num_key_value_heads": 3}, "4 heads on 3"),
    "packed queries": (_attention, {"input_layout": "TND"}, "does not know input_layout='TND'"),
    "sliding window": (_attention, {"sparse_mode": 4}, "does not know sparse_mode=4"),
    "sinks": (_attention, {"learnable_sink": torch.ones(4)}, "does not know learnable_sink"),
    "default cache mode": (_scatter, {"cache_mode": "PA_NZ"}, "cache_mode='Norm'"),
    "negative slot": (_scatter, {"slot_mapping": torch.tensor([3, -1])}, "slots are 0 to 23"),
    "slot twice": (_scatter, {"slot_mapping": torch.tensor([3, 3])}, "slots repeat"),
    "slots of floats": (_scatter, {"slot_mapping": torch.ones(2)}, "slots is of dtype"),
    "heads first": (_scatter, {"key_cache": torch.zeros(3, 2, 8, 16).transpose(1, 2)}, "key_cache is not contiguous"),
    "converted on the way": (_scatter, {"value_cache": torch.zeros(3, 8, 2, 16, dtype=HALF)}, "dtypes differ"),
    "other groups": (_matmul, {"group_list": torch.tensor([2, 0, 2])}, "groups of [2, 0, 2] for 5 rows"),
    "ends of groups": (_matmul, {"group_list_type": 0}, "groups of rows by count"),
    "one group": (_matmul, {"group_list": torch.tensor([5]), "weight": [torch.ones(1, 8, 4)]}, "1 groups"),
    "short counts": (_matmul, {"group_list": torch.tensor([2, 0, 3], dtype=torch.int32)}, "group_list is of dtype"),
    "weights with gaps": (_matmul, {"weight": [torch.ones(3, 8, 8)[..., ::2]]}, "neither contiguous nor transposed"),
    "long experts": (_route, {"expert_idx": torch.tensor([[0, 2], [1, 0]])}, "expert_idx is of dtype"),
    "no such expert": (_route, {"expert_idx": torch.tensor([[0, 3], [1, 0]], dtype=torch.int32)}, "experts are 0 to 2"),
    "some routes": (_route, {"active_num": 2}, "active_num=2"),
    "quantised": (_route, {"quant_mode": 1}, "an option is not simulated"),
    "small groups": (_gate, {"group_count": 4}, "4 groups of 8 experts"),
    "too many choices": (_gate, {"k": 5}, "k=5"),
    "bias of another dtype": (_gate, {"bias": torch.ones(8, dtype=HALF)}, "dtypes differ"),
    "three dimensions": (_rotate, {"input": torch.ones(5, 2, 8)}, "4 dimensions only"),
    "angles of a half": (_rotate, {"r1": torch.ones(1, 5, 1, 4)}, "r1 is (1, 5, 1, 4)"),
    "angles beyond 1": (_rotate, {"r2": torch.full((1, 5, 1, 8), 1.5)}, "r2 has values beyond 1"),
    "mode": (_rotate, {"rotary_mode": "quarter"}, "rotary_mode='quarter'"),
    "norm of two dtypes": (_norm, {"gamma": torch.ones(8, dtype=HALF)}, "dtypes differ"),
    "residual of another shape": (_norm, {"x2": torch.ones(8)}, "(2, 8), (8,)"),
    "k beyond all": (_nucleus, {"k": torch.tensor([1, 9], dtype=torch.int32)}, "k is [1, 9]"),
    "long k": (_nucleus, {"k": torch.ones(2, dtype=torch.int64)}, "k is of dtype"),
    "p beyond 1": (_nucleus, {"p": torch.tensor([0.5, 1.5])}, "p is [0.5, 1.5]"),
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__.strip("_"))
def test_the_calls_that_are_changed_are_right(simulated_npu: Any, call: Any) -> None:
    call()


@pytest.mark.parametrize(("call", "changes", "text"), WRONG.values(), ids=WRONG)
def test_refuses(simulated_npu: Any, call: Any, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        call(**changes)
    assert str(caught.value).startswith("simulated torch_npu: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.ones(2, 4), 0, 1), "expected at most 2 argument(s) but received 3"),
        ((), "missing value for argument 'input'"),
        (("x",), "Expected a value of type 'Tensor' for argument 'input'"),
    ],
)
def test_schema_is_enforced(simulated_npu: Any, arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ops.npu.npu_swiglu(*arguments)
    assert text in str(caught.value)
