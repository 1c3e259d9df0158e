"""The coverage report: which share of the device's time each provider of kernels takes, from a trace of a run.

    from vllm_fl.profile import coverage

    report = coverage("trace-rank0.json.gz")
    print(report.share(Provider.OURS), report.triton_share_outside_products)

It goes by what ran, not by what was asked for. A kernel is told by its name; in a run without graphs and compilation
under ``vllm-fl profile``, also by the range of the dispatched call that launched it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .kernel_names import KernelNames, installed_kernel_names
from .providers import TRITON, Provider, Verdict, is_matrix_product, operator_of, provider_of
from .trace import DeviceEvent, Served, Trace, device_events, read_trace

#: Implementations whose kernels one provider has.
IMPLEMENTATIONS = {"flagos.triton": Provider.OURS, "flagos.flaggems": Provider.FLAGGEMS}
#: Providers whose kernels compute no operator of the catalogue, whatever their names resemble.
_NO_OPERATOR = frozenset(
    {Provider.INDUCTOR, Provider.BLAS, Provider.PYTORCH, Provider.COMMUNICATION, Provider.COPIES, Provider.OTHER}
)


@dataclass(frozen=True)
class KernelUse:
    """All launches of one kernel for one operator.

    Args:
        name: the kernel's, or the copy's.
        provider: who provides it.
        operator: what it computes, by the range that launched it or by its name; None if neither says.
        implementation: the implementation that launched it; None outside of ranges.
        matrix_product: whether it is a matrix product of a linear layer.
        calls: number of launches.
        time_us: their time on the device, microseconds.
        others: providers that have a kernel of the same name, where the name alone decided.
    """

    name: str
    provider: Provider
    operator: str | None
    implementation: str | None
    matrix_product: bool
    calls: int
    time_us: float
    others: tuple[Provider, ...] = ()


@dataclass(frozen=True)
class Share:
    """A part of the device's time: `key` names it, `time_us` is in microseconds, `share` between 0 and 1."""

    key: tuple[str, ...]
    calls: int
    time_us: float
    share: float


