"""Whether what a backend names by a path is there."""

from __future__ import annotations

from vllm_fl.plugins import load_object


def unimportable(path: str) -> str | None:
    """Why ``"package.module.Class"`` (or ``"package.module:Class"``) cannot be imported; None if it can.

    What only fails because vLLM is not installed is not judged.
    """
    target = path if ":" in path else ":".join(path.rpartition(".")[::2])
    try:
        load_object(target)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "vllm":
            return f"{path!r} cannot be imported: {error}"
    except Exception as error:  # importing a vendor's module may fail in any way
        return f"{path!r} cannot be imported: {type(error).__name__}: {error}"
    return None
