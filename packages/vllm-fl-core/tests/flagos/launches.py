"""Kernel launches without a device: records what a launcher would launch, compiles it for a target, reads its costs.

A launcher is called with meta tensors, which have shapes, strides and dtypes and no data: a launcher that looked at
data, and so would make the host wait for the device, raises.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

#: name -> (target, shared memory in bytes that one program may have there)
TARGETS: Mapping[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 166912),
    "sm_90": (GPUTarget("cuda", 90, 32), 232448),
    "sm_100": (GPUTarget("cuda", 100, 32), 232448),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 65536),
}

_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint32: "u32",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, what it is compiled for, and its grid."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[int, Any], ...]
    aligned: tuple[int, ...]
    options: tuple[tuple[str, int], ...]
    grid: tuple[int, ...] = field(compare=False)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def compile(self, target: str) -> Resources:
        """Compile it, and read off what it needs.

        Raises:
            Exception: whatever the compiler raises.
        """
        source = ASTSource(
            fn=self.kernel,
            signature=dict(self.signature),
            constexprs={(index,): value for index, value in self.constants},
            attrs={(index,): [["tt.divisibility", 16]] for index in self.aligned},
        )
        compiled = triton.compile(source, target=TARGETS[target][0], options=dict(self.options))
        read = _amd_registers if "amdgcn" in compiled.asm else _cuda_registers
        registers, spilled = read(compiled.asm)
        return Resources(registers, spilled, int(compiled.metadata.shared))


@dataclass(frozen=True)
class Resources:
    """Registers a thread, bytes a thread spilled to memory (stack), bytes of shared memory a program."""

    registers: int
    spilled: int
    shared: int


def record(launcher: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Launch]:
    """The launches of one call."""
    with _recording() as launches:
        launcher(*args, **kwargs)
    return launches


@contextlib.contextmanager
def _recording() -> Iterator[list[Launch]]:
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(self, args, grid, kwargs))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def _launch(kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> Launch:
    unknown = set(kwargs) - {p.name for p in kernel.params} - set(_OPTIONS)
    assert not unknown, f"{kernel.__name__} is launched with unknown arguments {unknown}"
    signature, constants, aligned, values = [], [], [], {}
    for index, p in enumerate(kernel.params):
        value = args[index] if index < len(args) else kwargs.get(p.name, p.default)
        values[p.name] = value
        kind, is_aligned = _kind(value, p)
        signature.append((p.name, kind))
        if kind == "constexpr":
            constants.append((index, value))
        elif is_aligned:
            aligned.append(index)
    options = tuple((name, kwargs[name]) for name in _OPTIONS if name in kwargs)
    size = tuple(grid(values) if callable(grid) else grid)
    return Launch(kernel, tuple(signature), tuple(constants), tuple(aligned), options, size)


def _kind(value: Any, parameter: Any) -> tuple[str, bool]:
    """Triton's type of an argument, and whether Triton may take it to be a multiple of 16."""
    if parameter.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return f"*{_DTYPES[value.dtype]}", value.data_ptr() % 16 == 0
    if isinstance(value, bool):
        return "i1", False
    if isinstance(value, float):
        return "fp32", False
    assert isinstance(value, int), f"{parameter.name} is a {type(value).__name__}"
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr", False
    kind = "i32" if -(2**31) <= value < 2**31 else "i64"
    return kind, value % 16 == 0 and not parameter.do_not_specialize


def _cuda_registers(asm: Mapping[str, Any]) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    assert found, f"cuobjdump says nothing about registers: {text}"
    return max(int(registers) for registers, _ in found), max(int(stack) for _, stack in found)


def _amd_registers(asm: Mapping[str, Any]) -> tuple[int, int]:
    text = asm["amdgcn"]
    (registers,) = re.findall(r"\.vgpr_count:\s+(\d+)", text)
    (spilled,) = re.findall(r"\.vgpr_spill_count:\s+(\d+)", text)
    return int(registers), 4 * int(spilled)
