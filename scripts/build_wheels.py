"""Build a source archive and a wheel of every distribution in packages/, the wheel from the archive.

    python3 scripts/build_wheels.py --out dist

Needs `build`, and hatchling too with --no-isolation (the dependency group `build` of pyproject.toml).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def packages(root: Path = ROOT) -> list[Path]:
    """The folders of the distributions, in alphabetical order."""
    return sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))


def build(package: Path, out: Path, isolation: bool) -> None:
    """Build `package` into `out`.

    Raises:
        subprocess.CalledProcessError: the build failed; its output is in the error's ``output``.
    """
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(package)]
    if not isolation:
        command.insert(3, "--no-isolation")
    subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build every distribution in packages/.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the results (default: dist)")
    parser.add_argument("--no-isolation", action="store_true", help="build with the hatchling that is installed")
    options = parser.parse_args(argv)
    for package in packages():
        try:
            build(package, options.out, isolation=not options.no_isolation)
        except subprocess.CalledProcessError as error:
            print(error.output, file=sys.stderr)
            print(f"error: {package.name} did not build", file=sys.stderr)
            return 1
        print(f"built {package.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
