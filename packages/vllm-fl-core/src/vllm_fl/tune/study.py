"""The study: Optuna keeps the trials and, where it is asked to, proposes them."""

from __future__ import annotations

import json
import math
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from vllm_fl.errors import ConfigError

from . import greedy
from .space import Mix, SearchSpace
from .trials import History, Trial

if TYPE_CHECKING:
    import optuna

#: greedy: one operator after the other, then pairs; tpe, gp: those of Optuna; auto: greedy, then tpe.
Sampler = Literal["auto", "greedy", "tpe", "gp"]
SAMPLERS: tuple[Sampler, ...] = ("auto", "greedy", "tpe", "gp")

_RECORD, _TASK, _OWNER, _SHARES = "vllm_fl_trial", "vllm_fl_task", "vllm_fl_owner", "vllm_fl_shares"
#: Proposals in a row that need no trial, after which a sampler of Optuna's has nothing new.
_PATIENCE = 64
#: Of fewer trials PED-ANOVA makes nothing but noise.
_LEAST_FOR_IMPORTANCES = 16


class Study:
    """A study of one search space.

    Args:
        space: what is searched.
        storage: an Optuna storage or its URL, such as ``sqlite:///study.db``; None keeps it in memory.
        name: of the study in the storage.
        sampler: one of :data:`SAMPLERS`.
        seed: of the sampler.
        resume: go on with the study if it exists.
        task: what else must be the same for trials to be comparable: model, workload, objective, versions.

    Raises:
        ConfigError: the study exists and `resume` is False, or it is one of something else.
    """

    def __init__(
        self,
        space: SearchSpace,
        *,
        storage: Any = None,
        name: str = "vllm-fl tune",
        sampler: Sampler = "auto",
        seed: int = 0,
        resume: bool = False,
        task: dict[str, Any] | None = None,
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space, self._kind = space, sampler
        self._records: dict[int, Trial] = {}  # by number; what is finished does not change
        self._distributions: dict[str, Any] = {
            name: optuna.distributions.CategoricalDistribution(values) for name, values in space.choices.items()
        }
        try:
            self.optuna: optuna.Study = optuna.create_study(
                storage=storage,
                study_name=name if storage is not None else None,
                sampler=_sampler(sampler, seed),
                direction="maximize",
                load_if_exists=resume,
            )
        except optuna.exceptions.DuplicatedStudyError:
            raise study_exists(name, storage) from None
        self._begin({"space": space.fingerprint(), **(task or {})})

    def history(self) -> History:
        """The finished trials, those of other machines included."""
        for trial in self.optuna.get_trials(deepcopy=False):
            if trial.number not in self._records and _RECORD in trial.user_attrs:
                self._records[trial.number] = Trial(**json.loads(trial.user_attrs[_RECORD]))
        return History(self.space, self._records.values())

    def ask(self, history: History) -> tuple[optuna.trial.Trial, Mix] | None:
        """The next trial and its mix; None if there is nothing left to try."""
        proposed = next(greedy.proposals(history), None) if self._kind in ("greedy", "auto") else None
        if proposed is not None:
            self.optuna.enqueue_trial(self.space.chosen(proposed))
        elif self._kind == "greedy" or len(history.tried) + 1 >= self.space.size:
            return None
        # What was proposed may have to wait: behind a proposal of another process, or of one that was killed.
        for _ in range(_PATIENCE):
            trial, mix = self._ask()
            if not history.rules_out(mix):
                return trial, mix
            self._pass_over(trial, mix, history)
        return None

    def tell(self, trial: optuna.trial.Trial, record: Trial) -> None:
        """Keep what came out of a trial: failures as failed, lost ones as pruned, the others with their ratio."""
        from optuna.trial import TrialState

        trial.set_user_attr(_RECORD, json.dumps(record.as_dict()))
        if record.outcome == "failed":
            self.optuna.tell(trial, state=TrialState.FAIL)
        else:
            self.optuna.tell(trial, record.total)

    def remaining(self, history: History) -> int | None:
        """How many trials the search still wants; None where only the budget ends it."""
        return greedy.remaining(history) if self._kind in ("greedy", "auto") else None

    def part(self, history: History, mix: Mix) -> float:
        """The part of the time left that a trial of `mix` should have; all of it where nothing says what comes next."""
        return greedy.part(history, mix) if self._kind in ("greedy", "auto") else 1.0

    def importances(self) -> dict[str, float]:
        """Operator to how much its implementation and parameters matter, between 0 and 1; empty if too few trials."""
        import optuna

        complete = self.optuna.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        if len(complete) < _LEAST_FOR_IMPORTANCES or len({trial.value for trial in complete}) < 2:
            return {}
        with _no_experimental_warnings():
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            try:
                found = optuna.importance.get_param_importances(self.optuna, evaluator=evaluator)
            except (RuntimeError, ValueError):  # Optuna's words for too little variety
                return {}
        return {
            operator.name: math.fsum(found[name] for name in found if name.partition(" ")[0] == operator.name)
            for operator in self.space.operators
        }

    def _ask(self) -> tuple[optuna.trial.Trial, Mix]:
        with _no_experimental_warnings():
            trial = self.optuna.ask(self._distributions)
        trial.set_user_attr(_OWNER, f"{socket.gethostname()}:{os.getpid()}")
        return trial, self.space.mix(trial.params)

    def _pass_over(self, trial: optuna.trial.Trial, mix: Mix, history: History) -> None:
        """Tell the sampler what is known of `mix` without a trial of it."""
        from optuna.trial import TrialState

        totals = [t.total for t in history.known if dict(t.mix) == mix and t.outcome != "failed"]
        if mix == history.best:
            totals = [history.best_total]
        if totals:
            self.optuna.tell(trial, totals[-1])
        else:
            self.optuna.tell(trial, state=TrialState.PRUNED)

    def _begin(self, task: dict[str, Any]) -> None:
        import optuna

        kept = self.optuna.user_attrs.get(_TASK)
        if kept is None:
            self.optuna.set_user_attr(_SHARES, {o.name: o.share for o in self.space.operators})
            self.optuna.set_user_attr(_TASK, task)
            baseline = optuna.trial.create_trial(
                params=self.space.chosen(self.space.baseline), distributions=self._distributions, value=0.0
            )
            self.optuna.add_trial(baseline)
            return
        different = {key: value for key, value in task.items() if kept.get(key) != value}
        other = [f"{key} is {kept.get(key)!r} there and {value!r} here" for key, value in different.items()]
        if other:
            text = f"the study {self.optuna.study_name!r} is one of something else: {'; '.join(other)}"
            raise ConfigError(f"{text}; give the same again, or begin a new study")
        self._end_interrupted()

    def _end_interrupted(self) -> None:
        """End the trials of processes of this machine that are gone; those of other machines may be running."""
        import optuna

        for trial in self.optuna.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,)):
            host, _, pid = str(trial.user_attrs.get(_OWNER, "")).rpartition(":")
            if host == socket.gethostname() and not _is_alive(int(pid)):
                self.optuna.tell(trial.number, state=optuna.trial.TrialState.FAIL)


