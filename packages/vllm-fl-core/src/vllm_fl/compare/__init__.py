"""Numbers of one implementation against another: alone, inside a running model, and which of many is to blame.

Importing this package imports torch, and neither vLLM nor any backend.
"""

from __future__ import annotations

from .bisect import Bisection, bisect_model
from .dumps import Dump, DumpError, Replayed, load_dump, replay
from .model import Comparison, LayerDifference, OperatorDifference, TokenDifference, compare_model
from .operators import NothingToCompareError, OperatorResult, compare_operator
from .places import Filters, Place, parse_numbers
from .values import Difference, measure

__all__ = [
    "Bisection",
    "Comparison",
    "Difference",
    "Dump",
    "DumpError",
    "Filters",
    "LayerDifference",
    "NothingToCompareError",
    "OperatorDifference",
    "OperatorResult",
    "Place",
    "Replayed",
    "TokenDifference",
    "bisect_model",
    "compare_model",
    "compare_operator",
    "load_dump",
    "measure",
    "parse_numbers",
    "replay",
]
