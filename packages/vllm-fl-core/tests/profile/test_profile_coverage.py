"""Who provides a kernel, by its name, and the shares that follow. Names as torch.profiler gives them on NVIDIA GPUs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.profile import TRITON, KernelNames, Provider, coverage
from vllm_fl.profile.kernel_names import kernel_names_of
from vllm_fl.profile.providers import is_matrix_product, operator_of, provider_of

NAMES = KernelNames(
    ours=frozenset({"_activate_and_mul", "_align_small", "_rms_norm", "_reshape_and_cache", "_mla_attend"}),
    vllm=frozenset({"fused_moe_kernel", "kernel_unified_attention", "_causal_conv1d_update_kernel"}),
    flaggems=frozenset({"_rms_norm", "mm_kernel_general", "moe_align_block_size_stage1", "fused_moe_kernel"}),
)
BF16 = "c10::BFloat16"

KERNELS: list[tuple[str, Provider, str | None]] = [
    ("_activate_and_mul", Provider.OURS, "silu_and_mul"),
    ("_activate_and_mul_0", Provider.OURS, "silu_and_mul"),  # inside a graph of inductor
    ("_align_small", Provider.OURS, "moe_align_block_size"),
    ("_reshape_and_cache", Provider.OURS, "reshape_and_cache"),
    ("_mla_attend", Provider.OURS, "mla_attention"),
    ("_rms_norm", Provider.OURS, "rms_norm"),
    ("silu_and_mul_kernel_kernel_rank_2", Provider.FLAGGEMS, "silu_and_mul"),
    ("add_func_kernel_rank_1", Provider.FLAGGEMS, None),
    ("moe_align_block_size_stage1", Provider.FLAGGEMS, "moe_align_block_size"),
    ("mm_kernel_general", Provider.FLAGGEMS, None),
    ("triton_poi_fused_mul_silu_slice_0", Provider.INDUCTOR, None),
    ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1", Provider.INDUCTOR, None),
    ("triton_per_fused_rsqrt_2", Provider.INDUCTOR, None),
    ("triton_tem_fused_mm_3", Provider.INDUCTOR, None),
    ("fused_moe_kernel", Provider.VLLM_TRITON, "fused_experts"),
    ("kernel_unified_attention", Provider.VLLM_TRITON, "attention_backend"),
    ("_causal_conv1d_update_kernel", Provider.VLLM_TRITON, "causal_conv1d_update"),
    (
        f"void vllm::act_and_mul_kernel<{BF16}, &({BF16} vllm::silu_kernel<{BF16}>({BF16} const&)), true>({BF16}*, "
        f"{BF16} const*, int)",
        Provider.VLLM_C,
        "silu_and_mul",
    ),
    (
        "std::enable_if<((8) > (0)) && vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
        "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long, c10::BFloat16*, float, int, int)",
        Provider.VLLM_C,
        "rms_norm",
    ),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", Provider.VLLM_C, "rotary_embedding"),
    ("void vllm::moe::topkGating<8, 512, 4, 16, 32, int, float>(float const*)", Provider.VLLM_C, "topk_softmax"),
    (
        "void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*)",
        Provider.VLLM_C,
        "moe_align_block_size",
    ),
    ("void marlin::Marlin<1125899906909960l, 1l, 256, 1, 8, 8>(int4 const*)", Provider.VLLM_C, None),
    (
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>",
        Provider.FLASH_ATTENTION,
        "attention_backend",
    ),
    (
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, cutlass::bfloat16_t> >",
        Provider.FLASH_ATTENTION,
        "attention_backend",
    ),
    (
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<true>(flashinfer::Params)",
        Provider.FLASHINFER,
        "attention_backend",
    ),
    ("void flashinfer::sampling::TopPRenormProbKernel<1024>(float*)", Provider.FLASHINFER, None),
    ("void flashinfer::norm::RMSNormKernel<8, __nv_bfloat16>(int)", Provider.FLASHINFER, "rms_norm"),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", Provider.BLAS, None),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_cublas", Provider.BLAS, None),
    ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_relu_f2f_stages_64x4_tn", Provider.BLAS, None),
    (
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
        Provider.BLAS,
        None,
    ),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)", Provider.BLAS, None),
    ("void gemv2T_kernel_val<int, int, __nv_bfloat16, float>(...)", Provider.BLAS, None),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >(int)", Provider.PYTORCH, None),
    ("void at_cuda_detail::cub::DeviceScanKernel<int>(int)", Provider.PYTORCH, None),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Provider.COMMUNICATION, None),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)", Provider.COMMUNICATION, None),
    ("Memcpy HtoD (Pinned -> Device)", Provider.COPIES, None),
    ("Memset (Device)", Provider.COPIES, None),
    ("kernel_of_nobody", Provider.OTHER, None),
]


@pytest.mark.parametrize(("name", "provider", "operator"), KERNELS, ids=[name[:40] for name, *_ in KERNELS])
def test_one_kernel(name: str, provider: Provider, operator: str | None) -> None:
    (kernel,) = coverage([(name, 1.0)], NAMES).kernels
    assert (kernel.provider, kernel.operator) == (provider, operator)


def test_every_operator_that_a_name_stands_for_is_one() -> None:
    from vllm_fl.catalog import CATALOG

    named = {operator for _, provider, operator in KERNELS if provider is not Provider.OTHER} - {None}
    assert named <= set(CATALOG)
    assert operator_of("nothing_of_ours") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", True),
        ("triton_tem_fused_mm_3", True),
        ("mm_kernel_general", True),
        ("fused_moe_kernel", False),
        ("triton_poi_fused_mul_silu_slice_0", False),
        ("_activate_and_mul", False),
    ],
)
def test_matrix_products(name: str, expected: bool) -> None:
    assert is_matrix_product(name, provider_of(name, NAMES).provider) is expected


def test_shares() -> None:
    report = coverage(
        [
            ("nvjet_tst_64x8", 50.0),
            ("_activate_and_mul", 10.0),
            ("_activate_and_mul", 10.0),
            ("triton_poi_fused_add_0", 10.0),
            ("void vllm::rms_norm_kernel<float>()", 10.0),
            ("Memcpy DtoD (Device -> Device)", 10.0),
        ],
        NAMES,
    )
    assert report.total_us == 100.0
    assert [(s.key, s.calls, s.time_us, s.share) for s in report.by_provider()] == [
        (("cuBLAS/cuDNN",), 1, 50.0, 0.5),
        (("vllm-fl Triton",), 2, 20.0, 0.2),
        (("copies",), 1, 10.0, 0.1),
        (("inductor Triton",), 1, 10.0, 0.1),
        (("vLLM C++",), 1, 10.0, 0.1),
    ]
    assert report.triton_share == pytest.approx(0.3)
    assert report.product_share == 0.5
    assert report.triton_share_outside_products == pytest.approx(0.75)
    assert report.share(Provider.OURS, Provider.COPIES) == pytest.approx(0.3)
    assert report.by_operator()[1].key == ("silu_and_mul", "", "vllm-fl Triton")
    assert sum(share.share for share in report.by_operator()) == pytest.approx(1.0)


def test_triton_alone_is_a_hundred_percent() -> None:
    report = coverage([("_activate_and_mul", 3.0), ("triton_poi_fused_add_0", 1.0), ("nvjet_x", 9.0)], NAMES)
    assert report.triton_share_outside_products == 1.0
    assert set(Provider) - TRITON > {Provider.BLAS, Provider.VLLM_C}


@pytest.mark.parametrize("kernels", [[], [("Memset (Device)", 2.0)]], ids=["nothing", "copies only"])
def test_nothing_to_divide_by(kernels: list[tuple[str, float]]) -> None:
    report = coverage(kernels, NAMES)
    assert report.triton_share_outside_products == 0.0
    assert report.as_dict()["total_us"] == sum(time for _, time in kernels)


def event(name: str, category: str, ts: float, dur: float, **fields: Any) -> dict[str, Any]:
    arguments = {key: fields.pop(key) for key in ("correlation", "stream") if key in fields}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": 7,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    } | fields


TRACE = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    event("vllm_fl::rms_norm/flagos.flaggems", "user_annotation", 100, 50),
    event("vllm_fl::silu_and_mul/reference.torch", "user_annotation", 110, 10),
    event("cudaLaunchKernel", "cuda_runtime", 112, 2, correlation=1),
    event("cuLaunchKernelEx", "cuda_driver", 125, 2, correlation=2),
    event("cuLaunchKernelEx", "cuda_driver", 130, 2, correlation=3, tid=8),
    event("cudaGraphLaunch", "cuda_runtime", 160, 5, correlation=4),
    event("somebody's range", "user_annotation", 158, 20),
    event("vllm_fl::rms_norm/flagos.flaggems", "gpu_user_annotation", 300, 90, pid=0),
    event("void at::native::vectorized_elementwise_kernel<4>()", "kernel", 300, 4, pid=0, correlation=1),
    event("_rms_norm", "kernel", 310, 8, pid=0, correlation=2),
    event("_rms_norm", "kernel", 320, 16, pid=0, correlation=3),
    event("_activate_and_mul", "kernel", 340, 32, pid=0, correlation=4),
    event("Memcpy DtoH", "gpu_memcpy", 380, 64, pid=0, correlation=5),
]


def test_ranges_claim_what_was_launched_in_them() -> None:
    report = coverage(TRACE, NAMES)
    found = {(k.name, k.operator, k.implementation, k.provider, k.time_us) for k in report.kernels}
    assert found == {
        ("void at::native::vectorized_elementwise_kernel<4>()", "silu_and_mul", "reference.torch", Provider.PYTORCH, 4),
        ("_rms_norm", "rms_norm", "flagos.flaggems", Provider.FLAGGEMS, 8),
        ("_rms_norm", "rms_norm", None, Provider.OURS, 16),  # launched by another thread, outside of every range
        ("_activate_and_mul", "silu_and_mul", None, Provider.OURS, 32),  # replayed by a graph
        ("Memcpy DtoH", None, None, Provider.COPIES, 64),
    }
    assert [(kernel.name, kernel.others) for kernel in report.ambiguous] == [("_rms_norm", (Provider.FLAGGEMS,))]


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    data = json.dumps({"traceEvents": TRACE}).encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    assert coverage(path, NAMES) == coverage(str(path), NAMES) == coverage({"traceEvents": TRACE}, NAMES)
    assert json.loads(json.dumps(coverage(path, NAMES).as_dict(most_kernels=1)))["kernels"][0]["name"] == "Memcpy DtoH"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("no.json", b"{]", "no.json is not a Chrome trace: "),
        ("no.json.gz", b"plain", "no.json.gz is not a Chrome trace: "),
        ("other.json", b'{"a": 1}', "not a Chrome trace: it has no list 'traceEvents'"),
    ],
)
def test_no_trace(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        coverage(path)
    assert message in str(caught.value)


def test_names_from_sources() -> None:
    source = """
import triton
@triton.jit
def plain(x): ...
@libentry()
@triton.autotune(
    configs=[triton.Config({"BLOCK": 1})],
    key=["n"],
)
@triton.jit(do_not_specialize=["n"])
# a comment
def tuned(x, n): ...
@other.jit_function
def not_a_kernel(x): ...
def plain_function(x): ...
    @triton.heuristics({
        "A": lambda args: args["a"] is not None,
    })
    @triton.jit
    @debugged
    def inner(a): ...
"""
    assert kernel_names_of(source) == ["plain", "tuned", "inner"]
    assert {"_activate_and_mul", "_rms_norm"} <= set(
        kernel_names_of((Path(__file__).parents[2] / "src/vllm_fl/flagos/kernels/activation.py").read_text())
        + kernel_names_of((Path(__file__).parents[2] / "src/vllm_fl/flagos/kernels/normalization.py").read_text())
    )
