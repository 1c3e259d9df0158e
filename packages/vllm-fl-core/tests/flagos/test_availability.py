"""What the backend of kind flagos registers, what of it can run, and the reasons where it cannot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_inputs import DEVICE, maker

from vllm_fl.catalog import CATALOG
from vllm_fl.config import reset_settings
from vllm_fl.dispatch import OpManager, OpRegistry
from vllm_fl.dispatch.types import Availability, BackendImplKind
from vllm_fl.errors import NoImplementationError
from vllm_fl.flagos import availability, register
from vllm_fl.flagos.availability import INSTALL_FLAGGEMS, TritonInfo
from vllm_fl.flagos.plugin import PLUGIN
from vllm_fl.flagos.register import FLAGGEMS_OPERATORS, TRITON_OPERATORS
from vllm_fl.plugins import PlatformChoice, load_object, reset_platform

NO_DRIVER = "no active Triton driver (triton 3.9.0 finds no device)"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No configuration of the machine that runs the tests."""
    for name in ("VLLM_FL_PLATFORM", "VLLM_FL_CONFIG", "USE_FLAGGEMS"):
        monkeypatch.delenv(name, raising=False)
    reset_settings()
    reset_platform()
    yield
    reset_settings()
    reset_platform()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that does not run in the interpreter, whatever this one does."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def triton(version: str, *drivers: str, distribution: str = "", is_flagtree: bool = False) -> TritonInfo:
    return TritonInfo(version, distribution or f"triton {version}", is_flagtree, drivers)


def having(monkeypatch: pytest.MonkeyPatch, info: TritonInfo | None, **versions: str) -> None:
    """As if this Triton and these versions of other distributions were installed; sqlalchemy is by default."""
    installed = {"sqlalchemy": "2.0.48", **versions}
    monkeypatch.setattr(availability, "triton_info", lambda: info)
    monkeypatch.setattr(availability, "_version", lambda name: installed.get(name.replace("-", "_")))
    monkeypatch.setattr(
        "vllm_fl.plugins.requirements.version", lambda name: availability._version(name) or _missing(name)
    )


def _missing(name: str) -> str:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(name)


def test_registering_loads_nothing_heavy() -> None:
    code = (
        "import json, sys\n"
        "from vllm_fl.dispatch import OpRegistry\n"
        "from vllm_fl.flagos.plugin import PLUGIN\n"
        "from vllm_fl.plugins import load_object\n"
        "registry = OpRegistry()\n"
        "load_object(PLUGIN.register)(registry)\n"
        "assert registry.list_operators()\n"
        "print(json.dumps(sorted({'torch', 'triton', 'flag_gems', 'vllm'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_plugin_is_no_platform() -> None:
    assert (PLUGIN.name, PLUGIN.kind, PLUGIN.platform, PLUGIN.probe) == ("flagos", BackendImplKind.DEFAULT, None, None)


def test_every_operator_has_a_kernel() -> None:
    assert set(TRITON_OPERATORS) == set(CATALOG)


def test_the_document_says_which_operators_there_are() -> None:
    """The table of operators in docs/flaggems.md: the second column for our kernels, the third for FlagGems."""
    text = (Path(__file__).parents[4] / "docs" / "flaggems.md").read_text(encoding="utf-8")
    section = text.partition("\n## Which operators\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "| " in line]
    table = {name: row[1:] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert set(table) == set(CATALOG)
    assert {name for name, cells in table.items() if cells[0].startswith("yes")} == set(TRITON_OPERATORS)
    assert {name for name, cells in table.items() if cells[1].startswith("yes")} == set(FLAGGEMS_OPERATORS)


@pytest.mark.parametrize("name", TRITON_OPERATORS)
def test_kernel_is_where_it_is_said_to_be(name: str) -> None:
    function = load_object(f"vllm_fl.flagos.{TRITON_OPERATORS[name]}:{name}")
    assert CATALOG[name].mismatch(function) is None


@pytest.mark.parametrize("name", FLAGGEMS_OPERATORS)
def test_wrapper_is_where_it_is_said_to_be(name: str) -> None:
    assert CATALOG[name].mismatch(load_object(f"vllm_fl.flagos.flaggems:{name}")) is None


def test_priorities_and_kinds() -> None:
    registry = OpRegistry()
    register.register(registry)
    impls = registry.get_implementations("rms_norm")
    assert [(impl.impl_id, impl.kind.value, impl.priority) for impl in impls] == [
        ("flagos.triton", "flagos", 150),
        ("flagos.flaggems", "flagos", 140),
    ]
    assert all(impl.opaque for impl in impls)


@pytest.mark.usefixtures("compiled")
def test_without_a_device_everything_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, triton("3.9.0"))
    registry = OpRegistry()
    register.register(registry)
    reasons = {
        impl.impl_id: impl.availability()
        for name in registry.list_operators()
        for impl in registry.get_implementations(name)
    }
    assert reasons == {
        "flagos.triton": Availability(False, NO_DRIVER),
        "flagos.flaggems": Availability(False, f"FlagGems is not installed; {INSTALL_FLAGGEMS}"),
    }


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (None, "Triton is not installed; pip install triton"),
        (triton("3.5.1", "acme"), "triton 3.5.1 is older than Triton 3.6; pip install 'triton>=3.6'"),
        (
            triton("3.5.0", "acme", distribution="flagtree 0.5.0", is_flagtree=True),
            "flagtree 0.5.0 is older than Triton 3.6; pip install 'triton>=3.6'",
        ),
        (triton("3.9.0"), NO_DRIVER),
    ],
    ids=["none", "old", "old FlagTree", "no driver"],
)
def test_triton_kernels_cannot_run(monkeypatch: pytest.MonkeyPatch, info: TritonInfo | None, reason: str) -> None:
    having(monkeypatch, info)
    assert availability.triton_kernels() == Availability(False, reason)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0+git1234", "3.12.0", "4.0.0"])
