"""A chip vendor's distribution as the vendor would write it: three steps, outside this repository.

The class, the names of the methods, their signatures and the calls are those that backends for vllm-plugin-FL have. The
"vendor library" is a module of the distribution that computes with PyTorch.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-vllm-backend"
version = "1.2.3"
dependencies = ["vllm-fl-core"]

[project.entry-points."vllm_fl.plugin"]
acme = "acme_vllm.register_ops:register_builtins"

[tool.hatch.build.targets.wheel]
packages = ["src/acme_vllm", "src/acme_runtime"]
""",
    "src/acme_runtime/__init__.py": '''
"""The vendor's library: kernels, and a switch to take the card away."""
import os

if os.environ.get("ACME_NO_CARD"):
    raise ImportError("libacme: no card found")


def swiglu(x):
    gate, value = x.chunk(2, dim=-1)
    return gate * gate.sigmoid() * value


def add_norm(x, residual, weight, epsilon):
    total = x if residual is None else x + residual
    scale = (total.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (total.float() * scale).to(x.dtype) * weight, total


def rotate(x, cos, sin, halves):
    half = cos.shape[-1]
    if halves:
        first, second = x[..., :half], x[..., half : 2 * half]
    else:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    out = x.clone()
    if halves:
        out[..., :half], out[..., half : 2 * half] = first * cos - second * sin, second * cos + first * sin
    else:
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = first * cos - second * sin, second * cos + first * sin
    return out
''',
    "src/acme_vllm/__init__.py": "",
    # Step 1: the backend class.
    "src/acme_vllm/acme.py": """
from vllm_fl.dispatch.backends.base import Backend


class AcmeBackend(Backend):
    _available = None

    @property
    def name(self) -> str:
        return "acme"

    @property
    def vendor(self) -> str:
        return "acme"

    def is_available(self) -> bool:
        if AcmeBackend._available is None:
            try:
                import acme_runtime  # noqa: F401

                AcmeBackend._available = True
            except ImportError:
                AcmeBackend._available = False
        return AcmeBackend._available

    def silu_and_mul(self, x):
        from .impl.activation import silu_and_mul_acme

        return silu_and_mul_acme(x)

    def rms_norm(self, x, residual, weight, epsilon):
        from .impl.normalization import rms_norm_acme

        return rms_norm_acme(x, residual, weight, epsilon)

    def rotary_embedding(self, query, key, cos, sin, position_ids, is_neox_style):
        from .impl.rotary import rotary_embedding_acme

        return rotary_embedding_acme(query, key, cos, sin, position_ids, is_neox_style)

    def attention_backend(self):
        from .impl.attention import AcmeAttentionBackend

        return f"{AcmeAttentionBackend.__module__}:{AcmeAttentionBackend.__name__}"
""",
    # Step 2: the operators.
    "src/acme_vllm/impl/__init__.py": "",
    "src/acme_vllm/impl/activation.py": """
import torch


def silu_and_mul_acme(x: torch.Tensor) -> torch.Tensor:
    import acme_runtime

    return acme_runtime.swiglu(x)
""",
    "src/acme_vllm/impl/normalization.py": """
def rms_norm_acme(x, residual, weight, epsilon):
    import acme_runtime

    out, total = acme_runtime.add_norm(x, residual, weight, epsilon)
    return out if residual is None else (out, total)
""",
    "src/acme_vllm/impl/rotary.py": """
def rotary_embedding_acme(query, key, cos, sin, position_ids, is_neox_style):
    import acme_runtime

    cos, sin = cos[position_ids], sin[position_ids]
    return tuple(acme_runtime.rotate(x, cos, sin, is_neox_style) for x in (query, key))
""",
    "src/acme_vllm/impl/attention.py": '''
class AcmeAttentionBackend:
    """Stands for a vLLM AttentionBackend."""
''',
    # Step 3: registration.
    "src/acme_vllm/register_ops.py": """
import functools

from vllm_fl.dispatch.types import BackendImplKind, BackendPriority, OpImpl


def _bind_is_available(fn, is_available_fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    wrapper._is_available = is_available_fn
    return wrapper


def register_builtins(registry) -> None:
    from .acme import AcmeBackend

    backend = AcmeBackend()
    is_avail = backend.is_available
    impls = [
        OpImpl(
            op_name="silu_and_mul",
            impl_id="vendor.acme",
            kind=BackendImplKind.VENDOR,
            fn=_bind_is_available(backend.silu_and_mul, is_avail),
            vendor="acme",
            priority=BackendPriority.VENDOR,
        ),
        OpImpl(
            op_name="rms_norm",
            impl_id="vendor.acme",
            kind=BackendImplKind.VENDOR,
            fn=_bind_is_available(backend.rms_norm, is_avail),
            vendor="acme",
            priority=BackendPriority.VENDOR,
        ),
        OpImpl(
            op_name="rotary_embedding",
            impl_id="vendor.acme",
            kind=BackendImplKind.VENDOR,
            fn=_bind_is_available(backend.rotary_embedding, is_avail),
            vendor="acme",
            priority=BackendPriority.VENDOR,
        ),
        OpImpl(
            op_name="attention_backend",
            impl_id="vendor.acme",
            kind=BackendImplKind.VENDOR,
            fn=_bind_is_available(backend.attention_backend, is_avail),
            vendor="acme",
            priority=BackendPriority.VENDOR,
        ),
    ]
    registry.register_many(impls)


def register_the_short_way(registry) -> None:
    from vllm_fl.dispatch import register_backend

    from .acme import AcmeBackend

    register_backend(registry, AcmeBackend())
""",
}


def write(folder: Path) -> None:
    """Write the source tree of the distribution."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.lstrip("\n"), encoding="utf-8")
