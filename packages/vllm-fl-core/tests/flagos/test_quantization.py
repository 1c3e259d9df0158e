"""Quantisation to float8 and scaled products against the reference."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import DTYPE_IDS, DTYPES, assert_close, check, cut, maker, precise, reference

from vllm_fl.catalog import CATALOG
from vllm_fl.flagos.kernels import quantization
from vllm_fl.flagos.kernels.quantization import per_token_group_quant_fp8, scaled_mm

FLOAT8 = torch.float8_e4m3fn
WITH_DTYPES = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)


def check_quantized(x: torch.Tensor, group: int, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as the reference's; numbers the same, but for one step of float8 where x / scale lies between two."""
    want, want_scales = reference("per_token_group_quant_fp8")(precise(x), group, *rest)
    got, scales = per_token_group_quant_fp8(x, group, *rest)
    shapes = CATALOG["per_token_group_quant_fp8"].fake(x, group, *rest)
    assert [(t.shape, t.stride(), t.dtype) for t in (got, scales)] == [(t.shape, t.stride(), t.dtype) for t in shapes]
    assert_close(scales, want_scales, lambda dtype: (1e-6, 0.0))
    got_numbers, numbers = got.cpu().float(), want.float()
    torch.testing.assert_close(got_numbers, numbers, rtol=2**-3, atol=2**-9)
    assert (got_numbers != numbers).sum() <= 0.005 * numbers.numel()
    return got, scales


@WITH_DTYPES
@pytest.mark.parametrize(("shape", "group"), [((3, 64), 16), ((2, 256), 128), ((2, 3, 40), 8), ((5, 12), 12)], ids=str)
@pytest.mark.parametrize("power_of_2", [False, True], ids=["scale", "power of 2"])
def test_quantize(device: str, dtype: torch.dtype, shape: tuple[int, ...], group: int, power_of_2: bool) -> None:
    check_quantized(maker(dtype).normal(*shape, scale=5.0), group, 1e-10, False, power_of_2)


@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_quantize_with_scales_by_column(device: str, tokens: int) -> None:
    check_quantized(maker().normal(tokens, 64), 16, 1e-10, True, False)


def test_quantize_rows_of_a_wider_tensor(device: str) -> None:
    check_quantized(cut(maker().normal(4, 64), 100, start=20), 32)


def test_quantize_zeros_and_one_large_value(device: str) -> None:
    x = torch.zeros(2, 32, device=device)
    x[1, 3] = 1e30
    got, scales = check_quantized(x, 16)
    assert got.float().cpu()[1, 3] == 448.0
    assert torch.allclose(scales.cpu()[0], torch.full((2,), 1e-10 / 448))


def test_powers_of_two_stay(device: str) -> None:
    x = torch.tensor([[448.0, 1.0], [449.0, 1.0], [448.0 / 1024, 0.0]], device=device)
    _, scales = check_quantized(x, 2, 1e-10, False, True)
    assert scales.flatten().tolist() == [1.0, 2.0, 2.0**-10]


def test_rounds_to_the_nearest_and_to_even(device: str) -> None:
    """Every float8 number, every middle between two, and the float32 numbers beside the middles."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FLOAT8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    infinity = torch.tensor(float("inf"))
    x = torch.cat((numbers, middles, middles.nextafter(infinity), middles.nextafter(-infinity)))
    x = torch.cat((x, -x)).to(device)
    assert x.abs().max() == 448.0  # so that the scale is 1
    got, scales = per_token_group_quant_fp8(x[None], x.numel())
    assert scales.item() == 1.0
    assert torch.equal(got[0].view(torch.uint8), x.to(FLOAT8).view(torch.uint8))


def test_group_must_divide(device: str) -> None:
    with pytest.raises(ValueError) as caught:
        per_token_group_quant_fp8(torch.zeros(2, 10, device=device), 4)
    assert str(caught.value) == "group_size: 4 does not divide the last dimension, 10"


def operands(dtype: torch.dtype, m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a [m, k] and b [k, n], the latter the transpose of a weight."""
    make = maker()
    if dtype == torch.int8:
        a, weight = make.integers(-127, 128, m, k, dtype=dtype), make.integers(-127, 128, n, k, dtype=dtype)
    else:
        a, weight = make.normal(m, k, dtype=dtype), make.normal(n, k, dtype=dtype)
    return a, weight.t()


