"""Self time by owner, the report made of it, and the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.profile import KernelNames, ProfileReport, Row, coverage, side_by_side, timeline
from vllm_fl.profile.page import SMALL, chart, folded, page
from vllm_fl.profile.report import rows_of_coverage, rows_of_timelines

RANGE = "user_annotation"


def event(name: str, category: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": {}}


TRACE = [
    event("aten::empty", "cpu_op", 0, 50),  # before anything of ours
    event("vllm_fl model", RANGE, 100, 100),
    event("aten::linear", "cpu_op", 105, 20),
    event("aten::addmm", "cpu_op", 110, 10),  # inside of linear: the same owner
    event("vllm_fl::rms_norm/vendor.acme", RANGE, 130, 30),
    event("aten::pow", "cpu_op", 132, 5),
    event("vllm_fl::silu_and_mul/reference.torch", RANGE, 140, 8),  # a dispatched call inside of another
    event("vllm::unified_attention_with_output", "cpu_op", 165, 20),
    event("vllm_fl::reshape_and_cache/reference.torch", RANGE, 170, 5),
    event("## Call CompiledFxGraph f1 ##", "cpu_op", 186, 10),
    event("aten::mm", "cpu_op", 188, 4),
    event("somebody's range", RANGE, 197, 2),
    event("aten::argmax", "cpu_op", 210, 10),
    event("vllm_fl model", RANGE, 250, 10),
    event("aten::copy_", "cpu_op", 300, 10),  # after everything of ours
    event("aten::copy_", "cpu_op", 100, 10, tid=2),  # a thread that ran no model
]
EXPECTED = {
    ("model", "", ""): (2, 100 - 20 - 30 - 20 - 10 + 10),
    ("outside", "", ""): (0, 50 - 10),
    ("torch", "aten::linear", ""): (1, 20),
    ("operator", "rms_norm", "vendor.acme"): (1, 22),
    ("operator", "silu_and_mul", "reference.torch"): (1, 8),
    ("torch", "vllm::unified_attention_with_output", ""): (1, 15),
    ("operator", "reshape_and_cache", "reference.torch"): (1, 5),
    ("compiled", "", ""): (1, 6),
    ("torch", "aten::mm", ""): (1, 4),
    ("torch", "aten::argmax", ""): (1, 10),
}


def test_self_times() -> None:
    found = timeline(TRACE)
    assert {tuple(span.owner): (span.calls, span.time_us) for span in found.spans} == EXPECTED
    assert found.total_us == 260 - 100
    assert [span.time_us for span in found.spans] == sorted((span.time_us for span in found.spans), reverse=True)


def test_a_trace_of_nothing() -> None:
    assert timeline([]).spans == timeline([event("aten::add", "cpu_op", 0, 9)]).spans == ()


def report(policy: str, slow: float = 1.0, **fields: Any) -> ProfileReport:
    events = [dict(e, dur=e["dur"] * slow) if "rms_norm" in e["name"] else e for e in TRACE]
    values: dict[str, Any] = {
        "model": "tiny <b>model</b>",
        "policy": policy,
        "workload": "4 requests, 32 tokens in, 8 out",
        "clock": "cpu",
        "wall_s": 0.25,
        "output_tokens": 32,
        "selection": {"rms_norm": "vendor.acme", "attention_backend": "reference.torch"},
        "coverage": None,
        "traces": ("trace-rank0.json.gz",),
        **fields,
    }
    rows = values.pop("rows", rows_of_timelines([timeline(events)], values["selection"]))
    return ProfileReport(rows=rows, **values)


def test_shares() -> None:
    found = report("present")
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)
    assert found.total_us == 160
    assert found.share("rms_norm") == found.share("rms_norm", "vendor.acme") == pytest.approx(22 / 160)
    assert found.share("rms_norm", "reference.torch") == 0
    assert found.share("attention_backend", "reference.torch") == pytest.approx(15 / 160)
    assert [row.operator for row in found.operators] == [
        "rms_norm",
        "attention_backend",
        "silu_and_mul",
        "reshape_and_cache",
    ]
    assert json.loads(json.dumps(found.as_dict()))["rows"][0]["implementation"] == "outside of the model"


def test_two_ranks_are_added() -> None:
    one, two = rows_of_timelines([timeline(TRACE)], {}), rows_of_timelines([timeline(TRACE)] * 2, {})
    assert [(r.operator, 2 * r.calls, 2 * r.time_us, r.share) for r in one] == [
        (r.operator, r.calls, r.time_us, r.share) for r in two
    ]


def test_kernels_of_a_graph_belong_to_the_chosen_implementation() -> None:
    names = KernelNames(ours=frozenset({"_rms_norm"}), vllm=frozenset({"_topk_topp_kernel"}))
    kernels = [
        ("_rms_norm", 3.0),
        ("_rms_norm", 2.0),
        ("nvjet_x", 4.0),
        ("void vllm::moe_sum()", 2.0),
        ("void at::native::fill()", 1.5),
        ("_topk_topp_kernel", 1.0),
    ]
    chosen = {"rms_norm": "reference.torch", "moe_sum": "vendor.acme", "apply_top_k_top_p": "flagos.triton"}
    assert [
        (r.operator, r.implementation, r.provider, r.calls, r.time_us)
        for r in rows_of_coverage(coverage(kernels, names), chosen)
    ] == [
        ("rms_norm", "flagos.triton", "vllm-fl Triton", 2, 5.0),
        ("", "matrix products", "cuBLAS/cuDNN", 1, 4.0),
        ("moe_sum", "vendor.acme", "vLLM C++", 1, 2.0),
        ("", "kernels of PyTorch", "PyTorch", 1, 1.5),
        ("apply_top_k_top_p", "kernels of vLLM Triton", "vLLM Triton", 1, 1.0),  # vLLM's own sampler
    ]


def test_side_by_side() -> None:
    pairs = {pair.name: pair for pair in side_by_side(report("a"), report("b", slow=1.1))}
    assert pairs["rms_norm"].implementations == ("vendor.acme", "vendor.acme")
    assert pairs["rms_norm"].times_us == (22, pytest.approx(25))
    assert pairs["aten::linear"].implementations == ("", "")


def test_small_parts_are_one_row() -> None:
    rows = [Row("", f"aten::op{i}", "PyTorch", 2, 1.0, SMALL / 2) for i in range(3)]
    kept = [Row("rms_norm", "vendor.acme", "dispatch", 1, 1.0, SMALL / 2), Row("", "aten::mm", "PyTorch", 1, 9.0, 0.9)]
    assert folded([*rows, *kept]) == [*kept, Row("", "3 others", "", 6, 3.0, pytest.approx(1.5 * SMALL))]


def test_chart_fills_its_width_and_cuts_long_labels() -> None:
    boxes = chart(report("present").rows).boxes
    first = [box for box in boxes if box.y == 0]
    assert sum(box.width + 1 for box in first) == pytest.approx(900, abs=0.1)
    assert all(7 * len(box.label) < box.width + 7 for box in boxes)
    assert "attention_backend: 9.4%" in {box.title for box in boxes}


PAIR = [report("present"), report("silu_and_mul=reference", slow=1.2)]


def test_page_needs_nothing_else_and_escapes() -> None:
    text = page(PAIR)
    assert "tiny &lt;b&gt;model&lt;/b&gt;" in text
    assert "<script" not in text
    assert re.findall(r"(?:src|href|url)\s*[=(]", text) == []
    assert "present against silu_and_mul=reference" in text
    assert "against" not in page(PAIR[:1])


def test_page_of_a_device() -> None:
    found = coverage([("nvjet_x", 4.0), ("triton_poi_fused_add_0", 4.0)], KernelNames())
    text = page([report("present", clock="device", coverage=found, rows=rows_of_coverage(found, {}))])
    assert "Triton 50.0 % of the whole" in text
    assert "triton_poi_fused_add_0" in text


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine to look at the page with (apt install chromium)"
)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_in_a_browser(tmp_path: Path, dark: bool) -> None:
    """The chart is drawn in its colours, the text in ink on paper, and the page is as high as its content."""
    from PIL import Image

    (tmp_path / "page.html").write_text(page(PAIR), encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1300,1500",
    ]
    command += ["--blink-settings=preferredColorScheme=" + ("0" if dark else "1")]
    command += [f"--user-data-dir={tmp_path / 'user'}", f"--screenshot={tmp_path / 'page.png'}"]
    subprocess.run([*command, (tmp_path / "page.html").as_uri()], check=True, capture_output=True, timeout=120)
    with Image.open(tmp_path / "page.png") as picture:
        colours = {colour[:3]: count for count, colour in picture.getcolors(1 << 24)}
        pixels = picture.width * picture.height
    paper = (0x15, 0x18, 0x1B) if dark else (0xFF, 0xFF, 0xFF)
    assert colours[paper] > 0.5 * pixels
    assert colours[0x2F, 0x6F, 0xB3] > 5_000, "the boxes and bars of dispatched operators"
    assert colours[0x8A, 0x6D, 0x1D] > 2_000, "those of PyTorch's operators"
