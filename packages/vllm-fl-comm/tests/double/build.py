"""Builds the simulated FlagCX: ``python build.py FOLDER [--form 12|13|14] [-D NAME]...`` makes FOLDER/lib/libflagcx.so.

``FLAGCX_PATH=FOLDER`` then uses it. It serves tensors in host memory over shared memory of one host; see double.c.
``--over-nccl`` builds the other stand-in, over_nccl.c: the same interface over the NCCL that PyTorch has loaded.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FORMS = (12, 13, 14)


def build(folder: Path, form: int = 13, defines: Sequence[str] = (), source: str = "double.c") -> Path:
    """Compile `source` into ``folder/lib/libflagcx.so`` and return that folder.

    Raises:
        RuntimeError: there is no C compiler, or it fails; with its output.
    """
    library = folder / "lib" / "libflagcx.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    command = ["cc", *flags, f"-DFORM={form}", *(f"-D{name}" for name in defines)]
    command += ["-o", str(library), str(HERE / source), "-ldl", "-lrt"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError("there is no C compiler; apt-get install gcc libc6-dev") from None
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr}")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--form", type=int, choices=FORMS, default=13, help="form of the interface (default: 13)")
    parser.add_argument("--over-nccl", action="store_true", help="for NVIDIA GPUs, over NCCL")
    parser.add_argument("-D", dest="defines", action="append", default=[], metavar="NAME", help="CUSTOM, WITHOUT_ABORT")
    options = parser.parse_args()
    source = "over_nccl.c" if options.over_nccl else "double.c"
    print(build(options.folder, options.form, options.defines, source))


if __name__ == "__main__":
    main()
