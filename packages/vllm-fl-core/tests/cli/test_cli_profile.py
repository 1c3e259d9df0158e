"""``vllm-fl profile`` with a stand-in for the run on a device: what is printed, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.cli import main
from vllm_fl.cli.commands import profile
from vllm_fl.profile import KernelNames, ProfileReport, coverage
from vllm_fl.profile.report import rows_of_coverage

NAMES = KernelNames(ours=frozenset({"_rms_norm"}))


def report(policy: str, faster: float) -> ProfileReport:
    found = coverage([("nvjet_x", 5000.0), ("_rms_norm", 3000.0 / faster), ("void at::native::x()", 2000.0)], NAMES)
    return ProfileReport(
        model="some/model",
        policy=policy,
        workload="8 requests, 64 tokens in, 16 out",
        clock="device",
        wall_s=1.5,
        output_tokens=128,
        selection={"rms_norm": "flagos.triton"},
        rows=rows_of_coverage(found, {}),
        coverage=found,
        traces=("out/trace-rank0.json.gz",),
    )


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def run(model: str, names: dict[str, str], work: Any, out: Path, *rest: Any) -> list[ProfileReport]:
        asked.append((model, names, work, *rest))
        out.mkdir(parents=True)
        return [report(policy, 1.0 + index) for index, policy in enumerate(names.values())]

    monkeypatch.setattr(profile, "_run", run)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.chdir(tmp_path)
    return asked


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]


def test_tables_of_a_device(stand_in: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "some/model", "--requests", "4", "--tensor-parallel-size", "2"]) == 0
    shown = lines(capsys)
    assert "Time of the device, policy present" in shown
    assert "rms_norm flagos.triton vllm-fl Triton 1 3.00 30.0%" in shown
    assert "cuBLAS/cuDNN 1 5.00 50.0%" in shown
    assert (
        "Triton: 30.0% of the device's time, 60.0% without matrix products (50.0%), copies and communication." in shown
    )
    assert "Page: vllm-fl-profile/profile.html" in shown
    ((model, names, work, extra, verbose),) = stand_in
    assert (model, names, work.requests, verbose) == ("some/model", {"--policy": "present"}, 4, False)
    assert extra == ["--tensor-parallel-size", "2"], "what is vLLM's goes to vLLM"


def test_two_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "some/model", "--against", "reference", "--out", "both"]) == 0
    assert "rms_norm flagos.triton 3.00 flagos.triton 1.50 0.50" in lines(capsys)
    documents = json.loads(Path("both/profile.json").read_text())
    assert [document["policy"] for document in documents] == ["present", "reference"]
    assert "present against reference" in Path("both/profile.html").read_text()


def test_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "some/model", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["page"] == "vllm-fl-profile/profile.html"
    assert document["reports"][0]["coverage"]["triton_share"] == pytest.approx(0.3)


@pytest.mark.parametrize("arguments", [[], ["m", "--requests", "0"], ["m", "--output-len", "long"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    assert capsys.readouterr().out == ""
