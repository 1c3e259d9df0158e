"""A run over the reference distribution, from Python, from the command line and in pytest."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_fl.cli import main
from vllm_fl.dispatch import Availability, BackendImplKind, OpImpl, OpRegistry
from vllm_fl.errors import ConfigError
from vllm_fl.plugins import BackendPlugin
from vllm_fl.testing import (
    CHECKS,
    PLATFORM_CHECKS,
    AllowList,
    Bundle,
    Kit,
    Options,
    Status,
    check_implementation,
    find_bundles,
    reference_based,
    run,
)
from vllm_fl.testing.platform import check_backend
from vllm_fl.testing.rendering import badge

pytest_plugins = ("pytester",)

#: Quick ones of every family: one with results, one that writes, one of integers, one without tensors.
OPERATORS = ("gelu_and_mul", "apply_repetition_penalties", "moe_align_block_size", "attention_backend")


def test_the_reference_conforms() -> None:
    report = run(find_bundles("vllm-fl-reference"), Options(operators=OPERATORS, tokens=(1, 17)))
    assert [result.summary() for _, result in report.results() if result.status is Status.FAILED] == []
    assert report.ok
    assert {subject.operator for subject in report.subjects} == set(OPERATORS)
    for subject in report.subjects:
        assert list(subject.checks) == list(CHECKS)
        assert subject.checks["accuracy"].status is Status.PASSED
        assert subject.seconds > 0


def test_the_platform_of_the_reference_conforms() -> None:
    (bundle,) = find_bundles("reference")
    subject = check_backend(bundle, Options())
    assert list(subject.checks) == list(PLATFORM_CHECKS)
    assert {name: result.summary() for name, result in subject.checks.items()} == {
        "metadata": "",
        "import": "",
        "probe": "it declares no probe",
        "yaml": "it declares no platform file",
        "register": "",
        "platform": "",
    }


def bundle(plugin: BackendPlugin | None = None, error: str = "", **functions: Callable[..., Any]) -> Bundle:
    """A backend that is not installed."""
    registry = OpRegistry()
    kind = BackendImplKind.VENDOR
    registry.register_many(OpImpl(name, "vendor.x", kind, fn, vendor="x") for name, fn in functions.items())
    return Bundle("sample", "vllm-fl-sample", "vllm_fl", plugin, registry, error)


def plugin(**fields: Any) -> BackendPlugin:
    return BackendPlugin(**{"name": "sample", "kind": BackendImplKind.VENDOR, "vendor": "sample", **fields})


def violations(check: str, subject: Bundle) -> list[str]:
    result = check_backend(subject, Options(checks=(check,))).checks[check]
    return [violation.text for violation in result.violations]


def test_metadata_that_is_not_there() -> None:
    expected = "the metadata of vllm-fl-sample is not installed; install its wheel"
    assert violations("metadata", bundle()) == [expected]


@pytest.mark.parametrize(
    ("probe", "expected"),
    [
        ("os:getpid", "os:getpid returned "),
        ("os:nothing", "os:nothing raised AttributeError: module 'os' has no attribute 'nothing'"),
    ],
)
def test_probe(probe: str, expected: str) -> None:
    (text,) = violations("probe", bundle(plugin(probe=probe)))
    assert text.startswith(expected)


def test_registration_of_another_vendor() -> None:
    subject = bundle(plugin(register="os:getpid"), silu_and_mul=lambda x: x)
    assert violations("register", subject) == [
        "silu_and_mul: implementation 'vendor.x' names the vendor 'x', the backend 'sample'"
    ]
    assert violations("register", bundle(plugin(register="os:getpid"))) == ["it registers no implementation"]
    assert violations("register", bundle(error="ImportError: no libacme")) == ["ImportError: no libacme"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (
            "no_such_package.Platform",
            "'no_such_package.Platform' cannot be imported: No module named 'no_such_package'",
        ),
        (
            "collections.OrderedDict",
            "collections.OrderedDict is not a subclass of vllm_fl.integration.platform.FLPlatform",
        ),
    ],
)
def test_platform_class(path: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bundle, "is_here", lambda self: Availability(True))
    assert violations("platform", bundle(plugin(platform=path))) == [expected]


def test_a_platform_whose_sdk_is_missing_is_not_judged_where_its_device_is_missing() -> None:
    result = check_backend(bundle(plugin(platform="no_such_sdk.Platform")), Options()).checks["platform"]
    reason = "it declares no probe; VLLM_FL_PLATFORM=sample asks for it"
    text = f"'no_such_sdk.Platform' cannot be imported: No module named 'no_such_sdk'; the probe says: {reason}"
    assert (result.status, result.notes) == (Status.SKIPPED, [text])


def test_what_the_base_class_leaves_open_is_named() -> None:
    found = violations("platform", bundle(plugin(platform="vllm_fl.integration.platform.FLPlatform")))
    assert "vllm_fl.integration.platform.FLPlatform.device_type is not set" in found
    text = "vllm_fl.integration.platform.FLPlatform.set_device is not defined; vLLM calls it for each worker"
    assert text in found


def test_an_implementation_that_refuses_everything_fails() -> None:
    def silu_and_mul(x: Any) -> Any:
        raise NotImplementedError("not today")

    from vllm_fl.catalog import CATALOG

    impl = OpImpl("silu_and_mul", "vendor.x", BackendImplKind.VENDOR, silu_and_mul, vendor="x")
    subject = check_implementation(impl, CATALOG["silu_and_mul"], lambda x: x, Options(dtypes=("float32",)))
    assert subject.checks["refusal"].summary() == f"refuses all of {subject.cases} calls: not today"
    assert subject.refused == subject.cases > 0


def test_an_implementation_that_is_not_available_is_not_checked() -> None:
    def silu_and_mul(x: Any) -> Any:
        return x

    silu_and_mul._is_available = lambda: False  # type: ignore[attr-defined]
    report = run([bundle(silu_and_mul=silu_and_mul)], Options(operators=("silu_and_mul",)))
    (subject,) = report.subjects
    assert subject.status is Status.SKIPPED
    assert subject.checks["accuracy"].notes == ["not available: its availability check says no"]
    assert not report.ok, "nothing was checked"


def test_an_interrupt_leaves_a_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Kit.check

    def interrupted(kit: Kit, item: Any) -> Any:
        if item.impl.op_name == "attention_backend":
            raise KeyboardInterrupt
        return check(kit, item)

    monkeypatch.setattr(Kit, "check", interrupted)
    names = [f"--op={name}" for name in ("gelu_and_mul", "attention_backend", "moe_sum")]
    file = tmp_path / "report.xml"
    assert main(["conformance", "vllm-fl-reference", *names, "--tokens", "1", "--junit", str(file)]) == 130
    out = " ".join(capsys.readouterr().out.split())
    assert "│ gelu_and_mul │ reference.torch │" in out
    assert "Interrupted; not checked: attention_backend reference.torch, moe_sum reference.torch" in out
    cases = {case.get("name"): case.find("failure") is not None for case in ET.parse(file).iter("testcase")}
    assert (cases["reference.torch[accuracy]"], cases["moe_sum reference.torch"]) == (False, True)


def test_the_mark_of_a_reference_based_operator_survives_wrapping() -> None:
    import functools

    class Backend:
        @reference_based
        def silu_and_mul(self, x: Any) -> Any:
            return x

    method = Backend().silu_and_mul

    @functools.wraps(method)
    def wrapper(x: Any) -> Any:
        return method(x)

    impl = OpImpl("silu_and_mul", "vendor.x", BackendImplKind.VENDOR, wrapper, vendor="x")
    assert check_implementation(impl, None, None).reference_based


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operators": ("rms_nrom",)}, "did you mean 'rms_norm'?"),
        ({"dtypes": ("float8",)}, "unknown dtype 'float8' (known: float32, float16, bfloat16); did you mean"),
        ({"checks": ("stride",)}, "did you mean 'strides'?"),
        ({"tokens": (1, -3)}, "tokens: -3 is not a number of tokens; give numbers from 0"),
    ],
)
def test_options_that_do_not_exist(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**fields)
    assert message in str(caught.value)


COMMAND = ["conformance", "reference", "--op", "attention_backend", "--op", "moe_sum", "--dtype", "float32"]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junit = tmp_path / "reports/junit.xml"
    assert main([*COMMAND, "--check", "accuracy", "--check", "empty", "--junit", str(junit)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == (
        "![vllm-fl conformance: 2 of 2 operators on cpu]"
        "(https://img.shields.io/badge/vllm--fl%20conformance-2%20of%202%20operators%20on%20cpu-brightgreen)"
    )
    assert "Checks: 3 passed, 1 skipped." in shown
    suite = ET.parse(junit).getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "0", "1")
    names = {(case.get("classname"), case.get("name")) for case in suite}
    assert ("vllm-fl-reference.moe_sum", "reference.torch[accuracy]") in names


def test_command_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--check", "accuracy", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["device"], answer["counts"]["passed"]) == (True, "cpu", 2)
    assert answer["badge"].startswith("![vllm-fl conformance: 2 of 2")
    assert {subject["checks"]["accuracy"]["status"] for subject in answer["subjects"]} == {"passed"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["acmee"], 2, "Error: no distribution or backend 'acmee' is installed ("),
        (
            ["--tokens", "1,x"],
            2,
            "Error: --tokens '1,x': 'x' is not a number.\nRemedy: Give numbers such as 1,33,4096.\n",
        ),
        (["--device", "nonsense"], 3, "Error: --device 'nonsense' cannot be used: "),
        (["reference", "--allow", "none.yaml"], 2, "Error: allow-list none.yaml: file 'none.yaml' does not exist"),
    ],
)
def test_command_mistakes(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *arguments]) == code
    assert capsys.readouterr().err.startswith(message)


def test_failures_gaps_and_stale_entries_in_a_report() -> None:
    right = reference("silu_and_mul")
    broken = bundle(silu_and_mul=lambda x: 2 * right(x))
    options = Options(operators=("silu_and_mul",), dtypes=("float32",), checks=("accuracy", "results"))
    report = run([broken], options)
    assert not report.ok
    assert badge(report).startswith("![vllm-fl conformance: 0 of 1 operators on cpu]")
    known = b"known_gaps: [{check: accuracy, reason: r}]"
    report = run([broken], options, AllowList.parse(known, "gaps.yaml"))
    assert report.ok
    assert "1 of 1 operators on cpu, 1 known gap]" in badge(report)
    assert "-yellow)" in badge(report)
    sound = bundle(silu_and_mul=lambda x: right(x))
    kit = Kit([sound], Options(), AllowList.parse(known, "gaps.yaml"))
    (item,) = [item for item in kit.items() if item.impl is not None]
    assert kit.check(item).status is Status.PASSED
    assert len(kit.stale()) == 1
    partial = Kit([sound], options, AllowList.parse(known, "gaps.yaml"))
    assert partial.check(item).status is Status.PASSED
    assert partial.stale() == [], "other operators were left out"


def reference(operator: str) -> Callable[..., Any]:
    """The reference implementation of an operator."""
    (found,) = [impl.fn for impl in find_bundles("reference")[0].implementations if impl.op_name == operator]
    return found


def test_plugin(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.fl_distribution("vllm-fl-reference")
        def test_conformance(fl_conformance):
            fl_conformance()
        """
    )
    options = ["--fl-op", "moe_sum", "--fl-dtype", "float32", "-p", "no:cacheprovider"]
    result = pytester.runpytest_inprocess(*options, "-k", "accuracy or graph or strides", "-v")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["*test_conformance?moe_sum reference.torch: accuracy? PASSED*"])


