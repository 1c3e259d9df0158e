"""Launches that cost the host less: Triton's own way binds, specialises and hashes all arguments at every call.

A launch is determined by little: dtypes and alignment of the tensors, the values of those integers that Triton
specialises on, the constants and the options. Under that key the compiled kernel is remembered after the first launch,
which is Triton's, and called directly from then on, with addresses in the place of tensors, since the driver would be
asked about each tensor; that they are on the device is part of the key. Whatever Triton does not show here as expected
(its interpreter, a launch hook of a profiler, another way to call compiled kernels) keeps the launch Triton's.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

__all__ = ["OBSERVERS", "FastKernel", "Launched", "fast", "is_expected"]

#: How JITFunction.run calls a compiled kernel in every Triton from 3.6 to 3.9; spaces do not count.
_EXPECTED = (
    "kernel.run(grid_0,grid_1,grid_2,stream,kernel.function,kernel.packed_metadata,launch_metadata,"
    "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*bound_args.values())"
)
#: Entries of one kernel before all are dropped; more than a model has shapes.
_MOST_ENTRIES = 1024


class Launched(NamedTuple):
    """A launch that was this module's: the grid, what to call with which function and metadata, the arguments."""

    grid: tuple[int, ...]
    entry: tuple[Callable[..., None], Any, Any]
    values: Sequence[Any]


#: Functions that are told of each launch, in any thread, after it. For one that was Triton's: whether those after it
#: will be this module's.
OBSERVERS: list[Callable[[Launched | bool], None]] = []


def fast(kernel: Any) -> Any:
    """Decorator above ``@triton.jit``, for a kernel that the host launches; ``kernel[grid](...)`` stays as it is.

    The globals that the kernel reads must not change, and an argument must stay of one kind: tensor or None, integer,
    or float.
    """
    return FastKernel(kernel) if isinstance(kernel, JITFunction) and is_expected() else kernel


@functools.cache
def is_expected() -> bool:
    """Whether this Triton launches compiled kernels in the way that is known here."""
    try:
        source = inspect.getsource(JITFunction.run)
        hooks = (triton.knobs.runtime.launch_enter_hook.calls, triton.knobs.runtime.launch_exit_hook.calls)
    except (OSError, AttributeError):
        return False
    is_known = _EXPECTED in re.sub(r"\s", "", source) and all(isinstance(calls, list) for calls in hooks)
    return is_known and not triton.knobs.runtime.interpret


class FastKernel:
    """A kernel with remembered launches.

    Args:
        jit: Triton's kernel.
    """

    def __init__(self, jit: JITFunction[Any]) -> None:
        self.jit = jit
        self._entries: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
        self._launch: Callable[..., Any] | None = None
        self.__name__, self.__doc__ = jit.__name__, jit.fn.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch or self._first, grid)

    def _first(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
        """Triton's launch; if there is a device, the next one may be ours."""
        compiled = self.jit[grid](*args, **kwargs)
        if hasattr(compiled, "packed_metadata"):
            bound = inspect.signature(self.jit.fn).bind_partial(
                *args, **{name: value for name, value in kwargs.items() if name in self.jit.arg_names}
            )
            self._launch = self._generate(bound.arguments)
        for observer in OBSERVERS:
            observer(self._launch not in (None, self._first))
        return compiled

    def _cold(self, key: tuple[Any, ...], grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        compiled = self.jit[grid](*args, **{name: value for name, value in options.items() if value is not None})
        if len(self._entries) >= _MOST_ENTRIES:
            self._entries.clear()
        self._entries[key] = entry = (compiled.run, compiled.function, compiled.packed_metadata)
        _notify(grid, entry, args)
        return compiled

    def _generate(self, example: dict[str, Any]) -> Callable[..., Any]:
        """The function that launches, written for the kinds of the example's arguments."""
        names, parts, values, addresses = [], [], {}, []
        for param in self.jit.params:
            default = inspect.signature(self.jit.fn).parameters[param.name].default
            names.append(param.name)
            if default is not inspect.Parameter.empty:
                values[f"_Default_{param.name}"] = default
            value = example.get(param.name)
            part = _key_part(param, value)
            if part is None:
                return self._first
            parts.append(part)
            is_tensor = not param.is_constexpr and (value is None or isinstance(value, Tensor))
            addresses.append(f"_At_{param.name}" if is_tensor else param.name)
        head = ", ".join(f"{n}=_Default_{n}" if f"_Default_{n}" in values else n for n in names)
        # Names of ours begin with an underscore and an upper-case letter; those of a kernel's arguments do not.
        source = f"""
def launch(_Grid, {head}, *, num_warps=None, num_stages=None):
    _Device = _GetDevice()
    _Key = (_Device, num_warps, num_stages, {", ".join(part for part in parts if part)})
    _Entry = _Entries.get(_Key)
    if _Entry is None or _EnterHooks or _ExitHooks:
        return _Cold(_Key, _Grid, ({", ".join(names)},), {{"num_warps": num_warps, "num_stages": num_stages}})
    _Run, _Function, _Metadata = _Entry
    _Size = len(_Grid)
    _Run(
        _Grid[0], _Grid[1] if _Size > 1 else 1, _Grid[2] if _Size > 2 else 1, _GetStream(_Device), _Function, _Metadata,
        None, None, None, {", ".join(addresses)},
    )
    if _Observers:
        _Notify(_Grid, _Entry, ({", ".join(names)},))
"""
        active, hooks = triton.runtime.driver.active, triton.knobs.runtime
        namespace = {
            "_Entries": self._entries,
            "_Cold": self._cold,
            "_Observers": OBSERVERS,
            "_Notify": _notify,
            "_GetDevice": active.get_current_device,
            "_GetStream": active.get_current_stream,
            "_EnterHooks": hooks.launch_enter_hook.calls,
            "_ExitHooks": hooks.launch_exit_hook.calls,
            **values,
        }
        exec(compile(source, f"<launch of {self.jit.__name__}>", "exec"), namespace)
        launch: Callable[..., Any] = namespace["launch"]
        return launch


def _notify(grid: tuple[int, ...], entry: tuple[Any, Any, Any], values: Sequence[Any]) -> None:
    for observer in OBSERVERS:
        observer(Launched(grid, entry, values))


def _key_part(param: Any, value: Any) -> str | None:
    """What an argument adds to the key, as an expression, "" for nothing; None if it is of no kind that we know."""
    name = param.name
    if param.is_constexpr:
        return str(name)
    if value is None or isinstance(value, Tensor):
        layout = f"({name}.dtype, {name}.get_device(), (_At_{name} := {name}.data_ptr()) & 15)"
        return f"(_At_{name} := None) if {name} is None else {layout}"
    if isinstance(value, int):
        return f"-2147483648 <= {name} <= 2147483647" if param.do_not_specialize else str(name)
    return "" if isinstance(value, float) else None
