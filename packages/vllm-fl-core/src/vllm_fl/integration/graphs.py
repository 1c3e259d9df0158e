"""The captured graphs of a worker, exchanged for those of another selection while the engine stays up.

This module and :mod:`vllm_fl.integration.compiled` reach into what vLLM keeps for itself: the tables of batches that
have a graph, the graphs in them, and the call that captures. Known are both model runners of vLLM 0.26 and 0.28.
Everything is recognised by feature; :func:`obstacle` says what is missing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from vllm_fl.logging import get_logger

from .compiled import CompiledModel

__all__ = ["Exchange", "obstacle"]

#: A batch that a graph can serve; what vLLM's own dispatch of batches answers.
Batch = Hashable

#: Selections whose graphs are kept: the best, the candidate, and the baseline.
KEPT = 3
#: Batches in a smaller part of the steps have no graph.
SELDOM = 0.02

#: vLLM's wrappers around what is captured: module, class, attribute that has the graphs by batch.
_WRAPPERS = (
    ("vllm.compilation.cuda_graph", "CUDAGraphWrapper", "concrete_cudagraph_entries"),
    ("vllm.compilation.breakable_cudagraph", "BreakableCUDAGraphWrapper", "entries"),
)


class Runner(Protocol):
    """What the two model runners of vLLM are asked for here."""

    def capture_model(self) -> Any:
        """Capture a graph for every batch in the table."""


class Table(Protocol):
    """Which batches have a graph, in the form of one of the model runners."""

    #: Has ``dispatch(...)``, which says how a batch is run.
    dispatcher: Any
    #: All batches that can have a graph.
    all: frozenset[Batch]

    def only(self, batches: Iterable[Batch]) -> Any:
        """The table with these batches alone, for :meth:`put`."""

    def put(self, table: Any) -> None:
        """Let vLLM use `table`."""

    def exchange(self, graphs: dict[Any, Any]) -> Any:
        """Let vLLM use these graphs, where the runner itself holds any; those that it had."""


class FirstTable:
    """That of ``vllm.v1.worker.gpu_model_runner``: a set of batches for each mode; the wrappers hold the graphs."""

    def __init__(self, runner: Any) -> None:
        self.dispatcher = runner.cudagraph_dispatcher
        keys: Mapping[Any, Iterable[Batch]] = self.dispatcher.cudagraph_keys
        self._modes = tuple(keys)
        self.all: frozenset[Batch] = frozenset((mode, batch) for mode in keys for batch in keys[mode])

    def only(self, batches: Iterable[Any]) -> Any:
        table: dict[Any, set[Batch]] = {mode: set() for mode in self._modes}
        for mode, batch in batches:
            table[mode].add(batch)
        return table

    def put(self, table: Any) -> None:
        self.dispatcher.cudagraph_keys = table

    def exchange(self, graphs: dict[Any, Any]) -> Any:
        return None  # the wrappers hold them all


class SecondTable:
    """That of ``vllm.v1.worker.gpu.model_runner``, whose manager holds the graphs of whole forwards itself."""

    def __init__(self, runner: Any) -> None:
        self.dispatcher = runner.cudagraph_manager
        self._candidates = dict(self.dispatcher._candidates)
        self._to_capture = dict(self.dispatcher._capture_descs)
        self.all: frozenset[Batch] = frozenset(batch for batches in self._to_capture.values() for batch in batches)

    def only(self, batches: Iterable[Batch]) -> Any:
        wanted = frozenset(batches)
        tables = (
            {key: [batch for batch in found if batch in wanted] for key, found in table.items()}
            for table in (self._candidates, self._to_capture)
        )
        return tuple({key: found for key, found in table.items() if found} for table in tables)

    def put(self, table: Any) -> None:
        self.dispatcher._candidates, self.dispatcher._capture_descs = table

    def exchange(self, graphs: dict[Any, Any]) -> Any:
        before, self.dispatcher.graphs = self.dispatcher.graphs, graphs
        return before


class _Captured:
    """The graphs of one selection, by the wrapper or the manager that replays them."""

    def __init__(self) -> None:
        self.batches: set[Batch] = set()
        self.whole: dict[Any, Any] = {}
        self.parts: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


class CapturedGraphs:
    """The graphs of the last selections of a worker. Only batches that the workload has are captured.

    All are captured into vLLM's one pool of memory: no two of them are ever replayed at the same time, and none reads
    what another one has left. The graphs that the engine began with are dropped once there are others: PyTorch does not
    capture into a pool that has been given up.

    Args:
        runner: a model runner of vLLM.
        table: its table.
    """

    def __init__(self, runner: Runner, table: Table) -> None:
        self._runner, self._table = runner, table
        self._sets: dict[Hashable, _Captured] = {}
        self._seen: Counter[Batch] = Counter()
        self._everything, self._nothing = table.only(table.all), table.only(())
        self._with_graphs: frozenset[Batch] = frozenset()
        self._shown = self._nothing
        self._capturing = self._off = False
        self._dispatch = table.dispatcher.dispatch
        table.dispatcher.dispatch = self._answer
        self._first: Any = [getattr(wrapper, attribute) for wrapper, attribute in _wrappers()], table.exchange({})
        self._place(_Captured())

    def use(self, selection: Hashable) -> None:
        """Replay the graphs of `selection` from now on; those that are missing are captured, under what is selected.

        Raises:
            Exception: whatever comes of running the model while it is captured.
        """
        captured = self._sets.pop(selection, None) or _Captured()
        self._sets[selection] = captured
        while len(self._sets) > KEPT:
            del self._sets[next(iter(self._sets))]
        self._with_graphs, self._shown = frozenset(), self._nothing  # until there are all of them
        self._place(captured)
        wanted = self._wanted()
        missing = wanted - captured.batches
        if missing:
            self._capture(missing)
            captured.batches |= missing
            self._first = None
        self._with_graphs = wanted
        self._shown = self._table.only(wanted)

    def switch_off(self, off: bool) -> None:
        """Run every batch without graphs, or with them again."""
        self._off = off

    def _wanted(self) -> frozenset[Batch]:
        steps = self._seen.total()
        return frozenset(batch for batch, count in self._seen.items() if count >= SELDOM * steps)

    def _capture(self, batches: frozenset[Batch]) -> None:
        self._table.put(self._table.only(batches))
        self._capturing = True
        begin = time.perf_counter()
        try:
            self._runner.capture_model()
        finally:
            self._capturing = False
        get_logger(__name__).info("captured %d graphs in %.1f s", len(batches), time.perf_counter() - begin)

    def _place(self, captured: _Captured) -> None:
        for wrapper, attribute in _wrappers():
            setattr(wrapper, attribute, captured.parts.setdefault(wrapper, {}))
        self._table.exchange(captured.whole)

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of vLLM's ``dispatch``: count the batch, and give it a graph if there is one."""
        if self._capturing:
            return self._dispatch(*args, **kwargs)
        self._table.put(self._everything)
        batch = self._dispatch(*args, **kwargs)
        if batch not in self._table.all:
            return batch
        self._seen[batch] += 1
        if batch in self._with_graphs and not self._off:
            return batch
        self._table.put(self._nothing if self._off else self._shown)
        return self._dispatch(*args, **kwargs)


