"""A backend in a distribution of its own: built, installed, found, selected, called. Each test is a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import acme_distribution
import pytest


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the distribution's wheel is installed."""
    source = tmp_path_factory.mktemp("acme-vllm-backend")
    acme_distribution.write(source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "dist"]
    _check(subprocess.run(build, cwd=source, capture_output=True, text=True, timeout=300, check=False))
    (wheel,) = (source / "dist").glob("*.whl")
    target = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "--target", str(target)]
    install = [sys.executable, "-m", "pip", "install", *options, str(wheel)]
    _check(subprocess.run(install, capture_output=True, text=True, timeout=300, check=False))
    return target


def _check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


def run(site: Path, code: str, **environ: str) -> tuple[str, str]:
    """Standard output and error of a process that has the distribution."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_FL_", "ACME_"))}
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**clean, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    _check(done)
    return done.stdout, done.stderr


def test_registration(site: Path) -> None:
    out, err = run(
        site,
        """
        from vllm_fl.dispatch import get_default_manager

        manager = get_default_manager()
        manager.ensure_initialized()
        snap = manager.registry.snapshot()
        for op_name, impls in snap.impls_by_op.items():
            for impl in impls:
                if impl.vendor == "acme":
                    print(f"{op_name}: {impl.impl_id}, available={impl.is_available()}")
        """,
    )
    assert sorted(out.splitlines()) == [
        "attention_backend: vendor.acme, available=True",
        "rms_norm: vendor.acme, available=True",
        "rotary_embedding: vendor.acme, available=True",
        "silu_and_mul: vendor.acme, available=True",
    ]
    assert "acme" not in err


def test_calls(site: Path) -> None:
    run(
        site,
        """
        import torch
        from vllm_fl.dispatch import call_op, get_default_manager, resolve_op

        x = torch.randn(2, 128)
        result = call_op("silu_and_mul", x)
        assert result.shape == (2, 64)
        exact = x.double()
        expected = torch.nn.functional.silu(exact[:, :64]) * exact[:, 64:]
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
        fn = resolve_op("silu_and_mul")
        assert fn.__wrapped__.__self__.vendor == "acme"

        weight, residual = torch.rand(128), torch.randn(2, 128)
        out, total = call_op("rms_norm", x, residual, weight, 1e-6)
        exact = x.double() + residual.double()
        expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        assert call_op("rms_norm", x, None, weight, 1e-6).shape == x.shape

        angles = torch.arange(10)[:, None] / 10.0 ** torch.arange(4)
        query, key, positions = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.tensor([0, 4, 9])
        q, k = call_op("rotary_embedding", query, key, angles.cos(), angles.sin(), positions, True)
        turned = torch.view_as_complex(torch.stack((query[..., :4], query[..., 4:]), -1).double())
        turned = turned * torch.exp(1j * angles[positions].double())[:, None]
        torch.testing.assert_close(q.double(), torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-5)
        assert k.shape == key.shape

        assert call_op("attention_backend") == "acme_vllm.impl.attention:AcmeAttentionBackend"
        assert get_default_manager().get_selected_impl_id("attention_backend") == "vendor.acme"
        """,
    )


def test_compiled(site: Path) -> None:
    run(
        site,
        """
        import torch
        from vllm_fl.dispatch import call_op

        x = torch.randn(2, 128)
        compiled = torch.compile(lambda x: call_op("silu_and_mul", x), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), call_op("silu_and_mul", x))
        """,
    )


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"ACME_NO_CARD": "1"}, "not available: its availability check says no"),
        ({"VLLM_FL_DENY_VENDORS": "acme"}, "vendor 'acme' is denied (environment variable VLLM_FL_DENY_VENDORS)"),
        (
            {"VLLM_FL_PER_OP": "silu_and_mul=reference"},
            "no token of reference matches (environment variable VLLM_FL_PER_OP)",
        ),
    ],
    ids=["no card", "denied", "other order"],
)
def test_rejected_with_a_reason(environ: dict[str, str], reason: str, site: Path) -> None:
    out, _ = run(
        site,
        """
        from vllm_fl.dispatch import get_default_manager

        print(get_default_manager().selection("silu_and_mul").explain())
        """,
        **environ,
    )
    assert f"- vendor.acme rejected: {reason}" in " ".join(out.split())


def test_debug_table(site: Path) -> None:
    _, err = run(
        site,
        "from vllm_fl.dispatch import get_default_manager; get_default_manager().ensure_initialized()",
        VLLM_FL_DISPATCH_DEBUG="1",
    )
    for op in ("silu_and_mul(x)", "rms_norm(x, residual, weight, epsilon)"):
        assert f"{op}: vendor.acme" in err


def test_the_short_way(site: Path, tmp_path: Path) -> None:
    """``register_backend`` derives the same implementations from the same class."""
    out, _ = run(
        site,
        """
        from acme_vllm.register_ops import register_builtins, register_the_short_way
        from vllm_fl.dispatch import OpRegistry

        long, short = OpRegistry(), OpRegistry()
        register_builtins(long)
        register_the_short_way(short)
        for registry in (long, short):
            print(sorted(
                (op, impl.impl_id, str(impl.kind), impl.vendor, impl.priority, impl.is_available())
                for op, impls in registry.snapshot().impls_by_op.items() for impl in impls
            ))
        """,
    )
    first, second = out.splitlines()
    assert first == second
    assert first.count("vendor.acme") == 4


def test_distribution_that_breaks_leaves_the_rest(site: Path, tmp_path: Path) -> None:
    """The same distribution, broken: one warning that names it, and a process that works."""
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(site, broken)
    (broken / "acme_vllm" / "acme.py").write_text("import acme_driver_that_is_missing\n")
    out, err = run(
        broken,
        """
        from vllm_fl.dispatch import get_default_manager, plugin_reports

        manager = get_default_manager()
        manager.ensure_initialized()
        print([report.name for report in plugin_reports() if not report.ok])
        found = [impl.vendor for impls in manager.registry.snapshot().impls_by_op.values() for impl in impls]
        print("acme" in found)
        """,
    )
    assert out.splitlines() == ["['acme']", "False"]
    assert (
        "entry_point 'acme' of acme-vllm-backend is left out, none of its implementations is registered:"
        " ModuleNotFoundError: No module named 'acme_driver_that_is_missing'; install what it imports, or remove it"
        " (pip uninstall acme-vllm-backend)" in err
    )
