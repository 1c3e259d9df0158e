"""Runs one function of a test module in this process, which was started for it, and writes its result as JSON.

Started by the fixture `fresh` of conftest.py: ``python fresh.py MODULE_FILE FUNCTION ARGUMENTS_JSON ANSWER_FILE``.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def main(file: str, function: str, arguments: str, answer: str) -> None:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, function)(**json.loads(arguments))
    Path(answer).write_text(json.dumps(result))


if __name__ == "__main__":  # spawned workers import this file, too
    main(*sys.argv[1:])
