"""Profiles as a page of HTML that needs nothing else: no network, no script."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple

from vllm_fl.version import __version__

from .report import ProfileReport, Row, side_by_side

_CLOCKS = {"device": "the device's time", "cpu": "the time of the workers' threads"}
_WIDTH = 900.0
_LEVEL = 26.0
_GAP = 1.0
_LETTER = 6.6  # width of a letter of the labels, about
#: Shares below this are one row and one box.
SMALL = 0.004
_COLOURS = {
    "dispatch": "#2f6fb3",
    "vllm-fl Triton": "#2f6fb3",
    "FlagGems": "#1d8a7d",
    "inductor Triton": "#6a51a3",
    "inductor": "#6a51a3",
    "vLLM Triton": "#3d8bd4",
    "vLLM C++": "#b3572f",
    "FlashAttention": "#a83e6b",
    "FlashInfer": "#8a4f7d",
    "cuBLAS/cuDNN": "#5f7a1f",
    "PyTorch": "#8a6d1d",
    "torch operator": "#a5562a",
}
_GREY = "#6b7580"


class Box(NamedTuple):
    """A rectangle of the flame chart: a label that fits into it, or none, and a title for the pointer."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    label: str
    title: str


class Chart(NamedTuple):
    """A flame chart: the provider of the code above its operators, those above their implementations."""

    boxes: list[Box]
    height: float


def page(reports: Sequence[ProfileReport]) -> str:
    """The page of one profile, or of two side by side."""
    from jinja2 import Environment

    template = files("vllm_fl.profile").joinpath("page.html.j2").read_text(encoding="utf-8")
    tables = [folded(report.rows) for report in reports]
    return Environment(autoescape=True, trim_blocks=True).from_string(template).render(
        reports=reports,
        tables=tables,
        charts=[chart(rows) for rows in tables],
        pairs=[p for p in side_by_side(*reports) if max(p.shares) >= SMALL] if len(reports) == 2 else [],
        widest=max((row.share for rows in tables for row in rows), default=1.0),
        colour=_colour,
        clocks=_CLOCKS,
        width=_WIDTH,
        version=__version__,
    )  # fmt: skip


def folded(rows: Iterable[Row]) -> list[Row]:
    """The rows, with the small ones of those that are no operators put into one."""
    found = list(rows)
    small = [row for row in found if row.share < SMALL and not row.operator]
    kept = [row for row in found if row not in small]
    if small:
        calls, time_us, share = sum(r.calls for r in small), sum(r.time_us for r in small), sum(r.share for r in small)
        kept.append(Row("", f"{len(small)} others", "", calls, time_us, share))
    return kept


def chart(rows: Iterable[Row]) -> Chart:
    """The flame chart of a share table."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.provider or "others"].append(row)
    boxes: list[Box] = []
    x = 0.0
    for provider, members in sorted(groups.items(), key=lambda group: -sum(row.share for row in group[1])):
        share = sum(row.share for row in members)
        boxes.append(_box(x, 0, share, provider, provider))
        for row in sorted(members, key=lambda row: -row.share):
            boxes.append(_box(x, 1, row.share, row.provider, row.operator or row.implementation))
            if row.operator:
                boxes.append(_box(x, 2, row.share, row.provider, row.implementation))
            x += row.share
    levels = 3 if any(row.operator for members in groups.values() for row in members) else 2
    return Chart(boxes, levels * (_LEVEL + _GAP))


def _box(start: float, level: int, share: float, provider: str, name: str) -> Box:
    width = max(share * _WIDTH - _GAP, 0.5)
    letters = int((width - 10) / _LETTER)
    label = name if len(name) <= letters else f"{name[: letters - 1]}…" if letters > 4 else ""
    y = level * (_LEVEL + _GAP)
    return Box(round(start * _WIDTH, 2), y, round(width, 2), _LEVEL, _colour(provider), label, f"{name}: {share:.1%}")


def _colour(provider: str) -> str:
    return _COLOURS.get(provider, _GREY)
