"""In the place of the process with the engine: it does with each command what the policy chooses for ``norm``."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from vllm_fl.errors import CommandError, Exit
from vllm_fl.tune.space import Dimension


def answer(command: str, arguments: tuple[Any, ...]) -> Any:
    if command == "start":
        return None
    if command == "profile":
        return {"norm": 0.4, "attention_backend": 0.5}
    if command == "dimensions":
        block = Dimension("block", ("32", "64", "128"), "64")
        warps = [Dimension(f"warps.{bucket}", ("2", "4"), "4") for bucket in ("decode", "prefill")]
        return {"norm": {"good": (block, *warps)}}
    if command == "accepted":
        return {
            "norm": ["good(block=128)", "raises", "hangs", "dies", "memory", "unused", "graphs"],
            "attention_backend": ["a", "b"],
        }
    chosen = arguments[0]["op_backends"]["norm"][0].removeprefix("impl:")
    if chosen == "raises":
        raise ValueError("planted\nwith more lines")
    if chosen == "memory":
        raise RuntimeError("CUDA out of memory. Tried to allocate")
    if chosen == "graphs":
        raise CommandError("planted graphs", "none", Exit.USAGE)
    if chosen == "hangs":
        time.sleep(60)
    if chosen == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if command == "answers":
        return [], {"norm": {"good": 1}}
    return 0.5, 10, []


if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send(("ok", answer(command, arguments)))
        except CommandError as error:
            connection.send(("error", "CommandError", error.message, error.remedy, int(error.code)))
        except Exception as error:
            connection.send(("error", type(error).__name__, str(error), "", 1))
