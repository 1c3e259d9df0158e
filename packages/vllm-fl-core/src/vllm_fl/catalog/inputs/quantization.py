"""Inputs of the quantisation operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_fl.catalog.spec import Case, InputMaker

if TYPE_CHECKING:
    from torch import Tensor


def per_token_group_quant_fp8(maker: InputMaker) -> Iterator[Case]:
    for name, shape, group_size in (
        ("regular", (7, 256), 128),
        ("one token", (1, 2048), 128),
        ("one group", (5, 64), 64),
        ("small groups", (3, 4, 96), 32),
        ("large", (60, 1536), 128),
        ("no tokens", (0, 256), 128),
    ):
        x = maker.normal(*shape)
        for column_major in (False, True):
            for ue8m0 in (False, True):
                kind = f"{name}{', column major' if column_major else ''}{', powers of two' if ue8m0 else ''}"
                yield Case(kind, (x, group_size, 1e-10, column_major, ue8m0))
    yield Case("zeros", (maker.full(0.0, 3, 128), 64))
    yield Case("exact powers of two", (maker.full(448.0, 2, 128), 64, 1e-10, False, True))
    yield Case("large epsilon", (maker.normal(3, 128, scale=0.01), 64, 1.0))
    yield Case("large values", (maker.normal(3, 128, scale=1000.0), 64))
    yield Case("rows of a wider tensor", (maker.normal(4, 300)[:, :128], 64))


def scaled_mm(maker: InputMaker) -> Iterator[Case]:
    import torch

    out_dtype = str(maker.dtype).removeprefix("torch.")
    scale_dtype = torch.promote_types(maker.dtype, torch.float32)

    def scales(*shape: int) -> Tensor:
        return maker.uniform(0.002, 0.01, *shape, dtype=scale_dtype)

    def matrix(kind: torch.dtype, *shape: int) -> Tensor:
        if kind == torch.int8:
            return maker.integers(-127, 128, *shape, dtype=kind)
        return maker.normal(*shape, scale=30.0, dtype=kind)

    for kind in (torch.float8_e4m3fn, torch.int8):
        label = str(kind).removeprefix("torch.")
        for name, (m, k, n) in {
            "regular": (16, 256, 128),
            "one row": (1, 128, 256),
            "odd": (5, 384, 144),
            "large": (70, 512, 320),
            "no rows": (0, 256, 128),
        }.items():
            a, b, bias = matrix(kind, m, k), matrix(kind, n, k).t(), maker.normal(n)
            yield Case(f"{name}, tensor scales, {label}", (a, b, scales(1), scales(1), out_dtype))
            yield Case(f"{name}, row and column scales, {label}", (a, b, scales(m, 1), scales(1, n), out_dtype))
            yield Case(f"{name}, tensor and column, bias, {label}", (a, b, scales(1), scales(1, n), out_dtype, bias))
            if kind != torch.int8:
                blocks = scales(m, k // 128), scales(k // 128, -(-n // 128))
                yield Case(f"{name}, blocks, {label}", (a, b, *blocks, out_dtype))
        row_major = matrix(kind, 64, 48)
        yield Case(f"row-major b, {label}", (matrix(kind, 8, 64), row_major, scales(8, 1), scales(1, 48), out_dtype))
