"""What the ranks of a group tell one another before they communicate, and what follows from it on all of them alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import FlagCXLoadError
from .peers import Peer
from .policy import Site, site_refusal
from .settings import CUSTOM_ENV, CommSettings

__all__ = ["DeviceFacts", "Report", "agree_on_custom", "agree_on_library", "common_site", "settle_environment"]

#: FlagCX reads its switch once a process, when the first communicator is made; this is what it read.
_switched_on: bool | None = None


@dataclass(frozen=True)
class DeviceFacts:
    """What the custom kernels depend on; see :class:`~vllm_fl_comm.policy.Site`."""

    multicast: bool = False
    capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Report:
    """One rank's; plain data.

    Args:
        peer: its process.
        error: why it cannot load FlagCX; None if it can.
        asks: its configuration asks for the custom kernels.
        built: its FlagCX has them.
        switched_on: what FlagCX read from its switch in this process; None before the first communicator.
        device: what it has.
        multicast_allowed: it may use NVLink multicast.
    """

    peer: Peer
    error: str | None = None
    asks: bool = False
    built: bool = False
    switched_on: bool | None = None
    device: DeviceFacts = DeviceFacts()
    multicast_allowed: bool = True

    @classmethod
    def here(cls, rank: int, settings: CommSettings, *, error: str | None, built: bool, device: DeviceFacts) -> Report:
        """The report of this process."""
        return cls(
            peer=Peer.here(rank),
            error=error,
            asks=settings.custom_all_reduce,
            built=built,
            switched_on=_switched_on,
            device=device,
            multicast_allowed=settings.multicast_allowed,
        )


def agree_on_library(reports: Sequence[Report], name: str) -> None:
    """Every rank can load FlagCX, or none goes on.

    Raises:
        FlagCXLoadError: on every rank, if it cannot be loaded on one.
    """
    failed = [report for report in reports if report.error is not None]
    if failed:
        ranks = ", ".join(str(report.peer) for report in failed)
        raise FlagCXLoadError(f"group {name!r}: {ranks} of {len(reports)} cannot load FlagCX: {failed[0].error}")


def agree_on_custom(reports: Sequence[Report]) -> str | None:
    """Why the group does not use the custom kernels; None if every rank can, as far as is known before it connects."""
    if not any(report.asks for report in reports):
        return "not asked for"
    for what, fails in (
        ("does not ask for it", lambda report: not report.asks),
        ("has a FlagCX that was built without its kernels (COMPILE_KERNEL=1)", lambda report: not report.built),
        ("made its first communicator without it", lambda report: report.switched_on is False),
        ("runs on another host", lambda report: report.peer.host != reports[0].peer.host),
    ):
        without = [report.peer for report in reports if fails(report)]
        if without:
            return f"{without[0]} {what}"
    return site_refusal(common_site(reports, None, homogeneous=True))


def settle_environment(wanted: bool) -> bool:
    """Set FlagCX's switch, unless it has been read already, and return what FlagCX goes by in this process."""
    global _switched_on
    if _switched_on is None:
        _switched_on = wanted
        # Always written, since FlagCX would otherwise read its files ~/.flagcx.conf and /etc/flagcx.conf.
        os.environ[CUSTOM_ENV] = "1" if wanted else "0"
    return _switched_on


def common_site(reports: Sequence[Report], refusal: str | None, *, homogeneous: bool) -> Site:
    """What the ranks have in common, for the policy."""
    capabilities = [report.device.capability for report in reports]
    known = [capability for capability in capabilities if capability is not None]
    multicast = {report.device.multicast for report in reports}
    if refusal is None and len(multicast) > 1:
        refusal = "some devices have NVLink multicast and some do not"
    return Site(
        ranks=len(reports),
        refusal=refusal,
        multicast=any(multicast),
        multicast_allowed=all(report.multicast_allowed for report in reports),
        capability=min(known) if len(known) == len(capabilities) else None,
        homogeneous=homogeneous,
    )
