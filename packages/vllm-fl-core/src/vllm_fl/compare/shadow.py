"""Calls of operators that are computed a second time, by another policy's implementation, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_fl.catalog import OpSpec
from vllm_fl.dispatch import OpImpl, OpManager, SelectionPolicy, policy_context
from vllm_fl.dispatch.links import Call, Link
from vllm_fl.dispatch.planner import bare_link
from vllm_fl.testing.comparison import canonical, listed

from .dumps import Dump, protected, save_dump
from .places import Filters, Place
from .values import Difference, differences

#: Differences outside of the tolerance that are kept for each operator.
KEPT = 20

_Outcome = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Pairing:
    """What was seen of one operator and one pair of implementations.

    Args:
        operator: the operator.
        first: the implementation whose results the model went on with.
        second: the other one.
        calls: number of calls that were compared.
        failed: what `second` raised, for the first call that it failed on.
        max_abs: largest absolute difference.
        max_ulp: the same in units of the last place.
        outside: number of calls with an entry outside of the operator's tolerance.
        kept: the first of these, in the order of the calls, with their places.
        dump: file with the inputs of the first of these.
    """

    operator: str
    first: str
    second: str
    calls: int = 0
    failed: str = ""
    max_abs: float = 0.0
    max_ulp: float = 0.0
    outside: int = 0
    kept: list[tuple[int, Place, Difference]] = field(default_factory=list)
    dump: str | None = None

    def as_plain(self) -> dict[str, Any]:
        """As plain data: what a worker sends."""
        kept = [
            {"order": order, "step": place.step, "module": place.module, "shown": str(difference)}
            for order, place, difference in self.kept
        ]
        return {**vars(self), "kept": kept}


class Shadow:
    """A watcher that lets a second policy compute what the first one's implementations compute.

    Args:
        manager: the manager that is watched.
        second: the second policy.
        filters: which calls are computed twice.
        rank: of this process.
        place: where the model is.
        directory: where the inputs of the first difference of each pair go; None keeps none.
    """

    def __init__(
        self,
        manager: OpManager,
        second: SelectionPolicy,
        filters: Filters,
        rank: int,
        place: Callable[[], Place],
        directory: Path | None,
    ) -> None:
        self._manager, self._second, self._filters = manager, second, filters
        self._rank, self._place, self._directory = rank, place, directory
        self._busy = False
        self._order = 0
        self._links: dict[str, tuple[tuple[str, Link], ...]] = {}
        self._variants: dict[tuple[str, str], str] = {}
        self.pairings: dict[tuple[str, str, str], Pairing] = {}

    def around(self, impl: OpImpl, call: Call) -> Call:
        spec = self._manager.registry.spec(impl.op_name)
        if spec is None or (self._filters.operators is not None and impl.op_name not in self._filters.operators):
            return call

        def shadowed(*args: Any, **kwargs: Any) -> Any:
            place = self._place()
            if self._busy or not self._filters.takes(place, self._rank):
                return call(*args, **kwargs)
            bound = spec.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            inputs = protected(spec, bound.arguments)
            result = call(*args, **kwargs)
            self._compare(spec, impl, place, inputs, _canonical(spec, result, bound.arguments))
            return result

        return shadowed

    def _compare(self, spec: OpSpec, impl: OpImpl, place: Place, inputs: Mapping[str, Any], mine: _Outcome) -> None:
        first = self._variant(impl)
        for second, theirs in self._second_outcomes(spec, first, inputs):
            pairing = self.pairings.setdefault((spec.name, first, second), Pairing(spec.name, first, second))
            pairing.calls += 1
            if isinstance(theirs, str):
                pairing.failed = pairing.failed or f"{place}: {theirs}"
                return
            self._note(spec, pairing, place, inputs, differences(spec, theirs, mine))

    def _second_outcomes(
        self, spec: OpSpec, first: str, inputs: Mapping[str, Any]
    ) -> Iterator[tuple[str, _Outcome | str]]:
        """The outcome of the first of the second policy's variants that takes the inputs, if it is another."""
        for variant, link in self._second_links(spec):
            arguments = protected(spec, inputs)
            bound = spec.signature.bind_partial()
            bound.arguments.update(arguments)
            if link.refusal(bound.args, bound.kwargs) is not None:
                continue
            if variant == first:
                return
            self._busy = True
            try:
                result = link.call(*bound.args, **bound.kwargs)
            except NotImplementedError:
                continue
            except Exception as error:  # an implementation may fail in any way; that is a result, too
                yield variant, f"{type(error).__name__}: {' '.join(str(error).split())}"
                return
            finally:
                self._busy = False
            yield variant, _canonical(spec, result, arguments)
            return

    def _variant(self, impl: OpImpl) -> str:
        """The implementation with the parameters that it has under the first policy."""
        key = impl.op_name, impl.impl_id
        if key not in self._variants:
            candidates = self._manager.selection(impl.op_name).candidates
            self._variants[key] = next(c.variant for c in candidates if c.impl.impl_id == impl.impl_id)
        return self._variants[key]

    def _second_links(self, spec: OpSpec) -> tuple[tuple[str, Link], ...]:
        links = self._links.get(spec.name)
        if links is None:
            with policy_context(self._second):
                accepted = self._manager.selection(spec.name).accepted
            links = tuple((c.variant, bare_link(c, index, spec)) for index, c in enumerate(accepted))
            self._links[spec.name] = links
        return links

    def _note(
        self, spec: OpSpec, pairing: Pairing, place: Place, inputs: Mapping[str, Any], found: list[Difference]
    ) -> None:
        pairing.max_abs = max([pairing.max_abs, *(difference.max_abs for difference in found)])
        pairing.max_ulp = max([pairing.max_ulp, *(difference.max_ulp for difference in found)])
        outside = [difference for difference in found if not difference.within]
        if not outside:
            return
        pairing.outside += 1
        self._order += 1
        if len(pairing.kept) < KEPT:
            pairing.kept.append((self._order, place, outside[0]))
        if pairing.dump is None and self._directory is not None:
            dump = Dump(spec.name, pairing.first, pairing.second, place.step, place.module, self._rank, dict(inputs))
            pairing.dump = str(save_dump(dump, self._directory))


def _canonical(spec: OpSpec, result: Any, arguments: Mapping[str, Any]) -> _Outcome:
    written = {name: arguments[name] for name in spec.mutates if name in arguments}
    return canonical(spec, arguments, listed(result)), written
