"""The compiled code of a worker's model, exchanged for that of another selection while the engine stays up.

An opaque implementation is behind a custom operator that asks dispatch at each call: the code stays as it is. One that
was traced is in the code: the model is traced anew, under the key of the present selection. See
:mod:`vllm_fl.integration.graphs`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from vllm_fl.dispatch import OpImpl, Selection, get_default_manager
from vllm_fl.logging import get_logger

from .platform import stamp_selection

__all__ = ["CompiledModel", "traced_form"]

#: Selections whose code is kept.
KEPT = 3


class CompiledModel:
    """The compiled parts of a worker's model; nothing at all where it is not compiled.

    Args:
        worker: one without an :meth:`obstacle`.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._parts = _compiled_parts(worker)
        self._survey: Survey | None = None
        self._operators: frozenset[str] | None = None  # all, as far as is known
        self._form = self._form_of_selection(())
        self._kept: dict[Any, tuple[int, list[dict[str, Any]]]] = {}
        self._traced = 0
        #: Of the present code: another one for each time that the model was traced.
        self.number = 0

    @staticmethod
    def obstacle(worker: Any) -> str:
        """Why the code cannot be exchanged; empty if it can."""
        from vllm.config import CompilationMode

        mode = worker.vllm_config.compilation_config.mode
        if mode not in (CompilationMode.NONE, CompilationMode.VLLM_COMPILE):
            return f"the compilation mode {mode.name} compiles outside of vLLM's wrapper"
        if mode == CompilationMode.VLLM_COMPILE and _resetter() is None:
            return "this vLLM has no reset_compile_wrapper"
        return ""

    def follow(self, native: Iterable[str] = ()) -> None:
        """Bring the code in line with what is selected now: as it is, from what was kept, or traced anew.

        Args:
            native: operators that layers of vLLM's compute.
        """
        if not self._parts:
            return
        get_default_manager().prepare_compile()
        form = self._form_of_selection(native)
        if form == self._form:
            return
        kept = self._kept.pop(form, None)
        self._kept[self._form] = (self.number, [dict(vars(part)) for part in self._parts])
        while len(self._kept) > KEPT - 1:
            del self._kept[next(iter(self._kept))]
        self._form = form
        if kept is None:
            self._traced = self.number = self._traced + 1
            self._trace()
            return
        self.number, states = kept
        for part, state in zip(self._parts, states, strict=True):
            vars(part).clear()
            vars(part).update(state)

    def switch_off(self, off: bool) -> None:
        """Run the model as it is written, or as it is compiled."""
        for part in self._parts:
            part.do_not_compile = off

    def begin_survey(self) -> None:
        """Run the model as it is written, and see which operators its code has; the others cannot change the code."""
        if self._parts:
            self.switch_off(True)
            self._survey = Survey()
            get_default_manager().watch(self._survey)

    def end_survey(self) -> None:
        """Take what has been seen, under the selection that the code was compiled with, as all that there is."""
        survey, self._survey = self._survey, None
        if survey is not None:
            get_default_manager().unwatch(survey)
            self.switch_off(False)
            self._operators = frozenset(survey.operators)
            self._form = self._form_of_selection(())

    def _form_of_selection(self, native: Iterable[str]) -> frozenset[Any]:
        selections = get_default_manager().selections()
        inside = frozenset(native)
        return frozenset(
            (name, name in inside or traced_form(selection))
            for name, selection in selections.items()
            if self._operators is None or name in self._operators
        )

    def _trace(self) -> None:
        from vllm.config import set_current_vllm_config

        config, runner = self._worker.vllm_config, self._worker.model_runner
        reset = _resetter()
        assert reset is not None
        stamp_selection(config)
        config.compilation_config.traced_files.clear()
        begin = time.perf_counter()
        with set_current_vllm_config(config):
            for part in self._parts:
                reset(part)
            # What compiles the model at the start of an engine.
            getattr(runner, "warming_up_model", runner.profile_run)()
        get_logger(__name__).info("compiled the model anew in %.1f s", time.perf_counter() - begin)


class Survey:
    """A watcher: which operators the model calls by itself, and not from a custom operator, which hides them."""

    def __init__(self) -> None:
        self.operators: set[str] = set()

    def around(self, impl: OpImpl, call: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            if not _is_hidden():
                self.operators.add(impl.op_name)
            return call(*args, **kwargs)

        return seen


def _is_hidden() -> bool:
    """Whether the caller is, however deep, inside a custom operator.

    Told by the stack. A mode of torch's dispatcher would see it, too, but Dynamo gives up code that it meets under one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch._ops.__file__:
        frame = frame.f_back
    return frame is not None


def traced_form(selection: Selection) -> tuple[Any, ...]:
    """What the code of an operator looks like that was compiled under `selection`: equal for equal code.

    Neighbouring opaque implementations are one custom operator, in whatever order; those that take only some dtypes or
    arguments leave a test behind.
    """
    form: list[Any] = []
    for candidate in selection.accepted:
        impl = candidate.impl
        if not impl.opaque:
            form.append(candidate.variant)
            continue
        if not form or not isinstance(form[-1], frozenset):
            form.append(frozenset())
        form[-1] |= {impl.impl_id}
    return tuple(form)


def _compiled_parts(worker: Any) -> list[Any]:
    try:
        from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
    except ImportError:
        return []
    modules = worker.model_runner.get_model().modules()
    return [
        module
        for module in modules
        if isinstance(module, TorchCompileWithNoGuardsWrapper) and not getattr(module, "do_not_compile", True)
    ]


def _resetter() -> Any:
    """vLLM's function that has a module compile itself anew; None if this vLLM has none."""
    from vllm.compilation import wrapper

    return getattr(wrapper, "reset_compile_wrapper", None)