@pytest.mark.parametrize("dtype", [FLOAT8, torch.int8], ids=["float8", "int8"])
@pytest.mark.parametrize("scales", ["tensors", "rows and columns", "row and tensor", "tensor and columns"])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 16), (5, 160, 70), (33, 48, 40)], ids=str)
def test_scaled_mm(device: str, dtype: torch.dtype, scales: str, m: int, k: int, n: int) -> None:
    make = maker(seed=1)
    a, b = operands(dtype, m, k, n)
    first, _, second = scales.partition(" and ")
    scale_a = make.uniform(0.01, 0.02, *((m, 1) if first.startswith("row") else (1,)))
    scale_b = make.uniform(0.01, 0.02, *((1, n) if second == "columns" else (1,)))
    check(scaled_mm, "scaled_mm", a, b, scale_a, scale_b, "float32", None, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [FLOAT8, torch.int8], ids=["float8", "int8"])
@pytest.mark.parametrize("m", [1, 20])
@pytest.mark.parametrize("by_column", [False, True], ids=["row major", "column major"])
def test_groups_and_blocks(device: str, dtype: torch.dtype, m: int, by_column: bool) -> None:
    make = maker(seed=1)
    a, b = operands(dtype, m, 192, 80)
    scale_a = make.uniform(0.01, 0.02, 3, m).t() if by_column else make.uniform(0.01, 0.02, m, 3)
    # 80 columns in blocks of 64: the last one is narrower.
    scale_b = make.uniform(0.01, 0.02, 2, 3).t()
    check(scaled_mm, "scaled_mm", a, b, scale_a, scale_b, "float32", None, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("out_dtype", ["float32", "float16"])
def test_bias_and_output(device: str, out_dtype: str) -> None:
    make = maker(seed=1)
    a, b = operands(FLOAT8, 4, 64, 24)
    scale = make.full(0.02, 1)
    check(scaled_mm, "scaled_mm", a, b, scale, scale, out_dtype, make.normal(24), rtol=1e-3, atol=1e-3)


def test_row_major_b_and_rows_of_a_wider_a(device: str) -> None:
    a, b = operands(torch.int8, 5, 64, 24)
    scale = maker().full(0.01, 1)
    check(scaled_mm, "scaled_mm", cut(a, 80), b.contiguous(), scale, scale, "float32", None, rtol=1e-5)


def test_many_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one band of tiles."""
    monkeypatch.setattr(quantization, "_tile", lambda m: (16, 16, 4, 2))
    a, b = operands(torch.int8, 16 * 9 + 3, 32, 40)
    scale = maker().full(0.01, 1)
    check(scaled_mm, "scaled_mm", a, b, scale, scale, "float32", None, rtol=1e-5)


@pytest.mark.parametrize("m", [0, 2])
def test_empty(device: str, m: int) -> None:
    a, b = operands(torch.int8, m, 32, 0 if m else 8)
    scale = maker().full(1.0, 1)
    assert scaled_mm(a, b, scale, scale, "float32").shape == (m, b.shape[1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"out_dtype": "float64"}, "out_dtype: 'float64' is not one of bfloat16, float16, float32"),
        (
            {"a": torch.zeros(4, 64, dtype=torch.int8)},
            "a is torch.int8 and b torch.float8_e4m3fn; both must be the same float8, or int8",
        ),
        ({"scale_a": torch.ones(3, 1)}, "scale_a: shape (3, 1), expected [1], [4, 1] or [4, 64 / group]"),
        ({"scale_a": torch.ones(4, 3)}, "scale_a: 3 groups do not divide 64 entries"),
        ({"scale_a": torch.ones(4, 4)}, "groups of 16 and 1073741824 along K; both must be multiples of 32"),
        ({"scale_b": torch.ones(5)}, "scale_b: shape (5,), expected [1], [1, 24] or a matrix of blocks"),
    ],
)
def test_scaled_mm_refuses(device: str, changed: dict[str, object], message: str) -> None:
    a, b = operands(FLOAT8, 4, 64, 24)
    arguments: dict[str, object] = {
        "a": a,
        "b": b,
        "scale_a": torch.ones(1),
        "scale_b": torch.ones(1),
        "out_dtype": "float32",
        **changed,
    }
    with pytest.raises(NotImplementedError) as caught:
        scaled_mm(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()})
    assert str(caught.value) == message
