"""Where there is no device the kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
