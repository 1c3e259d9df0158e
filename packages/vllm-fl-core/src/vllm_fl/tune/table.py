"""The table of what has been tuned: which orders of implementations to take for which model on which machine.

``VLLM_FL_TUNED=auto`` has the engine's configuration, and every worker, look the model up before it is built.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_fl.dispatch.parameters import ParameterPath, flat, problem_with
from vllm_fl.errors import ConfigError, did_you_mean
from vllm_fl.logging import get_logger

if TYPE_CHECKING:
    from vllm_fl.config import Settings

TUNED_ENV = "VLLM_FL_TUNED"
AUTO = "auto"
#: The parts of a key without which an entry says nothing about a run.
_ESSENTIAL = ("architecture", "shape", "dtype", "quantization", "device")
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_experts_per_tok",
    "vocab_size",
)
_NO_BACKENDS = ("Python", "numpy", "transformers")
#: The layers of the configuration that win over the table.
_USER = ("file", "environment")


@dataclass(frozen=True)
class Entry:
    """What was found for one model on one machine.

    Args:
        key: as of :func:`key_of`.
        op_backends: operator to tokens, as in a configuration file.
        ratio: cost of the baseline / that of this mix.
        parameters: operator to implementation to parameters, as in a configuration file.
    """

    key: Mapping[str, Any]
    op_backends: Mapping[str, Sequence[str]]
    ratio: float
    parameters: Mapping[str, Any] = field(default_factory=dict)


def table_directory() -> Path:
    """Where the entries are, a file each."""
    from vllm_fl.cache import cache_dir

    return cache_dir() / "tuned"


def key_of(vllm_config: Any) -> dict[str, Any]:
    """What a result holds for: model architecture and shape, dtype, device, tensor-parallel size, versions."""
    from vllm.platforms import current_platform

    from vllm_fl.diagnostics.versions import versions

    model = vllm_config.model_config
    text = model.hf_text_config
    return {
        "architecture": model.architectures[0],
        "shape": {name: getattr(text, name) for name in _SHAPE if getattr(text, name, None) is not None},
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "device": current_platform.get_device_name(),
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "versions": {name: found for name, found in versions().items() if name not in _NO_BACKENDS},
    }


def store(entry: Entry, directory: Path | None = None) -> Path:
    """Keep an entry; it takes the place of one with the same key."""
    folder = directory or table_directory()
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps(entry.key, sort_keys=True).encode()).hexdigest()[:12]
    path = folder / f"{entry.key['architecture']}-{digest}.json"
    partial = path.with_suffix(f".{os.getpid()}")
    plain = {"key": entry.key, "op_backends": dict(entry.op_backends), "ratio": entry.ratio}
    plain["parameters"] = dict(entry.parameters)
    partial.write_text(json.dumps(plain, indent=2), encoding="utf-8")
    partial.replace(path)
    return path


def look_up(key: Mapping[str, Any], directory: Path | None = None) -> tuple[Entry, list[str]] | None:
    """The entry that differs least from `key`, and how it differs; None if none is of this model on this device.

    Raises:
        ConfigError: a file of the table is broken.
    """
    found = []
    for path in sorted((directory or table_directory()).glob("*.json")):
        entry = _read(path)
        if all(entry.key.get(name) == key.get(name) for name in _ESSENTIAL):
            found.append((entry, list(_differences(entry.key, key))))
    return min(found, key=lambda pair: len(pair[1]), default=None)


def use_tuned(vllm_config: Any) -> None:
    """Select by the table's entry for this model, if ``VLLM_FL_TUNED`` asks for it.

    What the entry of another model said before goes. What the user's own file or environment says of an operator or a
    parameter wins; operators, implementations and values that are not there (any more) are left out, with a warning.

    Raises:
        ConfigError: the variable has another value than auto, or the table is broken.
    """
    wanted = os.environ.get(TUNED_ENV, "")
    if not wanted:
        return
    if wanted != AUTO:
        hint = did_you_mean(wanted, (AUTO,))
        raise ConfigError(f"environment variable {TUNED_ENV}: {wanted!r} is not {AUTO!r}, its only value{hint}")
    log, key = get_logger(__name__), key_of(vllm_config)
    found = look_up(key)
    if found is None:
        log.warning(
            "%s: nothing was tuned for %s in %s on %s; run `vllm-fl tune MODEL`",
            *(TUNED_ENV, key["architecture"], key["dtype"], key["device"]),
        )
    entry, differences = found or (Entry(key, {}, 1.0), [])
    if differences:
        log.warning("%s: tuned for something else: %s; tune again", TUNED_ENV, "; ".join(differences))
    _apply(entry)


def _apply(entry: Entry) -> None:
    from vllm_fl.config import get_settings
    from vllm_fl.dispatch import get_policy, set_global_policy

    settings, policy = get_settings(), get_policy()
    place = f"the table of {TUNED_ENV}"
    orders, parameters = dict(_usable_orders(entry, settings)), dict(_usable_parameters(entry, settings))
    tuned = {path[:3] for path in parameters}
    kept_orders = {op: order for op, order in policy.per_op_order if policy.origin(f"op_backends.{op}") != place}
    kept_parameters = {
        path: text
        for path, text in policy.parameters
        if policy.origin(f"parameters.{path}") != place and path[:3] not in tuned
    }
    items = [*(f"op_backends.{op}" for op in orders), *(f"parameters.{path}" for path in parameters)]
    origins = {item: origin for item, origin in policy.origins.items() if origin != place}
    tuned_policy = replace(
        policy,
        per_op_order=tuple(sorted({**kept_orders, **orders}.items())),
        parameters=tuple(sorted({**kept_parameters, **parameters}.items())),
        origins=MappingProxyType({**origins, **dict.fromkeys(items, place)}),
    )
    if tuned_policy != policy:
        set_global_policy(tuned_policy)


def _usable_orders(entry: Entry, settings: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    from vllm_fl.dispatch import get_default_manager

    registry = get_default_manager().registry
    for operator, tokens in entry.op_backends.items():
        known = {f"impl:{impl.impl_id}" for impl in registry.get_implementations(operator)}
        usable = tuple(token for token in tokens if token in known or not token.startswith("impl:"))
        if not usable or usable[0] != tokens[0]:
            text = "%s: %s of operator %s is not installed here; the operator is not tuned"
            get_logger(__name__).warning(text, TUNED_ENV, tokens[0], operator)
            continue
        layer = settings.origin("op_backends", operator).layer if operator in settings.op_backends else ""
        if layer not in _USER:
            yield operator, usable


def _usable_parameters(entry: Entry, settings: Settings) -> Iterator[tuple[ParameterPath, str]]:
    from vllm_fl.dispatch import get_default_manager

    registry = get_default_manager().registry
    by_user = {path[:3] for path in settings.parameters if settings.origin("parameters", path).layer in _USER}
    for path, text in flat(entry.parameters).items():
        impl = registry.get_implementation(path.operator, path.implementation)
        wrong = problem_with(impl, path, text) if impl is not None else ""
        if wrong:
            get_logger(__name__).warning("%s: %s: %s; it is not tuned", TUNED_ENV, path, wrong)
        elif impl is not None and path[:3] not in by_user:
            yield path, text


def _read(path: Path) -> Entry:
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        return Entry(plain["key"], plain["op_backends"], plain["ratio"], plain.get("parameters", {}))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no entry of the table of {TUNED_ENV} ({error}); remove it") from None


def _differences(entry: Mapping[str, Any], key: Mapping[str, Any]) -> Iterator[str]:
    for name in key:
        if name == "versions":
            there, here = entry.get(name, {}), key[name]
            for package in sorted({*there, *here}):
                if there.get(package) != here.get(package):
                    yield f"{package} {there.get(package, 'absent')} there, {here.get(package, 'absent')} here"
        elif entry.get(name) != key[name]:
            yield f"{name} {entry.get(name)} there, {key[name]} here"
