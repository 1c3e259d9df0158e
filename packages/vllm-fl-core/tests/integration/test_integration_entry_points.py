"""The two entry points: what they answer, and that a mistake in the configuration cannot pass unseen."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

import vllm_fl.integration as integration
from vllm_fl.config import reset_settings
from vllm_fl.errors import ConfigError, PlatformError
from vllm_fl.logging import get_logger
from vllm_fl.plugins import installed_backends, reset_platform


@pytest.fixture
def probe(clean_settings: pytest.MonkeyPatch) -> Any:
    """platform_plugin with these environment variables, in a state as at start-up."""

    def run(**environment: str) -> str | None:
        clean_settings.setattr(integration, "_probe_error", None)
        for name, value in environment.items():
            clean_settings.setenv(name, value)
        reset_settings()
        reset_platform()
        return integration.platform_plugin()

    yield run
    reset_platform()


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


@pytest.fixture
def logged(clean_settings: pytest.MonkeyPatch) -> Any:
    handler, logger = Records(), get_logger(integration.__name__)
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


def test_importing_the_entry_points_imports_nothing_heavy() -> None:
    code = "import sys, vllm_fl.integration; print(sorted({'torch', 'vllm', 'pydantic', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_probe_imports_nothing_of_vllm() -> None:
    code = (
        "import sys, vllm_fl.integration as i; print(i.platform_plugin());"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["vllm_fl_reference.platform.ReferencePlatform", "[]"]


def test_the_probe_names_the_platform_class(probe: Any) -> None:
    assert probe() == "vllm_fl_reference.platform.ReferencePlatform"


@pytest.mark.parametrize("text", ["0", "false", "no", "off", " OFF "])
def test_switched_off_there_is_no_platform_whatever_else_is_wrong(probe: Any, logged: Any, text: str) -> None:
    assert probe(VLLM_FL_PREFER_ENABLED=text, VLLM_FL_PREFER="nonsense") is None
    assert logged == []
    integration.general_plugin()


def test_switched_off_by_a_file(probe: Any, tmp_path: Any) -> None:
    (tmp_path / "off.yaml").write_text("prefer_enabled: false\n")
    assert probe(VLLM_FL_CONFIG=str(tmp_path / "off.yaml")) is None


#: Of whatever distributions this environment has.
PLATFORMS = ", ".join(sorted(b.plugin.name for b in installed_backends() if b.plugin and b.plugin.platform))
MISTAKES = {
    "prefer": (
        {"VLLM_FL_PREFER": "flaggems"},
        ConfigError,
        "environment variable VLLM_FL_PREFER: 'flaggems' is not one of flagos, vendor, reference;"
        " did you mean 'flagos'?",
    ),
    "platform": (
        {"VLLM_FL_PLATFORM": "referense"},
        PlatformError,
        "environment variable VLLM_FL_PLATFORM: platform 'referense' is not installed (installed platforms:"
        f" {PLATFORMS}; to install it: pip install vllm-fl-referense); did you mean 'reference'?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_logged_once_and_raised_by_the_general_plugin(probe: Any, logged: Any, mistake: str) -> None:
    environment, kind, message = MISTAKES[mistake]
    assert probe(**environment) is None
    assert integration.platform_plugin() is None  # vLLM asks twice
    assert logged == [("ERROR", message)]
    with pytest.raises(kind) as caught:
        integration.general_plugin()
    assert str(caught.value) == message


def test_a_bad_log_level_is_raised_by_the_general_plugin(probe: Any) -> None:
    assert probe(VLLM_FL_LOG_LEVEL="LOUD") is None
    with pytest.raises(ConfigError) as caught:
        integration.general_plugin()
    assert str(caught.value) == (
        "environment variable VLLM_FL_LOG_LEVEL: 'LOUD' is not one of DEBUG, INFO, WARNING, ERROR, CRITICAL"
    )


def test_a_defect_of_ours_is_logged_with_its_traceback_and_raised(
    probe: Any, logged: Any, clean_settings: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("of the test")

    clean_settings.setattr("vllm_fl.plugins.resolve_platform", broken)
    assert probe() is None
    assert logged == [("ERROR", "the choice of a platform failed; please report this as a bug of vllm-fl")]
    with pytest.raises(ZeroDivisionError, match="of the test"):
        integration.general_plugin()


def test_replacing_aten_needs_our_worker(clean_settings: pytest.MonkeyPatch, logged: Any) -> None:
    from vllm.platforms import current_platform

    clean_settings.setenv("VLLM_FL_FLAGOS_WHITELIST", "mm")
    clean_settings.setattr(type(current_platform), "worker_cls", "")
    clean_settings.setattr(integration, "_warned", set())
    clean_settings.setattr("vllm_fl.integration.layers.register", lambda native_vendor: None)
    reset_settings()
    integration.general_plugin()
    assert logged == [
        (
            "WARNING",
            "no ATen function is replaced, although flagos_whitelist names ATen functions (environment variable"
            " VLLM_FL_FLAGOS_WHITELIST): the platform ReferencePlatform names no worker_cls with FLWorkerMixin, which"
            " does it",
        )
    ]


def test_the_general_plugin_may_be_called_again() -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    before = dict(op_registry_oot)
    integration.general_plugin()
    integration.general_plugin()
    assert op_registry_oot == before
    assert "SiluAndMul" in before


def test_a_version_outside_the_range_is_warned_about_once(logged: Any, clean_settings: pytest.MonkeyPatch) -> None:
    clean_settings.setattr("vllm_fl.plugins.requirements.installed_vllm", lambda: "0.99.0")
    clean_settings.setattr(integration, "_warned", set())
    integration.general_plugin()
    integration.general_plugin()
    assert [level for level, _ in logged] == ["WARNING"]
    assert "vLLM 0.99.0 is outside the range that vllm-fl-core" in logged[0][1]


def test_on_a_platform_of_vllm_nothing_is_installed(
    probe: Any, logged: Any, clean_settings: pytest.MonkeyPatch
) -> None:
    import vllm.platforms
    from vllm import envs
    from vllm.platforms.interface import UnspecifiedPlatform

    def untouchable() -> None:
        raise AssertionError("installed")

    clean_settings.setattr(vllm.platforms, "_current_platform", UnspecifiedPlatform())
    clean_settings.setattr("vllm_fl.integration.compat.install", untouchable)
    clean_settings.setattr("vllm_fl.integration.layers.register", untouchable)
    clean_settings.setattr(envs, "environment_variables", {})
    clean_settings.setattr(integration, "_warned", set())
    clean_settings.setenv("VLLM_FL_PREFER", "reference")
    integration.general_plugin()
    integration.general_plugin()
    assert list(envs.environment_variables) == ["VLLM_FL_PREFER"]
    assert logged == [
        (
            "WARNING",
            "vLLM runs on its own platform UnspecifiedPlatform and did not ask for"
            " vllm_fl_reference.platform.ReferencePlatform (VLLM_TARGET_DEVICE=cpu has this effect): operator dispatch"
            " is off in this process",
        )
    ]
