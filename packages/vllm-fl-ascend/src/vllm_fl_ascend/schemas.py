"""The operators of torch_npu that are called here, by schema, and whether the installed torch_npu has them.

Schemas as in the wheels of torch_npu 2.11 to 2.14. Those of the namespace ``atb`` could be read from 2.11 and 2.12
only; like the others they are compared with what is registered before anything is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_fl.dispatch.types import AVAILABLE, Availability

__all__ = ["SCHEMAS", "available", "needs"]

_SCHEMAS = """
npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor
npu::npu_geglu(Tensor input, int dim=-1, int approximate=1, bool activate_left=False) -> (Tensor, Tensor)
npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)
npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)
npu::npu_gemma_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)
npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> Tensor
npu::npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,\
 Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None,\
 str? cache_mode='PA_NZ') -> ()
npu::npu_fused_infer_attention_score_v2(Tensor query, Tensor key, Tensor value, *, Tensor? query_rope=None,\
 Tensor? key_rope=None, Tensor? pse_shift=None, Tensor? atten_mask=None, SymInt[]? actual_seq_qlen=None,\
 SymInt[]? actual_seq_kvlen=None, Tensor? block_table=None, Tensor? dequant_scale_query=None,\
 Tensor? dequant_scale_key=None, Tensor? dequant_offset_key=None, Tensor? dequant_scale_value=None,\
 Tensor? dequant_offset_value=None, Tensor? dequant_scale_key_rope=None, Tensor? quant_scale_out=None,\
 Tensor? quant_offset_out=None, Tensor? quant_scale_p=None, Tensor? learnable_sink=None, int num_query_heads=1,\
 int num_key_value_heads=0, float softmax_scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647,\
 str input_layout="BSH", int sparse_mode=0, int block_size=0, int query_quant_mode=0, int key_quant_mode=0,\
 int value_quant_mode=0, int inner_precise=0, bool return_softmax_lse=False, int? query_dtype=None,\
 int? key_dtype=None, int? value_dtype=None, int? query_rope_dtype=None, int? key_rope_dtype=None,\
 int? key_shared_prefix_dtype=None, int? value_shared_prefix_dtype=None, int? dequant_scale_query_dtype=None,\
 int? dequant_scale_key_dtype=None, int? dequant_scale_value_dtype=None, int? dequant_scale_key_rope_dtype=None,\
 int? out_dtype=None) -> (Tensor, Tensor)
npu::npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)
npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None,\
 int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False,\
 float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor, Tensor)
npu::npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None,\
 int active_num=-1, int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0,\
 bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0,\
 int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)
npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None,\
 Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None,\
 Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None,\
 Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0,\
 int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None,\
 int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]
npu::npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None,\
 bool padded_mode=False, int[]? restore_shape=None) -> Tensor
npu::npu_top_k_top_p(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor
atb::_npu_rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor cos_sin_cache,\
 bool is_neox_style) -> ()
atb::_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,\
 Tensor slot_indices) -> ()
"""

#: ``namespace::name`` -> the schema that it is called with.
SCHEMAS: dict[str, str] = {line.partition("(")[0]: line for line in _SCHEMAS.split("\n") if line}


def needs(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for an implementation: it is available where the named operators of SCHEMAS are."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        fn._is_available = lambda: available(*names)  # type: ignore[attr-defined]
        return fn

    return decorate


def available(*names: str) -> Availability:
    """Whether a device is present, and the named operators with schemas that take our calls; if not, why not."""
    if "torch_npu" not in sys.modules:
        return Availability(False, "torch_npu is not loaded; the Ascend platform loads it")
    import torch

    if not torch.npu.is_available():
        return Availability(False, "torch_npu finds no NPU (npu-smi info shows them)")
    for name in names:
        problem = _problem(name)
        if problem:
            return Availability(False, problem)
    return AVAILABLE


def _problem(name: str) -> str | None:
    import torch
    import torch_npu

    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    where = f"torch_npu {torch_npu.__version__}"
    if packet is None:
        nnal = "; the operators of atb need the NNAL package, and its set_env.sh" if namespace == "atb" else ""
        return f"{where} does not have the operator {name}{nnal}"
    # Arguments may have been added since, with defaults; none may have gone or changed.
    if packet.default._schema.is_backward_compatible_with(torch._C.parse_schema(SCHEMAS[name])):
        return None
    return f"{where} has {name} with another schema, {packet.default._schema}"
