"""Settings that contradict one another, what ranks agree on, and what ``vllm-fl info`` says about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from comm_support import Doubles

from vllm_fl.config import reset_settings
from vllm_fl.errors import ConfigError, PlatformError
from vllm_fl.plugins import choose_communicator, communicator_class
from vllm_fl_comm import agreement
from vllm_fl_comm.agreement import DeviceFacts, Report, agree_on_custom, agree_on_library, common_site
from vllm_fl_comm.errors import FlagCXLoadError
from vllm_fl_comm.peers import Peer
from vllm_fl_comm.policy import Site
from vllm_fl_comm.settings import comm_settings
from vllm_fl_comm.status import status

Set = pytest.MonkeyPatch


def set_all(patch: Set, **variables: str) -> None:
    for name, value in variables.items():
        patch.setenv(name, value)
    reset_settings()


# settings


def test_defaults() -> None:
    settings = comm_settings()
    assert (settings.timeout, settings.custom_all_reduce, settings.asked_by) == (600.0, False, "default")
    assert settings.multicast_allowed
    assert settings.thresholds.custom == 8 << 20


def test_values_come_from_the_configuration(monkeypatch: Set) -> None:
    set_all(
        monkeypatch,
        VLLM_FL_COMM_TIMEOUT="2.5",
        VLLM_FL_COMM_CUSTOM_ALL_REDUCE="on",
        VLLM_FL_COMM_CUSTOM_MAX_BYTES="1MiB",
    )
    settings = comm_settings()
    assert (settings.timeout, settings.custom_all_reduce, settings.thresholds.custom) == (2.5, True, 1 << 20)
    assert settings.asked_by == "environment variable VLLM_FL_COMM_CUSTOM_ALL_REDUCE"


@pytest.mark.parametrize(("ours", "theirs", "expected"), [(None, "1", True), ("0", "1", False), ("1", "0", True)])
def test_our_key_wins_over_flagcx_s_variable(monkeypatch: Set, ours: str | None, theirs: str, expected: bool) -> None:
    set_all(monkeypatch, FLAGCX_CUSTOM_OP_ENABLE=theirs)
    if ours is not None:
        set_all(monkeypatch, VLLM_FL_COMM_CUSTOM_ALL_REDUCE=ours)
    assert comm_settings().custom_all_reduce is expected


def test_flagcx_s_variable_takes_0_and_1(monkeypatch: Set) -> None:
    set_all(monkeypatch, FLAGCX_CUSTOM_OP_ENABLE="yes")
    with pytest.raises(ConfigError) as caught:
        comm_settings()
    assert str(caught.value) == "environment variable FLAGCX_CUSTOM_OP_ENABLE: 'yes' is not 0 or 1"


@pytest.mark.parametrize("name", ["VLLM_FL_COMM_CUSTOM_ALL_REDUCE", "FLAGCX_CUSTOM_OP_ENABLE"])
def test_custom_kernels_are_refused_where_multicast_is_forbidden(monkeypatch: Set, name: str) -> None:
    set_all(monkeypatch, NCCL_NVLS_ENABLE="0", **{name: "1"})
    with pytest.raises(ConfigError) as caught:
        comm_settings()
    assert str(caught.value) == (
        f"environment variable {name} asks for FlagCX's custom all-reduce, and environment variable NCCL_NVLS_ENABLE=0"
        " says that NVLink multicast must stay off, which FlagCX's kernels use all the same; remove one of the two"
    )
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert comm_settings().custom_all_reduce


# agreement


def report(rank: int, **fields: object) -> Report:
    able: dict[str, object] = {"asks": True, "built": True, "device": DeviceFacts(True, (9, 0))}
    return Report(Peer(rank, "host", 100 + rank, 1), **{**able, **fields})  # type: ignore[arg-type]


def test_all_ranks_can() -> None:
    reports = [report(0), report(1)]
    agree_on_library(reports, "tp:0")
    assert agree_on_custom(reports) is None
    assert common_site(reports, None, homogeneous=True) == Site(2, None, True, True, (9, 0), True)


def test_one_rank_without_the_library_stops_all() -> None:
    reports = [report(0), report(1, error="FlagCX cannot be loaded"), report(2, error="another")]
    with pytest.raises(FlagCXLoadError) as caught:
        agree_on_library(reports, "tp:0")
    assert str(caught.value) == (
        "group 'tp:0': rank 1 (process 101), rank 2 (process 102) of 3 cannot load FlagCX: FlagCX cannot be loaded"
    )


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"asks": False}, "rank 1 (process 101) does not ask for it"),
        ({"built": False}, "rank 1 (process 101) has a FlagCX that was built without its kernels (COMPILE_KERNEL=1)"),
        ({"switched_on": False}, "rank 1 (process 101) made its first communicator without it"),
        ({"peer": Peer(1, "elsewhere", 101, 1)}, "rank 1 (process 101) runs on another host"),
    ],
)
def test_one_rank_that_cannot_refuses_for_all(fields: dict[str, object], reason: str) -> None:
    reports = [report(0), replace(report(1), **fields)]  # type: ignore[arg-type]
    assert agree_on_custom(reports) == reason


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (DeviceFacts(False, (9, 0)), "some devices have NVLink multicast and some do not"),
        (DeviceFacts(True, (8, 9)), "FlagCX's multicast kernels are empty below compute capability 9.0"),
    ],
)
def test_devices_that_cannot_refuse_before_anything_is_switched_on(device: DeviceFacts, reason: str) -> None:
    found = agree_on_custom([report(0), report(1, device=device)])
    assert found is not None
    assert found.startswith(reason)


def test_nobody_asks() -> None:
    assert agree_on_custom([report(0, asks=False), report(1, asks=False)]) == "not asked for"


def test_the_common_site_is_that_of_the_least_device() -> None:
    reports = [report(0), report(1, device=DeviceFacts(True, (8, 9)), multicast_allowed=False)]
    site = common_site(reports, None, homogeneous=False)
    assert (site.capability, site.multicast_allowed, site.homogeneous) == ((8, 9), False, False)
    mixed = common_site([report(0), report(1, device=DeviceFacts())], None, homogeneous=True)
    assert (mixed.capability, mixed.refusal) == (None, "some devices have NVLink multicast and some do not")


def test_flagcx_s_switch_is_set_once_a_process(monkeypatch: Set) -> None:
    monkeypatch.setattr(agreement, "_switched_on", None)
    monkeypatch.setenv("FLAGCX_CUSTOM_OP_ENABLE", "1")
    assert agreement.settle_environment(False) is False
    assert agreement.os.environ["FLAGCX_CUSTOM_OP_ENABLE"] == "0"
    assert agreement.settle_environment(True) is False
    assert agreement.os.environ["FLAGCX_CUSTOM_OP_ENABLE"] == "0"
    assert Report.here(0, comm_settings(), error=None, built=True, device=DeviceFacts()).switched_on is False


# selection


def test_nothing_asks_for_it() -> None:
    assert choose_communicator().plugin is None
    assert communicator_class("cpu") is None


@pytest.mark.parametrize("by", ["FLAGCX_PATH", "comm"])
def test_it_is_selected_on_purpose(monkeypatch: Set, doubles: Doubles, by: str) -> None:
    monkeypatch.setenv("FLAGCX_PATH", str(doubles()))
    if by == "comm":
        set_all(monkeypatch, VLLM_FL_COMM="flagcx")
    assert communicator_class("cpu") == "vllm_fl_comm.communicator.FlagCXCommunicator"
    assert communicator_class("cuda") == "vllm_fl_comm.cuda.FlagCXCudaCommunicator"
    assert communicator_class("npu") == "vllm_fl_comm.communicator.FlagCXCommunicator"


def test_native_wins_over_the_path(monkeypatch: Set, tmp_path: Path) -> None:
    set_all(monkeypatch, VLLM_FL_COMM="native", FLAGCX_PATH=str(tmp_path))
    assert communicator_class("cpu") is None
    assert choose_communicator().reason == "asked for by environment variable VLLM_FL_COMM"


def test_a_path_that_does_not_load_stops_the_start(monkeypatch: Set, tmp_path: Path) -> None:
    set_all(monkeypatch, FLAGCX_PATH=str(tmp_path))
    with pytest.raises(FlagCXLoadError, match=r"holds no libflagcx\.so"):
        communicator_class("cpu")


def test_an_unknown_communicator(monkeypatch: Set) -> None:
    set_all(monkeypatch, VLLM_FL_COMM="flagcy")
    with pytest.raises(PlatformError) as caught:
        choose_communicator()
    assert str(caught.value) == (
        "environment variable VLLM_FL_COMM: communicator 'flagcy' is not installed (installed: native, flagcx); did you"
        " mean 'flagcx'?"
    )


# vllm-fl info


def test_status_where_nothing_asks() -> None:
    assert status() == []


def test_status_of_a_library_without_kernels(monkeypatch: Set, doubles: Doubles) -> None:
    set_all(monkeypatch, FLAGCX_PATH=str(doubles(12)))
    assert status() == [
        ("FlagCX", "ok", f"{doubles(12)}/lib/libflagcx.so, interface of 0.12 or before"),
        ("custom all-reduce", "note", "not in this FlagCX, which was built without COMPILE_KERNEL=1"),
    ]
    set_all(monkeypatch, VLLM_FL_COMM_CUSTOM_ALL_REDUCE="1")
    assert status()[-1][1] == "problem"


def test_status_of_a_library_with_kernels(monkeypatch: Set, doubles: Doubles) -> None:
    set_all(monkeypatch, FLAGCX_PATH=str(doubles(13, "CUSTOM")))
    text = "in this FlagCX, off (default); VLLM_FL_COMM_CUSTOM_ALL_REDUCE=1 asks for it"
    assert status()[-1] == ("custom all-reduce", "note", text)
    set_all(monkeypatch, NCCL_NVLS_ENABLE="0")
    text = "in this FlagCX, off (default); and cannot be used while NCCL_NVLS_ENABLE=0 keeps NVLink multicast off"
    assert status()[-1] == ("custom all-reduce", "note", text)
    set_all(monkeypatch, NCCL_NVLS_ENABLE="2", VLLM_FL_COMM_CUSTOM_ALL_REDUCE="1")
    assert status()[-1][:2] == ("custom all-reduce", "ok")
    set_all(monkeypatch, NCCL_NVLS_ENABLE="0")
    assert status()[-1][:2] == ("custom all-reduce", "problem")


def test_status_of_a_library_without_abort(monkeypatch: Set, doubles: Doubles) -> None:
    set_all(monkeypatch, FLAGCX_PATH=str(doubles(13, "WITHOUT_ABORT")))
    text = "it cannot abort: a rank that waits for a lost peer is ended with its process"
    assert ("FlagCX", "note", text) in status()


@pytest.mark.parametrize(("comm", "state"), [(None, "problem"), ("native", "note")])
def test_status_of_a_path_that_does_not_load(monkeypatch: Set, tmp_path: Path, comm: str | None, state: str) -> None:
    set_all(monkeypatch, FLAGCX_PATH=str(tmp_path), **({"VLLM_FL_COMM": comm} if comm else {}))
    subject, found, text = status()[-1]
    assert (subject, found) == ("FlagCX", state)
    assert "holds no libflagcx.so" in text


def test_status_of_a_wrong_setting(monkeypatch: Set) -> None:
    set_all(monkeypatch, VLLM_FL_COMM="x")
    assert status() == []
