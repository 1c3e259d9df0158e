"""Configuration of vllm-fl: four layers, merged item by item, and the origin of every value.

``VLLM_FL_CONFIG`` file > environment > platform file of the vendor's distribution > defaults. What a layer does not
name falls through to the layer below. Whatever is wrong is reported, all of it at once, by :class:`ConfigError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from vllm_fl.logging import get_logger, set_log_level

from .environment import ENVIRONMENT, UNSUPPORTED, Variable, environment_layers, variable_place
from .keys import KEYS, Key
from .layer import Layer, file_layer, line_and_column, platform_layer
from .merge import Merged, conflicts, merge
from .model import expanded, is_edit, json_schema
from .names import KnownNames, unknown_names
from .problems import DEFAULT_ORIGIN, ConfigProblems, Origin, Problem
from .settings import SettingRow, Settings

CONFIG_ENV = "VLLM_FL_CONFIG"


class PlatformFile(Protocol):
    """A file by path, or package data inside whatever holds the package."""

    @property
    def name(self) -> str: ...

    def read_bytes(self) -> bytes: ...


def load_settings(environ: Mapping[str, str], platform_file: PlatformFile | None = None) -> Settings:
    """Merge the file that `environ` names, `environ` and `platform_file`; reads nothing else.

    Raises:
        ConfigError: anything in any of the layers is wrong; ``error.problems`` lists all of it.
    """
    platform, problems = _read_platform(platform_file)
    user, user_problems, warnings = _user_layers(environ)
    problems += user_problems
    if problems:
        raise ConfigProblems(problems)
    merged = merge([platform, *user])
    if merged.problems:
        raise ConfigProblems(merged.problems)
    return _settings(merged, tuple(warnings))


def load_file(path: str | Path) -> Settings:
    """The settings of one user's file over the defaults, whatever the environment and the platform say.

    Raises:
        ConfigError: the file cannot be read, or anything in it is wrong.
    """
    layer, problems = file_layer(Path(path), "")
    if problems:
        raise ConfigProblems(problems)
    merged = merge([layer])
    if merged.problems:
        raise ConfigProblems(merged.problems)
    return _settings(merged, ())


def user_value(key: str, environ: Mapping[str, str] | None = None) -> tuple[Any, Origin]:
    """The value of a key that no platform file may set, and where it is set; needs no platform.

    It is read from `environ` (the process's, if None) and the file that this names, at every call.

    Raises:
        ConfigError: anything in the user's file or in `environ` is wrong.
        ValueError: a platform file may set `key`; only :func:`get_settings` knows its value.
    """
    if KEYS[key].in_platform_file:
        raise ValueError(f"{key} may be set by a platform file; ask get_settings()")
    layers, problems, _ = _user_layers(os.environ if environ is None else environ)
    if problems:
        raise ConfigProblems(problems)
    for layer in reversed(layers):
        if key in layer.values:
            return layer.values[key], layer.origins[(key,)]
    return KEYS[key].default, DEFAULT_ORIGIN


def check_file(path: str | Path, names: KnownNames | None = None) -> list[Problem]:
    """Everything that is wrong with one user's file, whatever the other layers say; empty if nothing is.

    Names are checked against the known ones, if given.
    """
    layer, problems = file_layer(Path(path), "")
    # What edits another layer can only be judged together with that layer.
    standing = {key: value for key, value in layer.values.items() if not _edits(value)}
    merged = merge([Layer(standing, layer.origins)])
    unknown = unknown_names(_settings(merged, ()), merged.origins, names or KnownNames())
    # An edit's names can be judged by themselves.
    edits: dict[str, Any] = {
        key: frozenset(item[1:] for item in value) for key, value in layer.values.items() if key not in standing
    }
    unknown += unknown_names(replace(Settings(), **edits), layer.origins, names or KnownNames())
    return sorted(problems + conflicts(merged) + unknown, key=line_and_column)


def get_settings() -> Settings:
    """The settings of this process: read at the first call, then the same object until :func:`reset_settings`.

    Raises:
        ConfigError: the configuration is wrong.
        PlatformError: the platform whose file belongs to it cannot be determined.
    """
    cached = _cache.get("settings")
    if cached is not None:
        return cached
    settings = load_settings(os.environ, _platform_file())
    # No lock: one that another thread holds during a fork would stay locked in the child. Reading twice is harmless.
    kept = _cache.setdefault("settings", settings)
    if kept is settings:
        if settings.origin("log_level").layer == "file":  # the logger itself knows the variable and the default
            set_log_level(settings.log_level)
        for warning in settings.warnings:
            get_logger(__name__).warning("%s", warning)
    return kept


def reset_settings() -> None:
    """Forget the settings; the next :func:`get_settings` reads them again."""
    _cache.clear()


_cache: dict[str, Settings] = {}


def _platform_file() -> PlatformFile | None:
    # Switched off, we look for no platform, so that nothing about it can fail. No platform file may switch us off.
    if not user_value("prefer_enabled")[0]:
        return None
    from vllm_fl.plugins import platform_file, resolve_platform

    plugin = resolve_platform().plugin
    return platform_file(plugin) if plugin is not None else None


def _user_layers(environ: Mapping[str, str]) -> tuple[list[Layer], list[Problem], list[str]]:
    """Environment and file, from low to high."""
    layers, problems, warnings = environment_layers(environ)
    path = environ.get(CONFIG_ENV)
    if path is None:
        return layers, problems, warnings
    where = variable_place(CONFIG_ENV)
    if not path.strip():
        text = f"{path!r} is empty; give the path of a YAML file or unset the variable"
        return layers, [*problems, Problem(where, "", text)], warnings
    layer, file_problems = file_layer(expanded(path), where)
    return [*layers, layer], file_problems + problems, warnings


def _read_platform(platform_file: PlatformFile | None) -> tuple[Layer, list[Problem]]:
    if platform_file is None:
        return Layer(), []
    try:
        data = platform_file.read_bytes()
    except OSError as error:
        text = f"cannot be read: {error.strerror or error}; reinstall the distribution that it belongs to"
        return Layer(), [Problem(f"platform file {platform_file.name}", "", text)]
    return platform_layer(data, platform_file.name)


def _edits(value: Any) -> bool:
    return isinstance(value, tuple) and is_edit(value)


def _settings(merged: Merged, warnings: tuple[str, ...]) -> Settings:
    values = dict(merged.values)
    values.update({key: MappingProxyType(values[key]) for key in ("op_backends", "parameters")})
    return Settings(**values, warnings=warnings, origins=MappingProxyType(merged.origins))


__all__ = [
    "CONFIG_ENV",
    "ENVIRONMENT",
    "KEYS",
    "UNSUPPORTED",
    "ConfigProblems",
    "Key",
    "KnownNames",
    "Origin",
    "PlatformFile",
    "Problem",
    "SettingRow",
    "Settings",
    "Variable",
    "check_file",
    "get_settings",
    "json_schema",
    "load_file",
    "load_settings",
    "reset_settings",
    "user_value",
]
