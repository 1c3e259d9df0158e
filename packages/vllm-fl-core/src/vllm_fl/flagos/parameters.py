"""The parameters of our Triton kernels: keyword-only arguments of their launchers, with the same defaults."""

from __future__ import annotations

from vllm_fl.dispatch.parameters import Bucket, Parameter

_WARPS = Parameter("warps", (1, 2, 4, 8), 4)
#: As many as the launcher thinks right for the block, or so many.
_ANY_WARPS = Parameter("warps", (None, 1, 2, 4, 8, 16), None)
_MATRIX_WARPS = Parameter("warps", (None, 4, 8), None)
_STAGES = Parameter("stages", (None, 2, 3, 4), None)
_BLOCK = Parameter("block", (256, 512, 1024, 2048, 4096), 1024)
_TILE = Parameter("tile", (512, 1024, 2048, 4096), 1024)
#: Operator -> parameters of our kernel, which are keyword-only arguments of its launcher.
PARAMETERS = {
    "silu_and_mul": (_BLOCK, _WARPS),
    "gelu_and_mul": (_BLOCK, _WARPS),
    "rms_norm": (_TILE, _ANY_WARPS),
    "gemma_rms_norm": (_TILE, _ANY_WARPS),
    "rms_norm_gated": (_TILE, _ANY_WARPS),
    "moe_align_block_size": (Parameter("small", (256, 512, 1024, 2048), 1024), _WARPS),
    "moe_sum": (_BLOCK, _WARPS),
    "fused_experts": (
        Parameter("sparse", (1, 2, 4, 8, 16), 4),
        Parameter("rows", (None, 16, 32, 64, 128), None),
        _MATRIX_WARPS,
        _STAGES,
    ),
    "fused_recurrent_gated_delta_rule": (Parameter("rows", (8, 16, 32, 64), 32), _ANY_WARPS),
    "scaled_mm": (_MATRIX_WARPS, _STAGES),
}
#: Operators whose kernel is another one for few tokens than for many.
BUCKETS = dict.fromkeys(("fused_experts", "scaled_mm"), (Bucket("decode", 256), Bucket("prefill")))
