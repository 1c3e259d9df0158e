"""Arguments for an operator of which a user names some shapes, the dtype and the device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm_fl.catalog import Case, InputMaker, OpSpec
from vllm_fl.errors import Exit, FLError, did_you_mean

_SHAPE = re.compile(r"(?:(\w+)=)?(\d+(?:x\d+)*)")
_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "fp8": "float8_e4m3fn",
}

Shape = tuple[int, ...]


class ArgumentError(FLError, ValueError):
    """A shape, dtype or device that is none, or that the operator has no use for."""

    exit_code = Exit.USAGE


def parse_shapes(texts: Sequence[str]) -> dict[str | None, Shape]:
    """``["8x4096", "weight=4096"]`` as sizes by parameter; None stands for the first tensor.

    Raises:
        ArgumentError: a text has another form, or a parameter has two shapes.
    """
    shapes: dict[str | None, Shape] = {}
    for text in texts:
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise ArgumentError(f"{text!r} is not a shape; write 8x4096, or NAME=8x4096 for another argument")
        if match[1] in shapes:
            raise ArgumentError(f"{text!r} is the second shape of {match[1] or 'the first tensor'}; give one")
        shapes[match[1]] = tuple(int(size) for size in match[2].split("x"))
    return shapes


def parse_dtype(text: str) -> Any:
    """The torch dtype of a name, long (``bfloat16``) or short (``bf16``).

    Raises:
        ArgumentError: there is no such dtype.
    """
    import torch

    name = _SHORT.get(text.lower(), text.lower().removeprefix("torch."))
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        names = sorted({*_SHORT, *_SHORT.values(), "int8", "int32", "int64"})
        raise ArgumentError(f"{text!r} is not a dtype ({', '.join(names)}){did_you_mean(text, names)}")
    return found


def make_case(spec: OpSpec, shapes: Mapping[str | None, Shape], dtype: Any, device: str) -> Case:
    """The catalogue's first inputs of an operator, with the sizes changed that the user named.

    Where the first tensor's sizes change, equal sizes of other tensors change with them: for a first tensor [8, 4096]
    a weight as wide as it has 4096. Nothing is computed; a device that is not here is simulated.

    Raises:
        ArgumentError: the operator has no inputs in the catalogue, none of the rank that is asked for, no such
            argument, or the device is none.
    """
    import torch

    template = _template(spec, shapes, InputMaker(dtype, "cpu"))
    bound = spec.signature.bind(*template.args, **template.kwargs)
    sizes = _sizes(spec, bound.arguments, shapes)
    with _device(device):
        for name, value in bound.arguments.items():
            if hasattr(value, "shape"):
                shape = shapes.get(name) or tuple(sizes.get(size, size) for size in value.shape)
                bound.arguments[name] = torch.empty(shape, dtype=value.dtype, device=device)
    return Case(template.name, bound.args, bound.kwargs)


def describe_arguments(spec: OpSpec, case: Case) -> dict[str, str]:
    """Each argument by name: ``[8, 4096] bfloat16 cpu`` for a tensor, else its value."""
    bound = spec.signature.bind(*case.args, **case.kwargs)
    return {name: _shown(value) for name, value in bound.arguments.items()}


def _shown(value: Any) -> str:
    if hasattr(value, "shape"):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} {value.device}"
    return repr(value)


def _device(device: str) -> AbstractContextManager[Any]:
    """In this context tensors of `device` can be made: real ones where it is here, fake ones elsewhere."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if "Expected one of" in str(error) or "Invalid device" in str(error):
            kinds = ("cpu", "cuda", "xpu", "npu", "mps", "meta")
            raise ArgumentError(f"{device!r} is not a device of torch{did_you_mean(device, kinds)}") from None
        from torch._subclasses.fake_tensor import FakeTensorMode

        return FakeTensorMode()
    return nullcontext()


def _template(spec: OpSpec, shapes: Mapping[str | None, Shape], maker: InputMaker) -> Case:
    position = spec.first_tensor
    unknown = [name for name in shapes if name is not None and name not in spec.signature.parameters]
    if unknown:
        parameters = list(spec.signature.parameters)
        hint = did_you_mean(str(unknown[0]), parameters)
        raise ArgumentError(f"{spec} has no argument {unknown[0]!r}{hint}")
    wanted = shapes.get(None)
    cases = list(spec.inputs(maker))
    if not cases:
        raise ArgumentError(f"the catalogue has no inputs for {spec}: leave --shape, --dtype and --device out")
    if wanted is None or position is None:
        return cases[0]
    fitting = [case for case in cases if len(case.args[position].shape) == len(wanted)]
    if not fitting:
        ranks = sorted({len(case.args[position].shape) for case in cases})
        allowed = " or ".join(str(rank) for rank in ranks)
        raise ArgumentError(f"the first tensor of {spec} has {allowed} dimensions, {list(wanted)} has {len(wanted)}")
    # Where two sizes are equal, which one of them another tensor's size follows would be a guess.
    return next((c for c in fitting if len(set(c.args[position].shape)) == len(wanted)), fitting[0])


def _sizes(spec: OpSpec, arguments: Mapping[str, Any], shapes: Mapping[str | None, Shape]) -> dict[int, int]:
    position = spec.first_tensor
    wanted = shapes.get(None)
    if position is None or wanted is None:
        return {}
    return dict(zip(arguments[list(spec.signature.parameters)[position]].shape, wanted, strict=True))
