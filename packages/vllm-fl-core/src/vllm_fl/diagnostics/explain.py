"""Which implementation serves an operator and why: the selection trace as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_fl.dispatch import OpManager, Selection, get_default_manager
from vllm_fl.dispatch.links import Link
from vllm_fl.dispatch.parameters import Setting, text_of

from .arguments import ArgumentError, describe_arguments, make_case, parse_dtype, parse_shapes


@dataclass(frozen=True)
class ParameterView:
    """The value of a parameter of an implementation.

    Args:
        name: of the parameter, ``NAME.BUCKET`` where the implementation has buckets.
        value, default: as they are written in a configuration.
        allowed: every value that it may have.
        origin: where it was set; empty for the default.
    """

    name: str
    value: str
    default: str
    allowed: tuple[str, ...]
    origin: str


@dataclass(frozen=True)
class CandidateView:
    """The decision about one implementation.

    Args:
        implementation: its id.
        kind: flagos, vendor or reference.
        vendor: its vendor, if it has one.
        priority: its priority.
        accepted: whether it may serve the calls that were asked about.
        reason: why, in words.
        origin: the configuration item that decided, with file, line and column or variable; empty if none did.
        owner: who registered it.
        parameters: the values of its parameters.
    """

    implementation: str
    kind: str
    vendor: str | None
    priority: int
    accepted: bool
    reason: str
    origin: str
    owner: str
    parameters: tuple[ParameterView, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """All candidates of an operator, the accepted ones first and in the order in which they are tried.

    Args:
        operator: its name.
        signature: name and parameters.
        summary: the first line of its documentation.
        called_from: where vLLM calls it.
        candidates: the decisions.
        arguments: the arguments that were asked about, described; empty if the question was general.
    """

    operator: str
    signature: str
    summary: str
    called_from: str
    candidates: tuple[CandidateView, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def chosen(self) -> CandidateView | None:
        """The implementation that serves these calls; None if none is left."""
        return next((candidate for candidate in self.candidates if candidate.accepted), None)

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain data, ready for JSON."""
        return {**asdict(self), "chosen": self.chosen.implementation if self.chosen else None}


def explain(
    op_name: str,
    *,
    shape: Sequence[str] = (),
    dtype: str | None = None,
    device: str | None = None,
    manager: OpManager | None = None,
) -> Explanation:
    """Explain the choice for one operator, in general or for certain arguments.

    Args:
        op_name: the operator.
        shape: ``8x4096`` for the first tensor, ``NAME=4096`` for another argument.
        dtype: of the floating tensors; ``bf16`` and the like are understood.
        device: where the tensors are; "cpu" if only shapes or dtype are given. It need not be here.
        manager: whose selection; the default manager if None.

    Raises:
        UnknownOperatorError: there is no such operator.
        ArgumentError: a shape, dtype or device cannot be used.
        ConfigError: the configuration is wrong.
    """
    manager = manager or get_default_manager()
    selection = manager.selection(op_name)
    if not shape and dtype is None and device is None:
        return _explanation(manager, selection)
    spec = manager.registry.spec(op_name)
    if spec is None:
        raise ArgumentError(f"{op_name} has no specification, so that nothing is known about its arguments")
    torch_dtype = parse_dtype(dtype or spec.dtypes[0])
    case = make_case(spec, parse_shapes(shape), torch_dtype, device or "cpu")
    refusals = {
        candidate.impl.impl_id: Link(candidate.impl, index, spec).refusal(case.args, case.kwargs)
        for index, candidate in enumerate(selection.accepted)
    }
    return _explanation(manager, selection, refusals, describe_arguments(spec, case))


def explain_all(manager: OpManager | None = None) -> list[Explanation]:
    """Explain every operator of the catalogue and of the registry, by name."""
    manager = manager or get_default_manager()
    return [_explanation(manager, selection) for selection in manager.selections().values()]


def _explanation(
    manager: OpManager,
    selection: Selection,
    refusals: Mapping[str, str | None] | None = None,
    arguments: Mapping[str, str] | None = None,
) -> Explanation:
    spec = manager.registry.spec(selection.op_name)
    views = []
    for candidate in selection.candidates:
        impl = candidate.impl
        refusal = (refusals or {}).get(impl.impl_id)
        views.append(
            CandidateView(
                implementation=impl.impl_id,
                kind=impl.kind.value,
                vendor=impl.vendor,
                priority=int(impl.priority),
                accepted=candidate.accepted and refusal is None,
                reason=candidate.reason if refusal is None else f"refuses these arguments: {refusal}",
                origin=candidate.origin,
                owner=manager.registry.owner(selection.op_name, impl.impl_id),
                parameters=tuple(map(_parameter_view, candidate.settings)),
            )
        )
    views.sort(key=lambda view: not view.accepted)
    return Explanation(
        operator=selection.op_name,
        signature=selection.signature,
        summary=spec.doc.partition("\n")[0] if spec is not None else "",
        called_from=spec.called_from if spec is not None else "",
        candidates=tuple(views),
        arguments=arguments or {},
    )


def _parameter_view(setting: Setting) -> ParameterView:
    parameter = setting.parameter
    allowed = tuple(parameter.by_text)
    return ParameterView(setting.name, text_of(setting.value), text_of(parameter.default), allowed, setting.origin)