@dataclass(frozen=True)
class Coverage:
    """Who took the device's time. Times are sums over kernels; of kernels that overlap each counts whole.

    Args:
        kernels: every kernel, the longest first.
    """

    kernels: tuple[KernelUse, ...]

    @cached_property
    def total_us(self) -> float:
        """Time of all kernels and copies, microseconds."""
        return sum(kernel.time_us for kernel in self.kernels)

    def shares(self, key: Callable[[KernelUse], tuple[str, ...]]) -> list[Share]:
        """The time by `key`, the largest share first."""
        times: dict[tuple[str, ...], float] = defaultdict(float)
        calls: dict[tuple[str, ...], int] = defaultdict(int)
        for kernel in self.kernels:
            times[key(kernel)] += kernel.time_us
            calls[key(kernel)] += kernel.calls
        ordered = sorted(times, key=lambda name: (-times[name], name))
        return [Share(name, calls[name], times[name], self._part(times[name])) for name in ordered]

    def by_provider(self) -> list[Share]:
        """The time by provider."""
        return self.shares(lambda kernel: (kernel.provider.value,))

    def by_operator(self) -> list[Share]:
        """The time by operator, implementation and provider; "" where there is none."""
        return self.shares(lambda k: (k.operator or "", k.implementation or "", k.provider.value))

    def share(self, *providers: Provider) -> float:
        """The share of these providers, between 0 and 1."""
        return self._part(self._time(lambda kernel: kernel.provider in providers))

    @property
    def triton_share(self) -> float:
        """Share of all kernels that are written in Triton, whoever provides them."""
        return self.share(*TRITON)

    @property
    def product_share(self) -> float:
        """Share of the matrix products of linear layers, whoever provides them."""
        return self._part(self._time(lambda kernel: kernel.matrix_product))

    @property
    def triton_share_outside_products(self) -> float:
        """Share of Triton in the time without matrix products, copies and communication; 1 means 100 % Triton.

        0 where nothing but those ran.
        """
        left_out = (Provider.COPIES, Provider.COMMUNICATION)
        counted = [k for k in self.kernels if not k.matrix_product and k.provider not in left_out]
        whole = sum(kernel.time_us for kernel in counted)
        return sum(kernel.time_us for kernel in counted if kernel.provider in TRITON) / whole if whole else 0.0

    @property
    def ambiguous(self) -> tuple[KernelUse, ...]:
        """Kernels whose name several providers use and that no range told apart."""
        return tuple(kernel for kernel in self.kernels if kernel.others)

    def as_dict(self, most_kernels: int = 100) -> dict[str, Any]:
        """The report as plain data, ready for JSON, with the `most_kernels` longest kernels."""
        return {
            "total_us": self.total_us,
            "triton_share": self.triton_share,
            "product_share": self.product_share,
            "triton_share_outside_products": self.triton_share_outside_products,
            "providers": [_plain(share, "provider") for share in self.by_provider()],
            "operators": [_plain(s, "operator", "implementation", "provider") for s in self.by_operator()],
            "kernels": [
                {
                    "name": kernel.name,
                    "provider": kernel.provider.value,
                    "operator": kernel.operator,
                    "implementation": kernel.implementation,
                    "matrix_product": kernel.matrix_product,
                    "calls": kernel.calls,
                    "time_us": kernel.time_us,
                    "share": self._part(kernel.time_us),
                    "also_named_so": [provider.value for provider in kernel.others],
                }
                for kernel in self.kernels[:most_kernels]
            ],
        }

    def _time(self, wanted: Callable[[KernelUse], bool]) -> float:
        return sum(kernel.time_us for kernel in self.kernels if wanted(kernel))

    def _part(self, time_us: float) -> float:
        return time_us / self.total_us if self.total_us else 0.0


def coverage(trace: Trace, names: KernelNames | None = None) -> Coverage:
    """Judge every kernel and copy of a trace.

    Args:
        trace: path of a Chrome trace (``.gz`` or not), its content, its events, or pairs of a kernel's name and its
            duration in microseconds.
        names: the Triton kernels that packages define; those installed here if None.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no trace.
    """
    return coverage_of(device_events(read_trace(trace)), names)


def coverage_of(events: Iterable[DeviceEvent], names: KernelNames | None = None) -> Coverage:
    """As :func:`coverage`, from events that have been read."""
    known = installed_kernel_names() if names is None else names
    grouped: dict[tuple[str, bool, Served | None], list[float]] = defaultdict(list)
    for event in events:
        grouped[event.name, event.is_copy, event.served].append(event.duration_us)
    kernels = [_judge(*key, durations, known) for key, durations in grouped.items()]
    return Coverage(tuple(sorted(kernels, key=lambda kernel: (-kernel.time_us, kernel.name))))


def _judge(name: str, is_copy: bool, served: Served | None, durations: list[float], names: KernelNames) -> KernelUse:
    verdict = provider_of(name, names, is_copy)
    if verdict.others and served is not None:
        launcher = IMPLEMENTATIONS.get(served.implementation)
        verdict = Verdict(launcher if launcher in verdict.others else verdict.provider)
    provider = verdict.provider
    operator = None if provider in _NO_OPERATOR else operator_of(name)
    return KernelUse(
        name=name,
        provider=provider,
        operator=served.operator if served is not None else operator,
        implementation=served.implementation if served is not None else None,
        matrix_product=served is None and is_matrix_product(name, provider),
        calls=len(durations),
        time_us=sum(durations),
        others=verdict.others,
    )


def _plain(share: Share, *names: str) -> dict[str, Any]:
    labels = dict(zip(names, (part or None for part in share.key), strict=True))
    return {**labels, "calls": share.calls, "time_us": share.time_us, "share": share.share}
