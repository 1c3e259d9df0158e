"""The arguments of one call in memory of their own, with margins around it, and what a call wrote there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vllm_fl.catalog import Case, OpSpec

#: Elements before and behind each storage: NaN where the dtype has it, so that reading there shows, too.
MARGIN = 64

_Key = tuple[int, torch.dtype]


class Arguments:
    """A copy of a case's arguments: tensors keep their strides, and views of one storage stay views of one.

    Args:
        spec: the operator.
        case: the case; it is not changed.
        contiguous: make the tensors that the operator may not write contiguous.
    """

    def __init__(self, spec: OpSpec, case: Case, contiguous: bool = False) -> None:
        self.spec = spec
        given = spec.signature.bind(*case.args, **case.kwargs).arguments
        if contiguous:
            given = {name: value if name in spec.mutates else _contiguous(value) for name, value in given.items()}
        # `given` outlives the loop: the address of a storage is its name.
        self._copies: dict[_Key, Tensor] = {}
        self.by_name = {name: self._copy(value) for name, value in given.items()}
        self.kwargs = {name: self.by_name[name] for name in case.kwargs}
        self.args = tuple(value for name, value in self.by_name.items() if name not in self.kwargs)
        self._before = {_key(copy): copy.clone() for copy in self._copies.values()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every argument that is one."""
        for name, value in self.by_name.items():
            if isinstance(value, Tensor):
                yield name, value

    def written(self, allowed: bool = True) -> list[str]:
        """What was written since, and may not be; without `allowed`, nothing may."""
        found = []
        outside = {_key(copy): torch.ones_like(copy, dtype=torch.bool) for copy in self._copies.values()}
        for name, value in self.tensors():
            if not (allowed and name in self.spec.mutates):
                count = int((~same_bits(value, _view(self._before[_key(value)], value))).sum())
                if count:
                    found.append(f"argument {name!r} was written ({count} of {value.numel()} entries)")
            _view(outside[_key(value)], value).fill_(False)
        for copy in self._copies.values():
            key = _key(copy)
            count = int((outside[key] & ~same_bits(copy, self._before[key])).sum())
            if count:
                names = ", ".join(repr(name) for name, value in self.tensors() if _key(value) == key)
                found.append(f"memory around {names} was written ({count} entries)")
        return found

    def alias(self, result: Tensor) -> str | None:
        """The argument whose memory `result` lies in; None if the result is fresh."""
        pointer = result.untyped_storage().data_ptr()
        return next((name for name, value in self.tensors() if _key(value)[0] == pointer), None)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        source = (storage.data_ptr() or id(value), value.dtype)
        if source not in self._copies:
            flat = value.detach().as_strided((storage.nbytes() // value.element_size(),), (1,), 0)
            margin = torch.full((MARGIN,), float("nan") if value.is_floating_point() else 0, device=value.device)
            margin = margin.to(value.dtype)
            self._copies[source] = torch.cat((margin, flat, margin))
        copy = self._copies[source]
        return copy.as_strided(value.shape, value.stride(), value.storage_offset() + MARGIN)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one shape and dtype hold the same number; NaN is the same as NaN."""
    if a.element_size() == 1:  # float8 has no comparison
        return a.view(torch.uint8) == b.view(torch.uint8)
    return (a == b) | ((a != a) & (b != b))


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _key(value: Tensor) -> _Key:
    return value.untyped_storage().data_ptr(), value.dtype


def _view(copy: Tensor, like: Tensor) -> Tensor:
    """The part of `copy`, which is laid out as the storage of `like`, that `like` is of its storage."""
    return copy.as_strided(like.shape, like.stride(), like.storage_offset())