class Exchange:
    """Compiled code and graphs of a worker that follow its selection.

    Args:
        worker: one without an :func:`obstacle`.
    """

    def __init__(self, worker: Any) -> None:
        self._compiled = CompiledModel(worker)
        table = _table(worker.model_runner) if _captures(worker) else None
        self._captured = CapturedGraphs(worker.model_runner, table) if table is not None else None

    def follow(self, native: Iterable[str] = ()) -> None:
        """Bring code and graphs in line with what is selected now. Call it between requests.

        Args:
            native: operators that layers of vLLM's compute.

        Raises:
            Exception: whatever comes of compiling or capturing the model.
        """
        from vllm_fl.dispatch import get_default_manager

        self._compiled.follow(native)
        if self._captured is not None:
            self._captured.use((self._compiled.number, get_default_manager().fingerprint()))

    def switch_off(self, off: bool) -> None:
        """Run the model without compiled code and graphs, or with them again."""
        self._compiled.switch_off(off)
        if self._captured is not None:
            self._captured.switch_off(off)

    def survey(self, begin: bool) -> None:
        """Run a workload between the two calls of this: its batches will have graphs, its operators are in the code."""
        if begin:
            self._compiled.begin_survey()
        else:
            self._compiled.end_survey()


def obstacle(worker: Any) -> str:
    """Why the graphs of `worker` cannot be exchanged; empty if they can."""
    config = worker.vllm_config
    if config.speculative_config is not None:
        return "speculative decoding has graphs of its own"
    if getattr(config.compilation_config, "cudagraph_mm_encoder", False):
        return "the encoder has graphs of its own (cudagraph_mm_encoder)"
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 or getattr(parallel, "use_ubatching", False):
        return "data-parallel engines and microbatches agree on the graph of each step"
    return CompiledModel.obstacle(worker) or (_obstacle_to_capture(worker) if _captures(worker) else "")


def _captures(worker: Any) -> bool:
    from vllm.config import CUDAGraphMode

    return worker.vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE


def _obstacle_to_capture(worker: Any) -> str:
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    runner = worker.model_runner
    if _table(runner) is None or not hasattr(runner, "capture_model"):
        return f"the model runner {type(runner).__module__}.{type(runner).__qualname__} is not one that vllm-fl knows"
    kind = resolve_obj_by_qualname(current_platform.get_static_graph_wrapper_cls())
    if kind not in _wrapper_classes():
        return f"graphs of {kind.__module__}.{kind.__qualname__} are not ones that vllm-fl knows"
    return ""


def _table(runner: Any) -> Table | None:
    """The table of a model runner; None if it has none of the known forms."""
    manager = getattr(runner, "cudagraph_manager", None)
    if all(hasattr(manager, name) for name in ("dispatch", "graphs", "_candidates", "_capture_descs")):
        return SecondTable(runner)
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if all(hasattr(dispatcher, name) for name in ("dispatch", "cudagraph_keys")):
        return FirstTable(runner)
    return None


def _wrapper_classes() -> dict[Any, str]:
    """The known classes of wrappers that this vLLM has, and their attribute."""
    from importlib import import_module

    found = {}
    for module, name, attribute in _WRAPPERS:
        try:
            kind = getattr(import_module(module), name, None)
        except ImportError:
            continue
        if hasattr(kind, "_all_instances"):
            found[kind] = attribute
    return found


def _wrappers() -> Iterable[tuple[Any, str]]:
    """Every wrapper of this process, and its attribute."""
    for kind, attribute in _wrapper_classes().items():
        for wrapper in list(kind._all_instances):
            yield wrapper, attribute
