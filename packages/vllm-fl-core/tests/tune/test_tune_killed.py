"""A search that is killed at any point goes on as if it had not been: at every write to the study, and between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from sqlalchemy import event
from test_tune_search import RULE, SPACE, Steady

from vllm_fl.tune import Study, search

CHANGES = [{"gate": "slow"}, {"gate": "worst"}, {"norm": "fast"}]


class Killed(BaseException):
    """Ends a search where nothing else would: no handler of it, of Optuna or of SQLAlchemy comes into play."""


def storage_that_dies(url: str, write: int) -> Any:
    """An Optuna storage that raises Killed in the place of its commit number `write`, which is lost."""
    storage = optuna.storages.RDBStorage(url)
    commits = 0

    def count(_: Any) -> None:
        nonlocal commits
        commits += 1
        if commits > write:
            raise Killed

    event.listen(storage.scoped_session.session_factory, "before_commit", count)
    return storage


def resumed(url: str) -> tuple[Study, list[Any]]:
    study = Study(SPACE, storage=url, sampler="greedy", resume=True)
    return study, list(study.history().trials)


def still_running(study: Study) -> list[Any]:
    """One of which nobody knows yet who runs it does no harm; it may be another machine's."""
    return [t for t in study.optuna.trials if t.state is optuna.trial.TrialState.RUNNING and t.user_attrs]


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_write(tmp_path: Path, step: int) -> None:
    finished = []
    for write in range(0, 1000, step):
        url = f"sqlite:///{tmp_path / f'{write}.db'}"
        storage = storage_that_dies(url, write)
        try:
            search(Study(SPACE, storage=storage, sampler="greedy"), Steady(), rule=RULE)
        except Killed:
            storage.scoped_session.remove()  # closes the file, as the end of a process does
            study, before = resumed(url)
        else:
            break  # there are no more writes
        finished.append(len(before))
        found = search(study, Steady(), rule=RULE)
        assert list(found.history.trials[: len(before)]) == before
        assert found.mix == {"norm": "fast", "gate": "fast"}
        assert [trial.changed for trial in found.history.trials[:3]] == CHANGES
        assert still_running(study) == []
    assert finished == sorted(finished)
    assert finished[-1] > len(CHANGES)


PROGRAM = """
import os, signal, sys
sys.path.insert(0, {here!r})
from test_tune_search import RULE, SPACE, Steady, Study, search

class Killed(Steady):
    def measure(self, mix, variant):
        if self.calls == 19:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().measure(mix, variant)

search(Study(SPACE, storage={url!r}, sampler="greedy"), Killed(), rule=RULE)
"""


def test_kill_9_loses_the_running_trial_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    code = PROGRAM.format(here=str(Path(__file__).parent), url=url)
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    study, before = resumed(url)
    assert len(before) == 2
    found = search(study, Steady(), rule=RULE)
    assert list(found.history.trials[:2]) == before
    assert found.mix == {"norm": "fast", "gate": "fast"}
    assert still_running(study) == []
    assert [trial.changed for trial in found.history.trials[:3]] == CHANGES
