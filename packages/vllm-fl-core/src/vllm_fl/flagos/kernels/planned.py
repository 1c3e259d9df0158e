"""Calls that are decided once: what a launcher does follows from the layouts of its arguments, so it is replayed.

A launcher looks at shapes, strides and its other arguments, allocates results, and launches kernels. All of that costs
the host several times what the launches themselves do. The first call with some layouts is watched; if it did nothing
but allocate, take views and launch kernels of :mod:`.launch`, a plan of it is kept under the layouts: what to allocate,
which compiled kernels to run with which values, and where each pointer comes from. The next call with these layouts
follows the plan. A launcher that copies or computes with tensors runs as it is, always.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .launch import OBSERVERS, Launched, is_expected

__all__ = ["planned"]

_Launcher = TypeVar("_Launcher", bound=Callable[..., Any])
_ALLOCATIONS = frozenset({"aten::empty", "aten::new_empty", "aten::empty_strided", "aten::empty_like"})
#: Plans of one launcher before all are dropped; an engine without graphs meets many numbers of tokens.
_MOST_PLANS = 4096


def planned(launcher: _Launcher) -> _Launcher:
    """Decorator of a launcher whose parameters have annotations, "Tensor" or "Tensor | None" for tensors.

    What it does must follow from the layouts (shape, strides, dtype, device, alignment to 16 bytes) of its tensors and
    from its other arguments, which must be hashable. It returns None, one of its arguments, a tensor that it allocated,
    or a tuple of these.
    """
    function: Any = _Planner(launcher).function if is_expected() else launcher
    return cast("_Launcher", function)


class _Kernel(NamedTuple):
    grid: tuple[int, ...]  # three
    run: Callable[..., None]
    function: Any
    metadata: Any
    values: list[Any]
    slots: tuple[tuple[int, int], ...]  # (position in values, source of the pointer)


class _Plan(NamedTuple):
    """Sources are numbered: the tensor arguments first, then the allocations."""

    allocations: tuple[tuple[Callable[..., Tensor], Any, Any, torch.dtype], ...]
    kernels: tuple[_Kernel, ...]
    result: int | tuple[int, ...] | None


class _Watch(TorchDispatchMode):
    """Sees what a launcher does in this thread, besides reading layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.launches: list[Launched] = []
        self.allocated: list[Tensor] = []
        self.is_plain, self.is_first = True, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name().split(".")[0] in _ALLOCATIONS:
            self.allocated.append(result)
        elif not func.is_view:
            self.is_plain = False
        return result

    def __enter__(self) -> Any:
        OBSERVERS.append(self._launched)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        OBSERVERS.remove(self._launched)
        super().__exit__(*error)

    def _launched(self, launched: Launched | bool) -> None:
        if threading.get_ident() != self.thread:
            return
        if isinstance(launched, Launched):
            self.launches.append(launched)
        elif launched:
            self.is_first = True
        else:
            self.is_plain = False