def test_plugin_reports_failures_and_known_gaps(pytester: pytest.Pytester) -> None:
    """What the reference's own conformance.yaml expects is an expected failure, and without the file a failure."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.fl_distribution("reference")
        def test_conformance(fl_conformance):
            fl_conformance()
        """
    )
    options = [
        "--fl-op",
        "chunk_gated_delta_rule",
        "--fl-dtype",
        "float32",
        "--fl-tokens",
        "1",
        "-p",
        "no:cacheprovider",
    ]
    pytester.runpytest_inprocess(*options, "-k", "compile").assert_outcomes(xfailed=1)
    pytester.makefile(".yaml", empty="known_gaps: []")
    result = pytester.runpytest_inprocess(*options, "-k", "compile", "--fl-allow", "empty.yaml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["chunk_gated_delta_rule reference.torch: compile: torch.compile takes it whole*"])


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("", "*asks for fl_conformance and does not say of which distribution; mark it*"),
        ("@pytest.mark.fl_distribution('acmee')", "*no distribution or backend 'acmee' is installed*"),
    ],
)
def test_plugin_mistakes(mark: str, message: str, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(f"import pytest\n{mark}\ndef test_it(fl_conformance): ...\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret != 0
    result.stdout.fnmatch_lines([message])


def test_plugin_is_light(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_it():\n    assert not {'torch', 'pydantic', 'yaml'} & set(sys.modules)\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
