"""The pytest plug-in: one test for each check of each implementation.

It is installed with vllm-fl-core and does nothing until a test asks for the fixture ``fl_conformance``::

    @pytest.mark.fl_distribution("NAME")
    def test_conformance(fl_conformance):
        fl_conformance()

The test becomes as many tests as there are checks. What a distribution's ``conformance.yaml`` expects is an expected
failure; what cannot be checked here is skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from . import Item, Kit, Options, Subject

_MARKER = "fl_distribution"
_FIXTURE = "fl_conformance"
_STALE = "known gaps"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-fl conformance")
    group.addoption("--fl-dist", metavar="DIST", help="distribution or backend to check, instead of the marker's")
    group.addoption("--fl-device", metavar="DEVICE", default="cpu", help="torch device of the operators")
    group.addoption("--fl-op", metavar="OP", action="append", default=[], help="only this operator; repeatable")
    group.addoption("--fl-dtype", metavar="DTYPE", action="append", default=[], help="only this dtype; repeatable")
    group.addoption("--fl-tokens", metavar="N", type=int, action="append", default=[], help="number of tokens")
    group.addoption("--fl-allow", metavar="FILE", help="known gaps, instead of the distribution's conformance.yaml")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{_MARKER}(name): the distribution or backend that the fixture {_FIXTURE} checks"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _FIXTURE not in metafunc.fixturenames:
        return
    runs = _Runs(_kit(metafunc.config, _name(metafunc)))
    metafunc.parametrize(_FIXTURE, [pytest.param(call, id=name) for name, call in runs.calls().items()])


def _name(metafunc: pytest.Metafunc) -> str:
    marker = metafunc.definition.get_closest_marker(_MARKER)
    chosen: str | None = metafunc.config.getoption("--fl-dist")
    if chosen is not None:
        return chosen
    if marker is None or len(marker.args) != 1:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid} asks for {_FIXTURE} and does not say of which distribution; mark it"
            f' @pytest.mark.{_MARKER}("NAME"), or give --fl-dist NAME'
        )
    return str(marker.args[0])


def _kit(config: pytest.Config, name: str) -> Kit:
    from vllm_fl.errors import FLError

    from . import AllowList, Kit, find_bundles

    try:
        path = config.getoption("--fl-allow")
        return Kit(find_bundles(name), _options(config), AllowList.read(Path(path)) if path else None)
    except FLError as error:
        raise pytest.UsageError(str(error)) from None


def _options(config: pytest.Config) -> Options:
    from . import Options

    tokens = tuple(config.getoption("--fl-tokens")) or Options.tokens
    operators, dtypes = tuple(config.getoption("--fl-op")), tuple(config.getoption("--fl-dtype"))
    return Options(config.getoption("--fl-device"), operators, dtypes, tokens)


class _Runs:
    """Checks of one kit; those of one item are made together, when the first of them is asked for."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self._done: dict[str, Subject] = {}

    def calls(self) -> dict[str, Callable[[], None]]:
        """Name of a test to what it does."""
        found: dict[str, Callable[[], None]] = {}
        items = self.kit.items()
        for item in items:
            for check in item.checks:
                found[f"{item.name}: {check}"] = partial(self._judge, item, check)
        if self.kit.gaps.entries and self.kit.options.complete:
            found[_STALE] = partial(self._judge_gaps, items)
        return found

    def _subject(self, item: Item) -> Subject:
        if item.name not in self._done:
            self._done[item.name] = self.kit.check(item)
        return self._done[item.name]

    def _judge(self, item: Item, check: str) -> None:
        from . import Status

        result = self._subject(item).checks[check]
        text = "; ".join(result.notes)
        if result.status is Status.FAILED:
            pytest.fail(f"{item.name}: {check}: {item.checks[check]}\n{result.summary()}", pytrace=False)
        if result.status is Status.KNOWN_GAP:
            pytest.xfail(text)
        if result.status is Status.SKIPPED:
            pytest.skip(text)

    def _judge_gaps(self, items: list[Item]) -> None:
        for item in items:
            self._subject(item)
        stale = self.kit.stale()
        if stale:
            pytest.fail("\n".join(stale), pytrace=False)
