"""The table of environment variables, the generated documentation, and the settings of the process."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import vllm_fl
from vllm_fl.config import (
    ENVIRONMENT,
    KEYS,
    UNSUPPORTED,
    Settings,
    docs,
    get_settings,
    json_schema,
    load_file,
    reset_settings,
    user_value,
)
from vllm_fl.config.model import LayerModel
from vllm_fl.errors import ConfigError
from vllm_fl.logging import ROOT, get_logger
from vllm_fl.plugins import BackendPlugin, PlatformChoice

Load = Callable[..., Settings]

DOCUMENT = Path(__file__).parents[4] / "docs" / "configuration.md"

VALUES = {
    "VLLM_FL_PLATFORM": ("ascend", "platform", "ascend"),
    "VLLM_FL_PREFER": ("vendor", "prefer", "vendor"),
    "VLLM_FL_PREFER_ENABLED": ("0", "prefer_enabled", False),
    "VLLM_FL_STRICT": ("1", "strict", True),
    "VLLM_FL_PER_OP": ("a=vendor|flagos", "op_backends", {"a": ("vendor", "flagos")}),
    "VLLM_FL_OP_CONFIG": ('{"a": "vendor"}', "op_backends", {"a": ("vendor",)}),
    "VLLM_FL_ALLOW_VENDORS": ("a,b", "allow_vendors", {"a", "b"}),
    "VLLM_FL_DENY_VENDORS": ("a,b", "deny_vendors", {"a", "b"}),
    "USE_FLAGGEMS": ("0", "use_flaggems", False),
    "VLLM_FL_FLAGOS_WHITELIST": ("a,b", "flagos_whitelist", {"a", "b"}),
    "VLLM_FL_FLAGOS_BLACKLIST": ("a,b", "flagos_blacklist", {"a", "b"}),
    "VLLM_FL_FLAGOS_BLACKLIST_APPEND": ("a,b", "flagos_blacklist", {"a", "b"}),
    "VLLM_FL_OOT_ENABLED": ("0", "oot_enabled", False),
    "VLLM_FL_OOT_WHITELIST": ("a,b", "oot_whitelist", {"a", "b"}),
    "VLLM_FL_OOT_BLACKLIST": ("a,b", "oot_blacklist", {"a", "b"}),
    "VLLM_FL_COMM": ("flagcx", "comm", "flagcx"),
    "VLLM_FL_COMM_TIMEOUT": ("1.5", "comm_timeout", 1.5),
    "VLLM_FL_COMM_CUSTOM_ALL_REDUCE": ("1", "comm_custom_all_reduce", True),
    "VLLM_FL_COMM_CUSTOM_MAX_BYTES": ("512KiB", "comm_custom_max_bytes", 512 << 10),
    "VLLM_FL_LOG_LEVEL": ("debug", "log_level", "DEBUG"),
    "VLLM_FL_DISPATCH_DEBUG": ("1", "dispatch_debug", True),
    "VLLM_FL_PLUGIN_MODULES": ("a.b,c", "plugin_modules", ("a.b", "c")),
    "VLLM_FL_TRACE_DIR": ("a/b", "trace_dir", Path("a/b")),
    "FLAGGEMS_ENABLE_OPLIST_PATH": ("a/b.txt", "oplist_path", Path("a/b.txt")),
}


def test_every_variable_has_a_case() -> None:
    without_key = {"VLLM_FL_CONFIG", "VLLM_FL_TUNED", "FLAGCX_PATH", "FLAGCX_CUSTOM_OP_ENABLE"}
    assert set(VALUES) | without_key == set(ENVIRONMENT)


@pytest.mark.parametrize("name", VALUES)
def test_variable_sets_its_key(load: Load, name: str) -> None:
    text, key, expected = VALUES[name]
    settings = load(**{name: text})
    assert getattr(settings, key) == expected
    assert str(settings.origin(key)) == f"environment variable {name}"
    assert ENVIRONMENT[name].key == key


def test_another_distributions_variable_is_known(load: Load) -> None:
    assert load(FLAGCX_PATH="/opt/flagcx", FLAGCX_CUSTOM_OP_ENABLE="1") == Settings()


def test_variables_of_others_are_left_alone(load: Load) -> None:
    assert load(VLLM_PLUGINS="fl", HOME="/", FLAGGEMS_X="1", VLLMFL="1") == Settings()


@pytest.mark.parametrize("name", ["VLLM_FL_IO_DUMP", "VLLM_FL_IO_DUMP_OPS", "VLLM_FL_OP_FAST_PATH"])
def test_variable_of_the_field_without_effect_draws_a_warning(load: Load, name: str) -> None:
    settings = load(**{name: "1"})
    instead = UNSUPPORTED["VLLM_FL_IO_DUMP*" if "IO_DUMP" in name else name]
    assert settings.warnings == (f"environment variable {name} has no effect here: {instead}",)


def test_model_keys_and_settings_name_the_same() -> None:
    assert list(KEYS) == list(LayerModel.model_fields)
    assert [*KEYS, "warnings", "origins"] == list(inspect.signature(Settings).parameters)


def test_every_variable_that_the_source_names_is_in_the_table() -> None:
    known = {*ENVIRONMENT, *(name.rstrip("*") for name in UNSUPPORTED)}
    named = {
        (match, path.name)
        for path in Path(vllm_fl.__file__).parent.rglob("*.py")
        for match in re.findall(r"\bVLLM_FL_[A-Z][A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8"))
    }
    assert {(name, file) for name, file in named if name not in known} == set()


def test_documentation_is_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == docs.updated(text), "run: python -m vllm_fl.config.docs docs/configuration.md"
    for name in [*ENVIRONMENT, *KEYS, *UNSUPPORTED]:
        assert f"| `{name}` |" in text


def test_documentation_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("# A\n<!-- generated: keys -->\nold\n<!-- end -->\nend\n", encoding="utf-8")
    assert docs.main([str(path)]) == 0
    assert path.read_text(encoding="utf-8") == f"# A\n<!-- generated: keys -->\n{docs.key_table()}<!-- end -->\nend\n"
    assert docs.main([]) == 2


def test_documented_example_means_the_same_in_a_file_and_in_variables(load: Load) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    file, script = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0] for kind in ("yaml", "sh"))
    environ = dict(re.findall(r"export (\w+)='?(.*?)'?\n", script))
    platform = "flagos_blacklist: [bmm]\n"
    settings = load(file=file, platform=platform)
    assert settings == load(platform=platform, **environ)
    assert settings.flagos_blacklist == {"bmm", "mm"}
    assert settings.op_backends["silu_and_mul"] == ("vendor:acme", "reference")


def test_documented_mistakes_read_so(load: Load) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    expected = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0].rstrip()
    with pytest.raises(ConfigError) as caught:
        load(file="prefer: flaggems\nop_backends:\n  silu_and_mul: [vendorr:cuda]\n")
    assert str(caught.value) == expected


def test_json_schema_accepts_what_the_model_accepts() -> None:
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert list(schema["properties"]) == list(KEYS)
    properties = schema["properties"]
    assert properties["prefer"]["enum"] == ["flagos", "vendor", "reference"]
    assert {kind.get("type") for kind in properties["deny_vendors"]["anyOf"]} == {"array", "string"}
    tokens = properties["op_backends"]["additionalProperties"]
    assert {kind.get("type") for kind in tokens["anyOf"]} == {"array", "string"}
    word = next(kind["pattern"] for kind in properties["strict"]["anyOf"] if "pattern" in kind)
    assert [bool(re.search(word, text)) for text in ("Yes", "off", "maybe", "ono")] == [True, True, False, False]
    assert all(properties[key]["description"] == KEYS[key].help for key in KEYS)
    assert not any("default" in description for description in properties.values())


def no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_fl.plugins.resolve_platform", lambda: PlatformChoice(None, "none"))


def test_settings_of_the_process_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    no_platform(monkeypatch)
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    first = get_settings()
    monkeypatch.setenv("VLLM_FL_PREFER", "reference")
    assert get_settings() is first
    assert first.prefer == "vendor"
    reset_settings()
    assert get_settings().prefer == "reference"


def test_wrong_settings_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    no_platform(monkeypatch)
    monkeypatch.setenv("VLLM_FL_PREFER", "x")
    with pytest.raises(ConfigError):
        get_settings()
    monkeypatch.setenv("VLLM_FL_PREFER", "vendor")
    assert get_settings().prefer == "vendor"


def test_platform_file_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "acme_settings"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "acme.yaml").write_text("strict: yes\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugin = BackendPlugin("acme", "vendor", vendor="acme", config="acme_settings:acme.yaml")  # type: ignore[arg-type]
    monkeypatch.setattr("vllm_fl.plugins.resolve_platform", lambda: PlatformChoice(plugin, "for the test"))
    settings = get_settings()
    assert (settings.strict, str(settings.origin("strict"))) == (True, "platform file acme.yaml:1:1")


def test_switched_off_no_platform_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_fl.plugins.resolve_platform", lambda: pytest.fail("looked for a platform"))
    monkeypatch.setenv("VLLM_FL_PREFER_ENABLED", "0")
    assert get_settings().prefer_enabled is False


def test_warnings_are_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    no_platform(monkeypatch)
    monkeypatch.setenv("VLLM_FL_OP_FAST_PATH", "0")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", records.append)
    get_logger().addHandler(handler)
    try:
        get_settings()
        get_settings()
    finally:
        get_logger().removeHandler(handler)
    assert [(r.levelno, r.getMessage()) for r in records] == [(logging.WARNING, get_settings().warnings[0])]


def test_two_threads_that_come_first_share_one_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger(ROOT)
    monkeypatch.setattr(root, "handlers", [])
    add = root.addHandler

    def slowly(handler: logging.Handler) -> None:
        time.sleep(0.05)
        add(handler)

    monkeypatch.setattr(root, "addHandler", slowly)
    threads = [threading.Thread(target=get_logger) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(root.handlers) == 1


def test_log_level_of_a_file_takes_effect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_platform(monkeypatch)
    logger = get_logger()
    monkeypatch.setattr(logger, "level", logger.level)  # restored afterwards
    path = tmp_path / "a.yaml"
    path.write_text("log_level: error\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", str(path))
    get_settings()
    assert logger.level == logging.ERROR


def test_value_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("platform: ascend\n")

    def platform(**environ: str) -> tuple[str | None, str]:
        value, origin = user_value("platform", environ)
        return value, str(origin)

    assert platform() == (None, "default")
    assert platform(VLLM_FL_PLATFORM="nvidia") == ("nvidia", "environment variable VLLM_FL_PLATFORM")
    assert platform(VLLM_FL_PLATFORM="nvidia", VLLM_FL_CONFIG=str(path)) == ("ascend", f"{path}:1:1")
    # Only together with the platform's list can the edit be judged, and that is not asked here.
    assert platform(VLLM_FL_FLAGOS_BLACKLIST="-mm") == (None, "default")
    with pytest.raises(ConfigError, match="VLLM_FL_PREFER"):
        platform(VLLM_FL_PREFER="x")
    with pytest.raises(ValueError, match=r"^strict may be set by a platform file; ask get_settings\(\)$"):
        user_value("strict", {})


def test_one_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("prefer: vendor\n")
    monkeypatch.setenv("VLLM_FL_STRICT", "1")
    settings = load_file(path)
    assert (settings.prefer, settings.strict) == ("vendor", False)
    assert str(settings.origin("prefer")) == f"{path}:1:1"
    path.write_text("prefer: vendr\nstrict: x\n")
    with pytest.raises(ConfigError, match="2 problems in the configuration"):
        load_file(path)
    path.write_text("oot_blacklist: -a\n")
    with pytest.raises(ConfigError, match="'-a' removes nothing"):
        load_file(path)
    path.unlink()
    with pytest.raises(ConfigError) as caught:
        load_file(path)
    assert str(caught.value) == f"file '{path}' does not exist; give the path of a YAML file"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("vllm_fl", ["torch", "vllm", "pydantic", "yaml"]),
        ("vllm_fl.dispatch", ["torch", "vllm", "pydantic", "yaml"]),
        ("vllm_fl.plugins", ["torch", "vllm", "pydantic", "yaml"]),
        ("vllm_fl.config", ["torch", "vllm"]),
    ],
)
def test_importing_loads_nothing_heavy(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert result.stdout == "[]\n"