class _Planner:
    """The plans of one launcher, and the function that follows them."""

    def __init__(self, launcher: Callable[..., Any]) -> None:
        self.launcher = launcher
        self.plans: dict[tuple[Any, ...], _Plan | None] = {}
        parameters = inspect.signature(launcher).parameters.values()
        self.tensors = [p.name for p in parameters if str(p.annotation).startswith("Tensor")]
        self.function = self._generate()

    def _generate(self) -> Callable[..., Any]:
        signature = inspect.signature(self.launcher)
        parts, names, defaults = [], [], {}
        for name, p in signature.parameters.items():
            optional = "None" in str(p.annotation)
            layout = "{0}.shape, {0}.stride(), {0}.dtype, {0}.get_device(), (_P_{0} := {0}.data_ptr()) & 15"
            if name not in self.tensors:
                parts.append(name)
            elif optional:
                parts.append(f"(_P_{name} := None) if {name} is None else ({layout.format(name)})")
            else:
                parts.append(layout.format(name))
            if p.default is not p.empty:
                defaults[f"_Default_{name}"] = p.default
            names.append(f"{name}={name}" if p.kind is p.KEYWORD_ONLY else name)
        head = signature.replace(
            parameters=[
                p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else _Source(f"_Default_{name}"))
                for name, p in signature.parameters.items()
            ],
            return_annotation=inspect.Signature.empty,
        )
        source = f"""
def {self.launcher.__name__}{head}:
    _Key = (_Device(), {", ".join(parts)})
    _Plan = _Plans.get(_Key, _Unknown)
    if _Plan is None or _Observers or _EnterHooks or _ExitHooks:
        return _Launcher({", ".join(names)})
    _Pointers = [{", ".join(f"_P_{name}" for name in self.tensors)}]
    if _Plan is _Unknown:
        return _Record(_Key, _Pointers, ({", ".join(self.tensors)},), lambda: _Launcher({", ".join(names)}))
    return _Replay(_Plan, _Pointers, ({", ".join(self.tensors)},), _Stream(_Key[0]))
"""
        hooks = triton.knobs.runtime
        namespace: dict[str, Any] = {}

        def first_device() -> int | None:
            try:
                active = triton.runtime.driver.active
            except RuntimeError:
                return None  # no driver: nothing will be launched
            namespace.update(_Device=active.get_current_device, _Stream=active.get_current_stream)
            return active.get_current_device()

        namespace |= {
            "_Device": first_device,
            "_Plans": self.plans,
            "_Unknown": _UNKNOWN,
            "_Observers": OBSERVERS,
            "_EnterHooks": hooks.launch_enter_hook.calls,
            "_ExitHooks": hooks.launch_exit_hook.calls,
            "_Launcher": self.launcher,
            "_Record": self._record,
            "_Replay": _replay,
            **defaults,
        }
        exec(compile(source, f"<plans of {self.launcher.__name__}>", "exec"), namespace)
        function: Callable[..., Any] = namespace[self.launcher.__name__]
        return functools.wraps(self.launcher)(function)

    def _record(
        self, key: tuple[Any, ...], pointers: list[int | None], tensors: tuple[Any, ...], call: Callable[[], Any]
    ) -> Any:
        with _Watch() as watch:
            result = call()
        if not watch.is_first:  # else the next call shows it
            if len(self.plans) >= _MOST_PLANS:
                self.plans.clear()
            self.plans[key] = _plan(watch, pointers, tensors, result)
        return result


_UNKNOWN = object()


class _Source(str):
    """A default value that is written into source code."""

    __slots__ = ()
    __repr__ = str.__str__


def _plan(watch: _Watch, pointers: list[int | None], tensors: tuple[Any, ...], result: Any) -> _Plan | None:
    """The plan of a watched call; None if it has to run as it is."""
    known = [pointer for pointer in pointers if pointer is not None]
    if not (watch.is_plain and watch.launches) or 0 in known or len(set(known)) < len(known):
        return None  # two arguments at one address could not be told apart
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    sources = dict(zip(pointers, range(len(pointers)), strict=True))
    allocations = []
    for number, tensor in enumerate(watch.allocated):
        shown = next((r for r in results if r.data_ptr() == tensor.data_ptr()), tensor)
        if shown.numel() != tensor.numel() or shown.dtype != tensor.dtype or not tensor.numel():
            return None
        allocations.append((_allocator(tensor.device), tuple(shown.shape), shown.stride(), shown.dtype))
        sources[tensor.data_ptr()] = len(pointers) + number
    kernels = []
    for launched in watch.launches:
        values, slots = list(launched.values), []
        for position, value in enumerate(values):
            if isinstance(value, Tensor):
                if value.data_ptr() not in sources:
                    return None
                slots.append((position, sources[value.data_ptr()]))
                values[position] = None
        kernels.append(_Kernel((*launched.grid, 1, 1)[:3], *launched.entry, values, tuple(slots)))
    places = []
    for r in results:
        same = [i for i, tensor in enumerate(tensors) if tensor is r]
        source = same[0] if same else sources.get(r.data_ptr(), -1)
        if source < 0 or (not same and source < len(pointers)):
            return None  # a view of an argument
        places.append(source)
    shape = tuple(places) if isinstance(result, tuple) else places[0] if places else None
    return _Plan(tuple(allocations), tuple(kernels), shape)


def _replay(plan: _Plan, pointers: list[int | None], tensors: tuple[Any, ...], stream: Any) -> Any:
    for allocate, shape, stride, dtype in plan.allocations:
        tensor = allocate(shape, stride, dtype)
        tensors += (tensor,)
        pointers.append(tensor.data_ptr())
    for (x, y, z), run, function, metadata, template, slots in plan.kernels:
        values = template.copy()
        for position, source in slots:
            values[position] = pointers[source]
        run(x, y, z, stream, function, metadata, None, None, None, *values)
    result = plan.result
    if result is None or isinstance(result, int):
        return None if result is None else tensors[result]
    return tuple([tensors[source] for source in result])


@functools.cache
def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """allocate(shape, stride, dtype) on the current device of that type; PyTorch's own short cut where it has one."""
    short = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device.type}", None)
    if short is not None:
        return short
    return lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype, device=device)