def test_triton_kernels_can_run(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    having(monkeypatch, triton(version, "acme"))
    monkeypatch.setattr("vllm_fl.plugins.resolve_platform", lambda: PlatformChoice(None, "none"))
    assert availability.triton_kernels() == Availability(True)


@pytest.mark.usefixtures("compiled")
def test_a_broken_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libtriton.so: cannot open shared object file")

    monkeypatch.setattr(availability, "triton_info", fail)
    assert availability.triton_kernels().reason == (
        "importing Triton raised OSError: libtriton.so: cannot open shared object file; reinstall triton"
    )


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("drivers", "runs"), [(("acme",), False), (("acme", "cpu"), True)])
def test_platform_and_driver_must_be_the_same_device(
    monkeypatch: pytest.MonkeyPatch, drivers: tuple[str, ...], runs: bool
) -> None:
    """A CPU platform that was asked for, on a machine with a device."""
    plugin = load_object("vllm_fl_reference.plugin:PLUGIN")
    monkeypatch.setattr("vllm_fl.plugins.resolve_platform", lambda: PlatformChoice(plugin, "asked for"))
    having(monkeypatch, triton("3.9.0", *drivers))
    answer = availability.triton_kernels()
    assert bool(answer) is runs
    assert runs or answer.reason == "platform 'reference' computes on the CPU, the active Triton driver is acme"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("version", "raw", "pointwise"),
    [
        ("3.6.0", "", ""),
        ("3.7.1", "", ""),
        ("3.8.0", "", "its generated elementwise kernels need Triton below 3.8, triton 3.8.0 is installed"),
        ("3.9.0", "", "its generated elementwise kernels need Triton below 3.8, triton 3.9.0 is installed"),
        *((v, f"not tried with Triton above 3.9, triton {v} is installed", None) for v in ("3.10.0", "4.0.0")),
    ],
)
def test_flaggems_and_triton(monkeypatch: pytest.MonkeyPatch, version: str, raw: str, pointwise: str | None) -> None:
    having(monkeypatch, triton(version, "acme"), flag_gems="5.0.2")
    monkeypatch.setattr("vllm_fl.plugins.resolve_platform", lambda: PlatformChoice(None, "none"))
    for probe, reason in ((availability.flaggems_raw, raw), (availability.flaggems_pointwise, pointwise)):
        answer = probe()
        wanted = raw if reason is None else reason
        assert bool(answer) is not bool(wanted)
        assert answer.reason.endswith(wanted)
        assert not wanted or answer.reason.startswith("FlagGems")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("", "sqlalchemy is not installed"),
        ("1.4.0", "sqlalchemy 1.4.0 is installed"),
    ],
    ids=["missing", "old"],
)
def test_flaggems_needs_sqlalchemy(monkeypatch: pytest.MonkeyPatch, version: str, problem: str) -> None:
    having(monkeypatch, triton("3.6.0", "acme"), flag_gems="5.0.2", sqlalchemy=version)
    assert availability.flaggems_raw().reason == (
        f"FlagGems 5.0.2: it needs sqlalchemy>=2.0.48, and {problem}; pip install 'sqlalchemy>=2.0.48'"
    )


