"""Ranges around the calls of implementations and around the model, in torch's profiler; they exist while it runs."""

from __future__ import annotations

from typing import Any

from vllm_fl.dispatch import OpImpl
from vllm_fl.dispatch.links import Call
from vllm_fl.dispatch.tracing import is_compiling

from .trace import MODEL_RANGE, RANGE_PREFIX


class Ranges:
    """A watcher that opens a range of torch's profiler around each call of an implementation."""

    def around(self, impl: OpImpl, call: Call) -> Call:
        from torch.profiler import record_function

        name = f"{RANGE_PREFIX}{impl.op_name}/{impl.impl_id}"

        def ranged(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return call(*args, **kwargs)
            with record_function(name):
                return call(*args, **kwargs)

        return ranged


class ModelRange:
    """A range around each forward of a model.

    Args:
        model: the ``torch.nn.Module``; its hooks are taken away again by :meth:`remove`.
    """

    def __init__(self, model: Any) -> None:
        self._open: list[Any] = []
        self._hooks = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *_: Any) -> None:
        from torch.profiler import record_function

        opened = record_function(MODEL_RANGE)
        opened.__enter__()
        self._open.append(opened)

    def _leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)
