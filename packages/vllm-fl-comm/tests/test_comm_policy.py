"""Which all-reduce takes which way: the table of sizes, every reason against, and what holds for any call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fl_comm.flagcx import ITEM_BYTES, DataType, Reduction
from vllm_fl_comm.policy import CUSTOM_BYTES_LIMIT, Algorithm, Call, Site, Thresholds, decide

LOCAL, INTERLEAVED = Algorithm.LOCAL_MULTIMEM, Algorithm.INTERLEAVED_MULTIMEM
LSA, PLAIN = Algorithm.LSA, Algorithm.PLAIN
KIB, MIB = 1 << 10, 1 << 20
HOPPER = Site(ranks=4, multicast=True, capability=(9, 0))
CALL = Call(count=1024, dtype=DataType.BFLOAT16)


def of(nbytes: int, dtype: DataType = DataType.BFLOAT16, op: Reduction = Reduction.SUM) -> Call:
    return Call(nbytes // ITEM_BYTES[dtype], dtype, op)


@pytest.mark.parametrize(
    ("ranks", "nbytes", "expected"),
    [
        (2, 4, LOCAL),
        (2, 512 * KIB - 4, LOCAL),
        (2, 512 * KIB, INTERLEAVED),
        (4, 512 * KIB - 4, LOCAL),
        (4, 8 * MIB, INTERLEAVED),
        (4, 8 * MIB + 4, PLAIN),
        (5, 256 * KIB - 4, LOCAL),
        (5, 256 * KIB, INTERLEAVED),
        (8, 256 * KIB - 4, LOCAL),
        (8, 256 * KIB, INTERLEAVED),
        (9, 4, INTERLEAVED),
        (16, 8 * MIB, INTERLEAVED),
        (16, 64 * MIB, PLAIN),
    ],
)
def test_sizes_with_multicast(ranks: int, nbytes: int, expected: Algorithm) -> None:
    assert decide(of(nbytes), replace(HOPPER, ranks=ranks)).algorithm is expected


@pytest.mark.parametrize(("nbytes", "expected"), [(4, LSA), (512 * KIB, LSA), (8 * MIB, LSA), (8 * MIB + 4, PLAIN)])
def test_sizes_without_multicast(nbytes: int, expected: Algorithm) -> None:
    assert decide(of(nbytes), Site(ranks=8, capability=(8, 0))).algorithm is expected


SITES = {
    "the ranks' refusal": (
        {"refusal": "rank 1 (process 7) runs on another host"},
        "rank 1 (process 7) runs on another",
    ),
    "one rank": ({"ranks": 1}, "one rank has nothing to reduce"),
    "vendors": ({"homogeneous": False}, "the devices are of several vendors"),
    "multicast forbidden": (
        {"multicast_allowed": False},
        "NCCL_NVLS_ENABLE=0 forbids NVLink multicast, which FlagCX's kernels use wherever the devices have it",
    ),
    "empty kernels": (
        {"capability": (8, 9)},
        "FlagCX's multicast kernels are empty below compute capability 9.0, and the devices have 8.9",
    ),
}


@pytest.mark.parametrize("case", SITES)
def test_what_speaks_against_a_site(case: str) -> None:
    changes, reason = SITES[case]
    decision = decide(CALL, replace(HOPPER, **changes))
    assert decision.algorithm is PLAIN
    assert decision.reason.startswith(reason)


CALLS = {
    "integers": (Call(8, DataType.INT32), "INT32 is not a floating-point type"),
    "product": (Call(8, DataType.BFLOAT16, Reduction.PRODUCT), "no kernel for PRODUCT of BFLOAT16"),
    "average": (Call(8, DataType.FLOAT16, Reduction.AVERAGE), "no kernel for AVERAGE of FLOAT16"),
    "maximum of float32": (Call(8, DataType.FLOAT32, Reduction.MAX), "no kernel for MAX of FLOAT32"),
    "odd": (Call(7, DataType.BFLOAT16), "an odd number of elements of BFLOAT16"),
    "misaligned": (Call(8, DataType.BFLOAT16, alignment=2), "the output is aligned to 2 bytes, and 4 are needed"),
    "misaligned double": (Call(8, DataType.FLOAT64, alignment=4), "the output is aligned to 4 bytes, and 8 are needed"),
    "empty": (Call(0, DataType.FLOAT32), "nothing to reduce"),
    "large": (Call(8 * MIB, DataType.FLOAT32), "more than 8388608 bytes"),
}


@pytest.mark.parametrize("case", CALLS)
def test_what_speaks_against_a_call(case: str) -> None:
    call, reason = CALLS[case]
    decision = decide(call, HOPPER)
    assert (decision.algorithm, decision.reason, decision.is_custom) == (PLAIN, reason, False)


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("op", [Reduction.MIN, Reduction.MAX])
def test_minimum_and_maximum_of_small_floats(dtype: DataType, op: Reduction) -> None:
    assert decide(Call(8, dtype, op), HOPPER).algorithm is LOCAL


def test_an_odd_number_of_large_floats() -> None:
    assert decide(Call(7, DataType.FLOAT32), HOPPER).algorithm is LOCAL


def test_multicast_may_be_forbidden_where_there_is_none() -> None:
    site = Site(ranks=4, multicast=False, multicast_allowed=False, capability=(8, 0))
    assert decide(CALL, site).algorithm is LSA


def test_thresholds_can_be_tuned() -> None:
    limits = Thresholds(custom=64 * KIB, local_up_to_4=8 * KIB)
    assert decide(of(4 * KIB), HOPPER, limits).algorithm is LOCAL
    assert decide(of(8 * KIB), HOPPER, limits).algorithm is INTERLEAVED
    assert decide(of(64 * KIB + 4), HOPPER, limits).reason == "more than 65536 bytes"
    assert decide(CALL, HOPPER, Thresholds(custom=0)).algorithm is PLAIN


@pytest.mark.parametrize("custom", [-1, CUSTOM_BYTES_LIMIT + 1])
def test_thresholds_beyond_the_staging_buffer(custom: int) -> None:
    with pytest.raises(ValueError) as caught:
        Thresholds(custom=custom)
    assert str(caught.value) == f"Thresholds: custom {custom} is not between 0 and 8388608 bytes"


def test_capture_between_vendors_is_an_error() -> None:
    with pytest.raises(ValueError) as caught:
        decide(replace(CALL, capturing=True), replace(HOPPER, homogeneous=False))
    assert str(caught.value) == (
        "an operation between devices of several vendors waits on the host and cannot be captured into a graph;"
        " remedy: --enforce-eager"
    )


@pytest.mark.parametrize("nbytes", [4, 512 * KIB, 8 * MIB])
def test_capture_changes_nothing_between_devices_of_one_vendor(nbytes: int) -> None:
    call = of(nbytes)
    assert decide(replace(call, capturing=True), HOPPER) == decide(call, HOPPER)


calls = st.builds(
    Call,
    count=st.integers(0, 1 << 24),
    dtype=st.sampled_from(DataType),
    op=st.sampled_from(Reduction),
    alignment=st.sampled_from([1, 2, 4, 8, 16, 512]),
)
sites = st.builds(
    Site,
    ranks=st.integers(1, 64),
    refusal=st.sampled_from([None, None, "no"]),
    multicast=st.booleans(),
    multicast_allowed=st.booleans(),
    capability=st.sampled_from([None, (8, 0), (9, 0), (10, 3)]),
    homogeneous=st.booleans(),
)
limits = st.builds(Thresholds, custom=st.integers(0, CUSTOM_BYTES_LIMIT))


@given(calls, sites, limits)
def test_any_call_has_an_answer_and_a_reason(call: Call, site: Site, thresholds: Thresholds) -> None:
    decision = decide(call, site, thresholds)
    assert decision.reason
    if decision.is_custom:
        assert 0 < call.nbytes <= min(thresholds.custom, CUSTOM_BYTES_LIMIT)
        assert site.refusal is None
        assert site.homogeneous
        assert (decision.algorithm is LSA) == (not site.multicast)
        assert site.multicast_allowed or not site.multicast


@given(calls, sites, st.integers(0, CUSTOM_BYTES_LIMIT), st.integers(0, CUSTOM_BYTES_LIMIT))
def test_a_larger_threshold_takes_nothing_away(call: Call, site: Site, one: int, other: int) -> None:
    small, large = (decide(call, site, Thresholds(custom=custom)) for custom in sorted((one, other)))
    assert large.is_custom or not small.is_custom


@given(calls, sites)
def test_better_alignment_takes_nothing_away(call: Call, site: Site) -> None:
    assert decide(replace(call, alignment=16), site).is_custom or not decide(call, site).is_custom
