"""Runs a model under the profiler: vLLM in its normal mode, one workload, one report."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_fl.dispatch import SelectionPolicy, get_policy
from vllm_fl.engines import Engine, Workload
from vllm_fl.policies import PRESENT, environment_of

from .coverage import coverage_of
from .report import ProfileReport, rows_of_coverage, rows_of_timelines
from .timeline import timeline
from .trace import DeviceEvent, device_events, read_trace

_EXTENSION = "vllm_fl.profile.worker.ProfileWorker"


def profile_model(
    model: str,
    *,
    policy: SelectionPolicy | None = None,
    policy_name: str = PRESENT,
    workload: Workload | None = None,
    arguments: Mapping[str, Any] | None = None,
    directory: Path | None = None,
) -> ProfileReport:
    """Start an engine, warm it up, record one workload, and say where its time went.

    The profiler itself costs time: the wall time of the report is not a throughput. Shares of a few operators that are
    called very often come out a little too large on the CPU, since each range costs microseconds.

    Args:
        model: name or directory of a model, as for ``vllm serve``.
        policy: the policy to select by; the present one if None.
        policy_name: its name in the report.
        workload: what the engine has to do.
        arguments: further arguments of vLLM's ``LLM``.
        directory: where the timelines are kept; if None, they are not.

    Raises:
        CommandError: the engine does not start, or the workload does not fit it.
        ConfigError: the configuration is wrong.
    """
    work = workload or Workload()
    with (
        environment_of(policy if policy is not None else get_policy()),
        Engine({**(arguments or {}), "model": model}, _EXTENSION) as engine,
    ):
        return profile_engine(engine, work, policy_name=policy_name, directory=directory)


def profile_engine(
    engine: Engine, workload: Workload, *, policy_name: str = PRESENT, directory: Path | None = None
) -> ProfileReport:
    """As :func:`profile_model`, on an engine that runs and has :class:`vllm_fl.profile.worker.ProfileWorker`."""
    with tempfile.TemporaryDirectory() as scratch:
        kept = directory if directory is not None else Path(scratch)
        kept.mkdir(parents=True, exist_ok=True)
        engine.generate(workload.prompts(engine.vocabulary, variant=1), workload.output_tokens)
        engine.call("fl_profile_start")
        begin = time.perf_counter()
        answers = engine.generate(workload.prompts(engine.vocabulary), workload.output_tokens)
        wall_s = time.perf_counter() - begin
        results = engine.call("fl_profile_stop", str(kept.resolve()))
        timelines, kernels = [], list[DeviceEvent]()
        for result in results:
            events = read_trace(result["trace"])
            timelines.append(timeline(events))
            kernels += device_events(events)
    selection = results[0]["selection"]
    report = coverage_of(kernels) if kernels else None
    return ProfileReport(
        model=engine.model,
        policy=policy_name,
        workload=str(workload),
        clock="device" if report is not None else "cpu",
        wall_s=wall_s,
        output_tokens=sum(map(len, answers)),
        selection=selection,
        rows=rows_of_coverage(report, selection) if report is not None else rows_of_timelines(timelines, selection),
        coverage=report,
        traces=tuple(result["trace"] for result in results) if directory is not None else (),
    )
