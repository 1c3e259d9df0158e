"""Tuning a model from the profile to the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_fl.dispatch import SelectionPolicy, get_policy
from vllm_fl.engines import Workload
from vllm_fl.errors import CommandError, Exit

from .engine import EngineMeasurer
from .gate import Tolerance
from .objectives import Limits, Objective
from .report import TuneReport
from .search import Budget, Progress, search
from .sequential import Rule
from .study import Sampler, Study, kept_shares, open_storage, study_exists


@dataclass(frozen=True)
class Options:
    """How to tune.

    Args:
        objective, limits: what to tune for.
        sampler, seed: what proposes mixes.
        budget: when to stop.
        rule: how sure to be.
        tolerance: of the accuracy gate.
        min_share: operators with less of the time are left as they are.
        storage: an Optuna storage or its URL; None keeps the study in memory.
        name: of the study in the storage.
        resume: go on with a study that exists.
        hang_s: what takes longer is a hang; None goes by what the engine has shown.
    """

    objective: Objective = "throughput"
    limits: Limits = field(default_factory=Limits)
    sampler: Sampler = "auto"
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    rule: Rule = field(default_factory=Rule)
    tolerance: Tolerance = field(default_factory=Tolerance)
    min_share: float = 0.002
    storage: Any = None
    name: str = "vllm-fl tune"
    resume: bool = False
    hang_s: float | None = None


def tune_model(
    model: str,
    *,
    policy: SelectionPolicy | None = None,
    workload: Workload | None = None,
    arguments: Mapping[str, Any] | None = None,
    options: Options | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> TuneReport:
    """Start an engine, profile it, and search for the mix of implementations with the least cost.

    Args:
        model: name or directory of a model, as for ``vllm serve``.
        policy: that of the baseline; the present one if None. What it does not accept is not tried.
        workload: what the engine has to do.
        arguments: further arguments of vLLM's ``LLM``.
        options: how to tune.
        on_progress: called before each trial.

    Raises:
        CommandError: Optuna or vLLM is missing, the engine does not start, its graphs cannot be exchanged, or there is
            no choice.
        ConfigError: the configuration is wrong, or the study is one of something else.
        BaselineFailedError: the baseline itself does not run.
    """
    require_optuna()
    chosen, work = options or Options(), workload or Workload()
    storage = open_storage(chosen.storage)
    shares = kept_shares(storage, chosen.name)
    if shares is not None and not chosen.resume:
        raise study_exists(chosen.name, chosen.storage)
    with EngineMeasurer(
        {**(arguments or {}), "model": model},
        policy if policy is not None else get_policy(),
        work,
        objective=chosen.objective,
        limits=chosen.limits,
        tolerance=chosen.tolerance,
        hang_s=chosen.hang_s,
    ) as measurer:
        space, key = measurer.space(chosen.min_share, shares), measurer.key()
        if not space.operators:
            text = f"{model} has no operator with another implementation or a parameter to choose."
            raise CommandError(text, "Install a backend or FlagGems; `vllm-fl explain` lists what there is.")
        study = Study(
            space,
            storage=storage,
            name=chosen.name,
            sampler=chosen.sampler,
            seed=chosen.seed,
            resume=chosen.resume,
            task={
                **key,
                "workload": str(work),
                "objective": chosen.objective,
                "limits": str(chosen.limits) if chosen.objective == "goodput" else "",
                "arguments": {n: str(value) for n, value in sorted((arguments or {}).items()) if n != "model"},
            },
        )
        found = search(study, measurer, budget=chosen.budget, rule=chosen.rule, on_progress=on_progress)
        return TuneReport(
            model=model,
            objective=chosen.objective,
            workload=str(work),
            confidence=chosen.rule.confidence,
            space=space,
            found=found,
            policy=measurer.policy_of(found.mix),
            importances=study.importances(),
            key=key,
            engine_starts=measurer.starts,
            left_to_vllm=measurer.left_to_vllm(found.mix),
        )


def require_optuna() -> None:
    """Raises CommandError where what the search stands on is not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("optuna", "scipy") if find_spec(name) is None]
    if missing:
        remedy = "pip install 'vllm-fl-core[tune]'"
        raise CommandError(f"Not installed: {', '.join(missing)}.", remedy, Exit.MISSING)
