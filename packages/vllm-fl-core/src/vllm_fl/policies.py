"""Policies that a command line names, and their way into other processes.

from vllm_fl.policies import environment_of, parse_policy

policy = parse_policy("rms_norm=vendor:acme|reference", "--a")
with environment_of(policy):
    ...  # engines started here, and their processes, select by it
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from vllm_fl.config import CONFIG_ENV, ConfigProblems, Problem, load_file, load_settings
from vllm_fl.dispatch import SelectionPolicy, get_default_manager, get_policy, reset_global_policy
from vllm_fl.dispatch.initialization import registered_names
from vllm_fl.dispatch.parameters import flat, nested
from vllm_fl.dispatch.policy import VALID_PREFER_VALUES
from vllm_fl.errors import ConfigError, did_you_mean

#: The word for the policy that the configuration asks for.
PRESENT = "present"
FORMS = "a YAML file, 'present', 'flagos', 'vendor', 'reference', or 'op=token|token;op=token'"


def parse_policies(**texts: str) -> tuple[SelectionPolicy, ...]:
    """The policies of options that are compared: ``a="present"`` is ``--a present``.

    Raises:
        ConfigError: as :func:`parse_policy`; or one is the present policy, and ``VLLM_FL_TUNED`` changes that for each
            model.
    """
    for option, text in texts.items():
        if os.environ.get("VLLM_FL_TUNED") and text in (PRESENT, *VALID_PREFER_VALUES):
            raise ConfigError(
                f"--{option} {text}: VLLM_FL_TUNED is set, and what was tuned for the model is not a part of it; unset"
                " the variable, or name the file that `vllm-fl tune` wrote"
            )
    return tuple(parse_policy(text, f"--{option}") for option, text in texts.items())


def parse_policy(text: str, where: str) -> SelectionPolicy:
    """The policy that a user names.

    ``present`` is what the configuration asks for. A kind (``vendor``) is the same with that kind preferred, and
    ``op=token|token;op=token`` the same with these operators' orders. A file stands for itself: what it does not name
    has its default.

    Args:
        text: one of these forms.
        where: who gave it, for messages, such as ``--against``.

    Raises:
        ConfigError: the text has none of these forms, the file is wrong, or a name in it is unknown.
    """
    manager = get_default_manager()
    manager.ensure_initialized()
    present = get_policy()
    if text == PRESENT:
        return present
    if text in VALID_PREFER_VALUES:
        return present.derive(where, prefer=text)
    is_file = text.endswith((".yaml", ".yml")) or ("=" not in text and Path(text).is_file())
    if not is_file and "=" not in text:
        words = (PRESENT, *sorted(VALID_PREFER_VALUES))
        raise ConfigError(f"{where}: {text!r} is not a policy ({FORMS}){did_you_mean(text, words)}")
    try:
        settings = load_file(text) if is_file else load_settings({"VLLM_FL_PER_OP": text})
        settings.check_names(registered_names(manager.registry))
    except ConfigProblems as error:
        # A file's problems name their line; what was written on the command line came from no variable.
        places = [problem.where if is_file and problem.where else where for problem in error.problems]
        raise ConfigProblems(
            Problem(place, problem.key, problem.text) for place, problem in zip(places, error.problems, strict=True)
        ) from None
    if is_file:
        return replace(settings.policy(), origins=MappingProxyType({"": text}))
    orders = {**dict(present.per_op_order), **settings.op_backends}
    return present.derive(where, per_op_order=tuple(sorted(orders.items())))


def to_plain(policy: SelectionPolicy) -> dict[str, Any]:
    """The policy as the keys of a configuration file, all of them, so that no other layer shows through."""
    return {
        "prefer": policy.prefer,
        "strict": policy.strict,
        "op_backends": {op_name: list(tokens) for op_name, tokens in policy.per_op_order},
        "deny_vendors": sorted(policy.deny_vendors),
        "allow_vendors": _listed(policy.allow_vendors),
        "use_flaggems": policy.flagos_enabled,
        "flagos_whitelist": _listed(policy.flagos_whitelist),
        "flagos_blacklist": sorted(policy.flagos_blacklist),
        "parameters": nested(policy.parameters),
    }


def to_file(policy: SelectionPolicy) -> dict[str, Any]:
    """The policy as a configuration file.

    ``use_flaggems: true`` would say more there than a policy does: FlagGems would also replace functions of ATen.
    """
    document = to_plain(policy)
    if policy.flagos_enabled:
        del document["use_flaggems"]
    return document


def from_plain(document: Mapping[str, Any], origin: str = "") -> SelectionPolicy:
    """The policy of what :func:`to_plain` made."""
    return SelectionPolicy(
        prefer=document["prefer"],
        strict=document["strict"],
        per_op_order=tuple(sorted((op, tuple(tokens)) for op, tokens in document["op_backends"].items())),
        deny_vendors=frozenset(document["deny_vendors"]),
        allow_vendors=_restriction(document["allow_vendors"]),
        flagos_enabled=document["use_flaggems"],
        flagos_whitelist=_restriction(document["flagos_whitelist"]),
        flagos_blacklist=frozenset(document["flagos_blacklist"]),
        parameters=tuple(sorted(flat(document["parameters"]).items())),
        origins=MappingProxyType({"": origin}),
    )


def _listed(names: frozenset[str] | None) -> list[str]:
    return ["*"] if names is None else sorted(names)


def _restriction(names: list[str]) -> frozenset[str] | None:
    return None if names == ["*"] else frozenset(names)


@contextmanager
def environment_of(policy: SelectionPolicy) -> Iterator[None]:
    """Within the block this process, and every process that it starts, is configured to select by `policy`.

    ``VLLM_FL_CONFIG`` names a temporary file: the user's own file, if there is one, with the keys of the policy
    replaced. Everything else of the configuration stays. Unless it is the present policy, operators that other layers
    name, and it does not, have its default order, and nothing is taken from the table of what was tuned.

    Raises:
        FrozenError: the selection of this process is frozen.
    """
    document, present = to_file(policy), get_policy()
    shown_through = dict.fromkeys(present.per_op_order_dict, policy.get_default_order())
    document["op_backends"] = {**shown_through, **document["op_backends"]}
    before = os.environ.get(CONFIG_ENV)
    own = (yaml.safe_load(Path(before).expanduser().read_text(encoding="utf-8")) if before else None) or {}
    hide = set() if policy == present else {"VLLM_FL_TUNED"}
    if policy.flagos_enabled and not present.flagos_enabled:
        hide.add("USE_FLAGGEMS")
        own.pop("use_flaggems", None)
    hidden = {name: os.environ.pop(name) for name in hide & set(os.environ)}
    with tempfile.TemporaryDirectory(prefix="vllm-fl-") as folder:
        path = Path(folder) / "policy.yaml"
        path.write_text(yaml.safe_dump({**own, **document}), encoding="utf-8")
        os.environ[CONFIG_ENV] = str(path)
        try:
            reset_global_policy()
            yield
        finally:
            if before is None:
                del os.environ[CONFIG_ENV]
            else:
                os.environ[CONFIG_ENV] = before
            os.environ.update(hidden)
            reset_global_policy()
