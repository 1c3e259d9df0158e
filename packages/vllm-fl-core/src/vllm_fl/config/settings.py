"""The effective configuration of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vllm_fl.dispatch.parameters import ParameterPath
from vllm_fl.errors import did_you_mean

from .keys import KEYS
from .layer import OriginPath
from .names import KnownNames, unknown_names
from .problems import DEFAULT_ORIGIN, ConfigProblems, Origin

if TYPE_CHECKING:
    from vllm_fl.dispatch.policy import SelectionPolicy


class SettingRow(NamedTuple):
    """One line of the effective configuration.

    `item` is the operator of ``op_backends``, the path of a parameter or the entry of a set, else None. `value` is the
    tokens of the operator, the text of the parameter's value, True for an entry of a set, else the value of the key. A
    set without entries has one row: None means no restriction, an empty tuple an empty set.
    """

    key: str
    item: str | None
    value: Any
    origin: Origin


@dataclass(frozen=True)
class Settings:
    """Every key of the configuration (:data:`vllm_fl.config.KEYS`), merged; immutable.

    `warnings` are about variables that are known and have no effect; :func:`vllm_fl.config.get_settings` logs them.
    """

    prefer: Literal["flagos", "vendor", "reference"] = "flagos"
    strict: bool = False
    op_backends: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    parameters: Mapping[ParameterPath, str] = field(default_factory=lambda: MappingProxyType({}))
    allow_vendors: frozenset[str] | None = None
    deny_vendors: frozenset[str] = frozenset()
    use_flaggems: bool = True
    flagos_whitelist: frozenset[str] | None = None
    flagos_blacklist: frozenset[str] = frozenset()
    oot_enabled: bool = True
    oot_whitelist: frozenset[str] | None = None
    oot_blacklist: frozenset[str] = frozenset()
    prefer_enabled: bool = True
    platform: str | None = None
    comm: str | None = None
    comm_timeout: float = 600.0
    comm_custom_all_reduce: bool | None = None
    comm_custom_max_bytes: int = 8 << 20
    plugin_modules: tuple[str, ...] = ()
    log_level: str = "INFO"
    dispatch_debug: bool = False
    oplist_path: Path | None = None
    trace_dir: Path | None = None
    warnings: tuple[str, ...] = ()
    origins: Mapping[OriginPath, Origin] = field(
        default_factory=lambda: MappingProxyType({}), repr=False, compare=False
    )

    def origin(self, key: str, item: str | ParameterPath | None = None) -> Origin:
        """Where the value of `key` comes from, or that of an item (an operator, a parameter, an entry of a set).

        Raises:
            KeyError: there is no such key, or it has no such item.
        """
        if key not in KEYS:
            raise KeyError(f"no configuration key {key!r}{did_you_mean(key, KEYS)}")
        if item is None:
            return self.origins.get((key,), DEFAULT_ORIGIN)
        value = getattr(self, key)
        held = value if isinstance(value, (Mapping, frozenset, tuple)) else ()
        if item not in held:
            raise KeyError(f"{key} has no item {str(item)!r}{did_you_mean(str(item), map(str, held))}")
        path = (key, item) if isinstance(item, str) else (key, *item)
        return self.origins.get(path, DEFAULT_ORIGIN)

    def policy(self) -> SelectionPolicy:
        """The policy that these settings ask for. No kind flagos if ``USE_FLAGGEMS`` or all of us is off."""
        from vllm_fl.dispatch.policy import SelectionPolicy

        return SelectionPolicy(
            prefer=self.prefer,
            strict=self.strict,
            per_op_order=tuple(sorted(self.op_backends.items())),
            deny_vendors=self.deny_vendors,
            allow_vendors=self.allow_vendors,
            flagos_enabled=self.use_flaggems and self.prefer_enabled,
            flagos_whitelist=self.flagos_whitelist,
            flagos_blacklist=self.flagos_blacklist,
            parameters=tuple(sorted(self.parameters.items())),
        )

    def describe(self) -> list[SettingRow]:
        """Every effective value with its origin, in the order of the documentation."""
        rows: list[SettingRow] = []
        for key in KEYS:
            value = getattr(self, key)
            if isinstance(value, Mapping) and value:
                rows.extend(SettingRow(key, str(item), value[item], self.origin(key, item)) for item in value)
            elif isinstance(value, (frozenset, tuple)) and value:
                ordered = sorted(value) if isinstance(value, frozenset) else value
                rows.extend(SettingRow(key, item, True, self.origin(key, item)) for item in ordered)
            else:
                empty = isinstance(value, (Mapping, frozenset, tuple))
                rows.append(SettingRow(key, None, () if empty else value, self.origin(key)))
        return rows

    def check_names(self, names: KnownNames) -> None:
        """Check every name that only the registered backends can know; call it when all of them have registered.

        Raises:
            ConfigError: at least one name is unknown; the message lists all of them with their places.
        """
        found = unknown_names(self, self.origins, names)
        if found:
            raise ConfigProblems(found)
