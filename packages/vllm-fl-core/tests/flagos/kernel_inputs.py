"""Where kernel tests run, in which dtypes, and the comparison with the reference operators in float64."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import torch

import vllm_fl_reference.ops
from vllm_fl.catalog import CATALOG, InputMaker

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _device() -> str:
    if INTERPRETED or not torch.accelerator.is_available():
        return "cpu"
    return torch.accelerator.current_accelerator().type


DEVICE = _device()
#: The interpreter keeps bfloat16 as integers and computes with those; only a device can test it.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE != "cpu" else [])
DTYPE_IDS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
#: Numbers of tokens: few in the interpreter, which takes milliseconds a program.
TOKENS = [1, 5] if DEVICE == "cpu" else [1, 2, 17, 255, 1024, 16384]


def maker(dtype: torch.dtype = torch.float32, seed: int = 0) -> InputMaker:
    """Seeded inputs on the test device."""
    return InputMaker(dtype, DEVICE, seed)


@functools.cache
def reference(op_name: str) -> Callable[..., Any]:
    """The PyTorch implementation of an operator: the function of that name in the reference distribution."""
    for info in pkgutil.iter_modules(vllm_fl_reference.ops.__path__, "vllm_fl_reference.ops."):
        function = vars(importlib.import_module(info.name)).get(op_name)
        if function is not None and function.__module__ == info.name:
            return function
    raise LookupError(f"vllm-fl-reference has no {op_name}")


def precise(value: Any) -> Any:
    """A copy on the CPU; floating tensors in float64."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        return value.detach().cpu().to(torch.float64)
    return value.detach().cpu().clone()


def check(kernel: Callable[..., Any], op_name: str, *args: Any, rtol: float = 0.0, atol: float = 0.0) -> Any:
    """Call `kernel` and compare its results, and the arguments that it may write, with the reference in float64.

    Shapes and dtypes must be those of the specification's meta function. The tolerances are the specification's for
    the dtype of each result, or `rtol` and `atol` if they are larger. Returns what the kernel returned.
    """
    spec = CATALOG[op_name]
    wanted_args = [precise(value) for value in args]
    wanted = _listed(reference(op_name)(*wanted_args))
    got = kernel(*args)
    shapes = _listed(spec.fake(*args))
    results = _listed(got)
    assert len(results) == len(shapes) == len(wanted)
    for index, (result, shape, want) in enumerate(zip(results, shapes, wanted, strict=True)):
        assert (result.shape, result.dtype) == (shape.shape, shape.dtype), f"result {index}"
        assert_close(result, want, spec.tolerance, rtol, atol, f"{op_name}: result {index}")
    names = list(spec.signature.parameters)
    for name, value, want in zip(names, args, wanted_args, strict=False):
        if name in spec.mutates and value is not None:
            assert_close(value, want, spec.tolerance, rtol, atol, f"{op_name}: {name}")
        elif isinstance(value, torch.Tensor):
            assert torch.equal(precise(value), want), f"{op_name}: {name} was written"
    return got


def assert_close(
    got: torch.Tensor,
    want: torch.Tensor,
    tolerance: Callable[[torch.dtype], tuple[float, float]],
    rtol: float = 0.0,
    atol: float = 0.0,
    what: str = "",
) -> None:
    """Equality for integers, and closeness within the larger of the two tolerances for floating numbers."""
    if not got.is_floating_point():
        assert torch.equal(got.cpu(), want.to(got.dtype)), what
        return
    base = tolerance(got.dtype if got.dtype.itemsize > 1 else torch.float16)
    torch.testing.assert_close(
        got.detach().cpu().to(torch.float64),
        want.to(torch.float64),
        rtol=max(rtol, base[0]),
        atol=max(atol, base[1]),
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def _listed(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (tuple, list)) else (value,)


def cut(tensor: torch.Tensor, width: int, start: int = 0) -> torch.Tensor:
    """The same values as `tensor`, as a slice of a wider tensor: rows `width` apart, beginning at column `start`."""
    wide = tensor.new_zeros((*tensor.shape[:-1], width))
    view = wide[..., start : start + tensor.shape[-1]]
    view.copy_(tensor)
    return view
