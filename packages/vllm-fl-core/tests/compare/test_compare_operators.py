"""``vllm-fl compare OP``: all implementations on the catalogue's inputs; ``--replay``: on those of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vllm_fl.cli import main
from vllm_fl.compare import Dump, DumpError, NothingToCompareError, compare_operator, load_dump, replay
from vllm_fl.compare.dumps import save_dump
from vllm_fl.dispatch import OpManager
from vllm_fl.errors import UnknownOperatorError


def test_error_ulp_and_time(manager: OpManager) -> None:
    right, wrong = compare_operator("silu_and_mul", dtypes=[torch.float32], manager=manager)
    assert (right.implementation, right.dtype, right.outside, right.failed) == ("vendor.right", "float32", 0, "")
    assert right.worst is not None
    assert right.worst.max_ulp < 64
    assert right.time_us is not None
    assert wrong.worst is not None
    assert (wrong.outside, wrong.worst.outside, wrong.worst_case) == (1, 1, "large values")
    assert wrong.worst.max_abs == pytest.approx(64.0, rel=1e-3)


def test_command(manager: OpManager, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "silu_and_mul", "--dtype", "fp32", "--json"]) == 1
    results = {result["implementation"]: result for result in json.loads(capsys.readouterr().out)}
    assert results["vendor.right"]["outside"] == 0
    assert results["vendor.wrong"]["worst"]["within"] is False
    assert main(["compare", "silu_and_mul", "--dtype", "fp32"]) == 1
    out = capsys.readouterr().out
    assert "│ vendor.wrong   │ float32 │" in out


def test_what_an_implementation_refuses_or_fails_on(manager: OpManager) -> None:
    from vllm_fl.dispatch import BackendImplKind, OpImpl

    def narrow(x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 2:
            raise NotImplementedError("two dimensions only")
        raise ZeroDivisionError("no such luck")

    manager.registry.register_impl(
        OpImpl("silu_and_mul", "vendor.broken", BackendImplKind.VENDOR, narrow, vendor="broken", priority=1)
    )
    broken = compare_operator("silu_and_mul", dtypes=[torch.float32], manager=manager)[-1]
    assert broken.refused >= 1
    assert broken.cases == 0
    assert broken.failed.endswith(": ZeroDivisionError: no such luck")
    assert broken.time_us is None


def test_what_fails_on_the_timed_input_alone_is_a_result(manager: OpManager) -> None:
    from vllm_fl.dispatch import BackendImplKind, OpImpl

    def small(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 555:
            raise RuntimeError("too many tokens")
        return torch.nn.functional.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]

    manager.registry.register_impl(
        OpImpl("silu_and_mul", "vendor.small", BackendImplKind.VENDOR, small, vendor="small", priority=1)
    )
    found = compare_operator("silu_and_mul", dtypes=[torch.float32], tokens=555, manager=manager)[-1]
    assert found.failed == f"{found.timed_case}: RuntimeError: too many tokens"
    assert (found.outside, found.time_us) == (0, None)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["silu_and_mull"], 2, "there is no operator 'silu_and_mull'; did you mean 'silu_and_mul'? A model needs --a"),
        ([], 2, "Name an operator or a model."),
        (["silu_and_mul", "--bogus"], 2, "No such option: --bogus."),
        (["silu_and_mul", "--dtype", "bf61"], 2, "'bf61' is not a dtype ("),
        (["some/model", "--a", "reference"], 2, "A model is compared under two policies."),
        (["--replay", "nowhere.pt", "--devise", "cuda"], 2, "--replay takes --device and --json alone, not --devise."),
        (["--replay", "nowhere.pt"], 3, "There is no file nowhere.pt."),
        (["m", "--a", "reference", "--b", "flagos", "--steps", "7-3"], 2, "--steps: '7-3' in '7-3' ends before it"),
        (["m", "--a", "reference", "--b", "flagos", "--layers", "a"], 2, "--layers: 'a' is not a list of numbers; "),
        (
            ["m", "--a", "reference", "--b", "flagos", "--operators", "rmsnorm"],
            2,
            "--operators: unknown operator 'rmsnorm'; did you mean 'rms_norm'?",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_commands(
    arguments: list[str], code: int, message: str, manager: OpManager, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == code
    assert f"Error: {message}" in capsys.readouterr().err


def test_operators_that_nothing_is_known_about(manager: OpManager) -> None:
    from vllm_fl.dispatch import BackendImplKind, OpImpl

    with pytest.raises(UnknownOperatorError, match="did you mean 'rms_norm'"):
        compare_operator("rmsnorm", manager=manager)
    manager.registry.register_impl(OpImpl("mystery", "reference.torch", BackendImplKind.REFERENCE, lambda x: x))
    with pytest.raises(NothingToCompareError):
        compare_operator("mystery", manager=manager)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    inputs = {"x": torch.full((2, 6), 5.0)}
    return save_dump(Dump("silu_and_mul", "vendor.right", "vendor.wrong", 7, "model.layers.1.mlp", 0, inputs), tmp_path)


def test_replay(manager: OpManager, dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dump.name == "silu_and_mul-vendor.right-vendor.wrong-step7-rank0.pt"
    right, wrong = replay(load_dump(dump), manager=manager)
    assert (right.implementation, right.within) == ("vendor.right", True)
    assert (wrong.implementation, wrong.within) == ("vendor.wrong", False)
    assert wrong.differences[0].index == (1, 2)
    assert main(["compare", "--replay", str(dump)]) == 1
    out = capsys.readouterr().out
    assert "silu_and_mul on the inputs of step 7, model.layers.1.mlp, rank 0, against vendor.right" in out
    assert "result 0 is outside of the tolerance in 1 of 6 entries" in out
    assert main(["compare", "--replay", str(dump), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1]["differences"][0]["index"] == [1, 2]


def test_replay_of_one_implementation_with_two_values(manager: OpManager) -> None:
    from vllm_fl.dispatch import BackendImplKind, OpImpl
    from vllm_fl.dispatch.parameters import Parameter

    def scaled(x: torch.Tensor, *, factor: int = 1) -> torch.Tensor:
        return x[..., ::2] * factor

    factor = Parameter("factor", (1, 2, 3), 1)
    manager.registry.register_impl(
        OpImpl("silu_and_mul", "vendor.scaled", BackendImplKind.VENDOR, scaled, vendor="scaled", parameters=(factor,))
    )
    names = [f"vendor.scaled(factor={value})" for value in (2, 3, 7)]
    inputs = {"x": torch.ones(2, 4)}
    first, second, *_ = replay(Dump("silu_and_mul", *names[:2], 1, "", 0, inputs), manager=manager)
    assert [first.implementation, second.implementation] == names[:2]
    assert (second.within, second.differences[0].max_abs) == (False, 1.0)
    found = {
        r.implementation: r for r in replay(Dump("silu_and_mul", names[0], names[2], 1, "", 0, inputs), manager=manager)
    }
    assert found[names[2]].failed == "DumpError: vendor.scaled has no value 7 of a parameter factor here"


def test_files_that_are_no_dumps(manager: OpManager, tmp_path: Path) -> None:
    for name, write in {
        "text.pt": lambda path: path.write_text("plain"),
        "tensor.pt": lambda path: torch.save(torch.ones(2), path),
        "other.pt": lambda path: torch.save({"operator": "rms_norm"}, path),
    }.items():
        write(tmp_path / name)
        with pytest.raises(DumpError) as caught:
            load_dump(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name} holds no inputs of an operator (")
    with pytest.raises(UnknownOperatorError):
        replay(Dump("mystery", "a", "b", 1, "", 0, {}), manager=manager)
    with pytest.raises(DumpError, match="no implementation of rms_norm runs on these inputs here: none is available"):
        replay(Dump("rms_norm", "a", "b", 1, "", 0, {}), manager=manager)
