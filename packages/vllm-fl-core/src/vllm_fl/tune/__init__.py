"""AutoTune: the mix of implementations that serves a workload best, measured end to end on a running engine.

Importing this package imports neither torch, vLLM nor Optuna.
"""

from __future__ import annotations

from .gate import Answer, Tolerance, judge
from .objectives import OBJECTIVES, Limits, Objective
from .report import TuneReport
from .search import BaselineFailedError, Budget, Found, Progress, search
from .sequential import Comparison, Rule, SequentialTest
from .space import Dimension, Mix, Operator, SearchSpace, changes, search_space
from .study import SAMPLERS, Sampler, Study
from .table import Entry, look_up, store, use_tuned
from .trials import History, Measurer, Trial, TrialFailed
from .tuner import Options, tune_model

__all__ = [
    # Tuning a model
    "Options",
    "TuneReport",
    "tune_model",
    # The search, on any measurer
    "BaselineFailedError",
    "Budget",
    "Dimension",
    "Found",
    "History",
    "Measurer",
    "Mix",
    "Operator",
    "Progress",
    "SAMPLERS",
    "Sampler",
    "SearchSpace",
    "Study",
    "Trial",
    "TrialFailed",
    "changes",
    "search",
    "search_space",
    # The decision
    "Comparison",
    "Rule",
    "SequentialTest",
    # Accuracy and objectives
    "Answer",
    "Limits",
    "OBJECTIVES",
    "Objective",
    "Tolerance",
    "judge",
    # The table
    "Entry",
    "look_up",
    "store",
    "use_tuned",
]
