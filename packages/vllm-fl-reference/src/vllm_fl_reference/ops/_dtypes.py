"""The dtype in which the reference operators compute."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64: inputs of double precision make every operator here a float64 oracle."""
    return torch.float64 if dtype == torch.float64 else torch.float32