@pytest.mark.usefixtures("compiled")
def test_flaggems_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, triton("3.9.0"), flag_gems="5.0.2")
    assert availability.flaggems_raw() == Availability(False, NO_DRIVER)


def test_flaggems_does_not_run_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    having(monkeypatch, triton("3.9.0"), flag_gems="5.0.2")
    assert availability.flaggems_raw().reason == "FlagGems does not run in Triton's interpreter (TRITON_INTERPRET)"


def test_flagtree_is_told_by_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_version", lambda name: "0.6.1" if name == "flagtree" else None)
    info = availability.triton_info()
    assert info is not None
    assert info.is_flagtree
    assert str(info).startswith(f"flagtree 0.6.1 (Triton {info.version}), ")


def test_triton_of_this_environment() -> None:
    import triton as module

    info = availability.triton_info()
    assert info is not None
    assert (info.version, info.is_flagtree) == (module.__version__, False)
    assert info.distribution == f"triton {module.__version__}"
    assert bool(info.drivers) is torch.accelerator.is_available()
    assert ".".join(map(str, info.release)) == ".".join(module.__version__.split(".")[:2])


@pytest.mark.usefixtures("compiled")
def test_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, triton("3.9.0", "acme"), flag_gems="5.0.2")
    monkeypatch.setattr("vllm_fl.plugins.resolve_platform", lambda: PlatformChoice(None, "none"))
    assert availability.describe() == [
        ("Triton", "triton 3.9.0, driver acme"),
        ("FlagGems", "5.0.2"),
        ("Triton kernels", "yes"),
        ("FlagGems, hand-written kernels", "yes"),
        (
            "FlagGems, elementwise kernels",
            "no: FlagGems: its generated elementwise kernels need Triton below 3.8, triton 3.9.0 is installed",
        ),
        (
            "FlagGems, ATen functions",
            "no: FlagGems: most of its ATen functions need Triton below 3.8, triton 3.9.0 is installed",
        ),
    ]


def manager() -> OpManager:
    made = OpManager(register_builtins=False)
    register.register(made.registry)
    return made


def test_dispatch_calls_the_kernel(device: str) -> None:
    x = maker().normal(3, 32)
    ours = manager()
    got = ours.call("silu_and_mul", x)
    torch.testing.assert_close(got, torch.nn.functional.silu(x[:, :16]) * x[:, 16:])
    assert ours.get_selected_impl_id("silu_and_mul") == "flagos.triton"


def test_the_interpreter_gets_no_bfloat16(device: str) -> None:
    if DEVICE != "cpu":
        pytest.skip("the device computes bfloat16")
    with pytest.raises(NoImplementationError) as caught:
        manager().call("silu_and_mul", maker(torch.bfloat16).normal(3, 32))
    assert "  flagos.triton: Triton's interpreter computes bfloat16 wrongly" in str(caught.value)


def test_kernels_are_opaque_to_the_compiler(device: str) -> None:
    """One graph without a break, whose nodes are the torch.library operators; those that write tell so."""
    ours = manager()
    norm, write = ours.bind("rms_norm"), ours.bind("reshape_and_cache")
    make = maker()
    x, weight, cache = make.normal(4, 2, 16), make.normal(16), make.normal(2, 2, 2, 4, 16)
    slots = make.permutation(8, dtype=torch.int64)[:4]
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def step(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y, total = norm.fn(x, x, weight, 1e-6)
        write.fn(y, total, cache[0], cache[1], slots)
        return y

    written = cache.clone()
    got = torch.compile(step, fullgraph=True, backend=backend)(x, written)
    want = step(x, cache)
    assert torch.equal(got, want)
    assert torch.equal(written, cache)
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [t for t in targets if t.startswith("vllm_fl.")] == [
        f"vllm_fl.{op.opaque.name}.default" for op in (norm, write)
    ]
