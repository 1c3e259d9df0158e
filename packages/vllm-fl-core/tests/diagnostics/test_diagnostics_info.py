"""``vllm-fl info``: what it finds, and when it exits with 1."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_fl.cli import main
from vllm_fl.diagnostics import Check, checks, collect_info, versions
from vllm_fl.dispatch import call_op
from vllm_fl.flagos import availability
from vllm_fl.plugins import COMMUNICATOR_GROUP, CommunicatorPlugin, loading
from vllm_fl.plugins.loading import Loaded

pytest.importorskip("vllm_fl_reference", reason="one backend has to be installed")
torch = pytest.importorskip("torch", reason="an implementation has to fail")

Install = Callable[..., None]


def states(state: str) -> dict[str, str]:
    return {check.subject: check.text for check in collect_info().checks if check.state == state}


def test_nothing_configured_is_fine() -> None:
    found = collect_info()
    assert found.ok
    assert found.versions["vllm-fl-core"]
    assert next(iter(found.versions)) == "Python"
    assert found.platform.name in (None, "reference")
    assert "reference" in {plug_in.name for plug_in in found.plug_ins if not plug_in.error}
    assert sum(found.operators.values()) >= 22
    assert found.failures == ()


def test_failed_implementations_are_shown_with_their_traceback(
    acme: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    acme(VLLM_FL_PREFER="vendor")
    call_op("rms_norm", torch.ones(2, 4), None, torch.ones(4), 1e-6)
    (failure,) = collect_info().failures
    assert (failure.op, failure.impl_id, failure.exception) == ("rms_norm", "vendor.acme", "ValueError: planted")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "Failed in this process: rms_norm by vendor.acme: ValueError: planted" in out
    assert 'raise ValueError("planted")' in out
    assert main(["info", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["failures"][0]["shapes"] == {"x": [2, 4], "weight": [4]}


@pytest.mark.parametrize(
    ("environment", "subject", "text"),
    [
        ({"VLLM_FL_STRICT": "maybe"}, "platform", "environment variable VLLM_FL_STRICT: 'maybe' is not a boolean"),
        ({"VLLM_FL_PLATFORM": "refrence"}, "platform", "platform 'refrence' is not installed"),
        ({"VLLM_FL_PLUGIN_MODULES": "no_such_module"}, "plug-in no_such_module", "No module named 'no_such_module'"),
        ({"VLLM_FL_PER_OP": "rmsnorm=vendor"}, "dispatch", "did you mean 'rms_norm'?"),
        ({"VLLM_FL_PER_OP": "moe_sum=vendor"}, "moe_sum", "no implementation is left: rejected: no token of vendor"),
        ({"FLAGCX_PATH": "/opt/flagcx"}, "communicator", "and which is not there: pip install vllm-fl-comm"),
        ({"USE_FLAGGEMS": "1"}, "USE_FLAGGEMS", "FlagGems is not installed; pip install --no-deps flag-gems"),
    ],
    ids=["value", "platform", "module", "operator", "order", "FlagCX", "FlagGems"],
)
def test_what_is_configured_and_cannot_work(
    environment: dict[str, str],
    subject: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(availability, "_version", lambda _name: None)
    monkeypatch.setitem(loading._cache, COMMUNICATOR_GROUP, ())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert text in states("problem")[subject]
    assert main(["info"]) == 1
    assert "PROBLEM" in capsys.readouterr().out
    assert main(["info", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False


def test_a_wish_that_is_passed_over_is_noted(acme: Install) -> None:
    acme(VLLM_FL_PER_OP="rms_norm=vendor:acme|reference", VLLM_FL_DENY_VENDORS="acme")
    assert states("note")["rms_norm"] == (
        "the first wish 'vendor:acme' is not served: vendor.acme is rejected: vendor 'acme' is denied; reference.torch"
        " is used (environment variable VLLM_FL_PER_OP)"
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``installed(numpy="1.26.4", vllm=["numpy>=2"])``: versions and requirements that metadata has."""

    def say(numpy: str, **requirements: list[str]) -> None:
        def requires(name: str) -> list[str]:
            if name not in requirements:
                raise importlib.metadata.PackageNotFoundError(name)
            return requirements[name]

        monkeypatch.setattr(versions, "requires", requires)
        monkeypatch.setattr(checks, "version", lambda _name: numpy)

    return say


@pytest.mark.parametrize(
    ("numpy", "flaggems", "expected"),
    [
        (
            "2.3.5",
            ["numpy==1.26.4"],
            Check(
                "NumPy",
                "ok",
                "2.3.5, as vLLM needs it; FlagGems pins numpy==1.26.4, runs with this one, and was installed without"
                " it",
            ),
        ),
        (
            "1.26.4",
            ["numpy==1.26.4"],
            Check(
                "NumPy",
                "problem",
                "1.26.4 is installed, vLLM needs numpy>=2.0; pip install 'numpy>=2.0'. FlagGems pins numpy==1.26.4: "
                f"install it without its dependencies, {availability.INSTALL_FLAGGEMS}",
            ),
        ),
        ("2.3.5", [], Check("NumPy", "ok", "2.3.5")),
    ],
    ids=["beside the pin", "taken by the pin", "no pin"],
)
def test_numpy_between_vllm_and_flaggems(
    installed: Callable[..., None], numpy: str, flaggems: list[str], expected: Check
) -> None:
    installed(numpy, **{"vllm": ["numpy>=2.0"], "flag-gems": flaggems})
    assert [check for check in checks.installation_checks() if check.subject == "NumPy"] == [expected]


COMMUNICATOR = """
def lines():
    {body}
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            'return [("FlagCX", "problem", "libflagcx.so is missing; set FLAGCX_PATH")]',
            [
                Check("communicator flagcx", "ok", "of acme-comm"),
                Check("FlagCX", "problem", "libflagcx.so is missing; set FLAGCX_PATH"),
            ],
        ),
        (
            'raise OSError("no driver")',
            [
                Check(
                    "communicator flagcx",
                    "problem",
                    "OSError: no driver; reinstall, update or remove acme-comm",
                )
            ],
        ),
    ],
    ids=["lines", "raises"],
)
def test_communicators_tell_their_state(
    body: str, expected: list[Check], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_comm.py").write_text(COMMUNICATOR.format(body=body))
    plugin = CommunicatorPlugin("flagcx", "some_comm:communicator", status="some_comm:lines")
    monkeypatch.setitem(loading._cache, COMMUNICATOR_GROUP, (Loaded(plugin, "acme-comm", "flagcx"),))
    monkeypatch.delitem(__import__("sys").modules, "some_comm", raising=False)
    asked = Check("communicator", "ok", "the platform's own: no communicator is asked for")
    assert list(checks.communicator_checks()) == [asked, *expected]


def test_tables(acme: Install, capsys: pytest.CaptureFixture[str]) -> None:
    acme(VLLM_FL_PREFER="vendor")
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "Platform: " in out
    assert "acme_operators" in out
    assert "No implementation has failed in this process." in out
