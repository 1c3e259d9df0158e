"""Registers the implementations of this package under the schemas of the data file, and has their checks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float16, torch.bfloat16)
HALF = (torch.float16, torch.bfloat16)


class Row(NamedTuple):
    """One operator of the data file."""

    namespace: str
    versions: tuple[str, ...]  #: in which exactly this schema was found
    unconfirmed: tuple[str, ...]  #: in which the operator was found
    schema: str

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


def rows() -> list[Row]:
    """The operators of the data file."""
    lines = (Path(__file__).parent / "schemas.tsv").read_text(encoding="utf-8").splitlines()
    fields = [line.split("\t") for line in lines if not line.startswith("#")]
    return [
        Row(space, *(tuple(v.split(",")) for v in (found, named)), schema) for space, found, named, schema in fields
    ]


#: They vanish with their Library.
_libraries: list[torch.library.Library] = []


def register(*modules: ModuleType) -> None:
    """Define every operator of the data file; the function of the same name in `modules` computes it."""
    functions = {name: value for module in modules for name, value in vars(module).items()}
    for namespace in ("npu", "atb"):
        library = torch.library.Library(namespace, "FRAGMENT")
        _libraries.append(library)
        for row in rows():
            if row.namespace == namespace:
                library.define(row.schema)
                library.impl(row.name, _with_unused(functions[row.name], row), "CompositeExplicitAutograd")


def _with_unused(function: Callable[..., Any], row: Row) -> Callable[..., Any]:
    """`function`, refusing arguments that it does not know and that do not have their default value."""
    schema = torch._C.parse_schema(row.schema)
    known = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(defaults, args, strict=False)), **kwargs}
        for name, value in given.items():
            if name not in known:
                require(row.name, value == defaults[name], f"the simulation does not know {name}={value!r}")
        return _contiguous(function(**{name: value for name, value in given.items() if name in known}))

    return call


def _contiguous(result: Any) -> Any:
    """Results are, as the meta functions of torch_npu say."""
    if isinstance(result, (list, tuple)):
        return type(result)(_contiguous(value) for value in result)
    return result.contiguous() if isinstance(result, Tensor) else result


def require(operator: str, condition: bool, text: str) -> None:
    """Refuse a call as torch_npu would.

    Raises:
        RuntimeError: the condition does not hold.
    """
    if not condition:
        raise RuntimeError(f"simulated torch_npu: {operator}: {text}")


def require_dtypes(operator: str, allowed: tuple[torch.dtype, ...], **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        require(operator, tensor.dtype in allowed, f"{name} is of dtype {tensor.dtype}, not one of {allowed}")


def require_one_dtype(operator: str, **tensors: Tensor) -> None:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    require(operator, len(set(dtypes.values())) == 1, f"dtypes differ: {dtypes}")


def require_contiguous(operator: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            require(operator, tensor.is_contiguous(), f"{name} is not contiguous, its strides are {tensor.stride()}")
