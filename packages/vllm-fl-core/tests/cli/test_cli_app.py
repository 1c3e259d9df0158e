"""The application around the commands: help, version, exit codes, what it imports."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import get_type_hints

import pytest
import typer
from typer.models import OptionInfo

from vllm_fl import __version__
from vllm_fl.cli import main
from vllm_fl.cli.app import build_app
from vllm_fl.cli.exits import user_errors
from vllm_fl.errors import CommandError, ConfigError, Exit, NoImplementationError

HEAVY = ("torch", "transformers", "vllm", "numpy")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vllm-fl {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["quickstart", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "quickstart" in capsys.readouterr().out


def test_module_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "vllm_fl", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"vllm-fl {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom vllm_fl.cli import main\nmain(['quickstart', '--help'])\n"
        f"sys.exit(' '.join(name for name in {HEAVY} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_importing_the_package_imports_no_command_line() -> None:
    code = "import sys, vllm_fl.cli\nsys.exit(' '.join(n for n in ('typer', 'rich', 'click') if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vanish"], "No such command 'vanish'"),
        (["quickstart", "--bogus"], "No such option: --bogus"),
        (["quickstart", "--dtype", "float8"], "'float8' is not one of"),
        (["quickstart", "--max-tokens", "0"], "Invalid value for '--max-tokens'"),
        (["quickstart", "--port", "8123"], "Error: --port is for --serve.\nRemedy: Add --serve, or leave --port out."),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (
            CommandError("It broke.", "Mend it.", Exit.MISSING, "/a/log"),
            3,
            "Error: It broke.\nRemedy: Mend it.\nLog: /a/log\n",
        ),
        (CommandError("It broke."), 1, "Error: It broke.\n"),
        (ConfigError("VLLM_FL_STRICT: 'maybe' is wrong"), 2, "Error: VLLM_FL_STRICT: 'maybe' is wrong\n"),
        (NoImplementationError("rms_norm: [none] is left"), 1, "Error: rms_norm: [none] is left\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
    ids=["missing", "failed", "configuration", "other", "interrupted"],
)
def test_errors_of_the_user(error: BaseException, code: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, user_errors():
        raise error
    assert caught.value.exit_code == code
    captured = capsys.readouterr()
    assert captured.err == shown
    assert captured.out == ""


def test_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, user_errors():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere")
    assert caught.value.exit_code == 3
    assert capsys.readouterr().err == (
        "Error: [Errno 28] No space left on device: '/somewhere'\n"
        "Remedy: Make room or choose another place (XDG_CACHE_HOME moves the cache, TMPDIR the temporary files).\n"
    )


def test_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError), user_errors():
        _ = 1 / 0
    with pytest.raises(OSError, match="nobody"), user_errors():
        raise OSError(errno.ESRCH, "nobody")


def test_errors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), user_errors(as_json=True):
        raise CommandError("It broke.", "Mend it.", Exit.MISSING, "/a/log")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"error": "It broke.", "remedy": "Mend it.", "log": "/a/log", "exit_code": 3}
    assert captured.err == ""


def test_no_option_is_named_by_its_placeholder() -> None:
    """Typer 0.27 takes a metavar that is the parameter's name in capitals for the option's name."""
    wrong = [
        f"{command.callback.__name__}: --{name}"
        for command in build_app().registered_commands
        for name, hint in get_type_hints(command.callback, include_extras=True).items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, OptionInfo) and (option.metavar or "").lower() == name
        if not str(option.default).startswith("--")  # under Annotated the first name is kept there
    ]
    assert not wrong
