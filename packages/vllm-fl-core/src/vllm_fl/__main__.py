"""``python -m vllm_fl``: the command line, the same as ``vllm-fl``."""

from __future__ import annotations

import sys

from vllm_fl.cli import main

if __name__ == "__main__":
    sys.exit(main())