def open_storage(storage: Any) -> Any:
    """The Optuna storage of a URL; anything else is given back as it is.

    Raises:
        ConfigError: there is no storage at the URL, or a package that it needs is missing.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    if not isinstance(storage, str):
        return storage
    try:
        return optuna.storages.get_storage(storage)
    except (ImportError, ValueError, SQLAlchemyError) as error:
        first = str(error).splitlines()[0]
        text = f"the storage {storage!r} cannot be opened ({first}); give a URL such as sqlite:///study.db"
        raise ConfigError(text) from None


def kept_shares(storage: Any, name: str) -> dict[str, float] | None:
    """Operator to share of the study of this name, so that another profile does not change what is searched.

    None if there is no such study.
    """
    import optuna

    if storage is None:
        return None
    try:
        return dict(optuna.load_study(study_name=name, storage=storage).user_attrs.get(_SHARES, {}))
    except KeyError:
        return None


def study_exists(name: str, storage: Any) -> ConfigError:
    """The error for a study that is there and was not to be gone on with."""
    return ConfigError(f"the study {name!r} exists in {storage}; pass --resume to go on with it, or remove it")


def _sampler(kind: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    with _no_experimental_warnings():
        if kind == "greedy":
            return optuna.samplers.RandomSampler(seed=seed)  # is never asked: every trial is enqueued
        if kind == "gp":
            return optuna.samplers.GPSampler(seed=seed, deterministic_objective=False)
        return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


@contextmanager
def _no_experimental_warnings() -> Iterator[None]:
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
