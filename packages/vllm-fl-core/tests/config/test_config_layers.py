"""Which layer decides, item by item, and where each value is said to come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_fl.config import KEYS, KnownNames, Settings, check_file
from vllm_fl.dispatch.policy import SelectionPolicy
from vllm_fl.dispatch.types import BackendImplKind, OpImpl
from vllm_fl.errors import ConfigError

Load = Callable[..., Settings]


def test_defaults(load: Load) -> None:
    settings = load()
    assert settings == Settings()
    assert {key: getattr(settings, key) for key in KEYS} == {key: KEYS[key].default for key in KEYS}
    assert {str(settings.origin(key)) for key in KEYS} == {"default"}


def test_item_by_item(load: Load) -> None:
    settings = load(
        file="strict: no\nop_backends:\n  rms_norm: reference\n",
        platform="prefer: vendor\nstrict: yes\nop_backends:\n  rms_norm: vendor\n  moe_sum: [vendor, flagos]\n",
        VLLM_FL_STRICT="1",
        VLLM_FL_PER_OP="rms_norm=flagos;topk_softmax=flagos|vendor",
        USE_FLAGGEMS="Off",
    )
    assert (settings.prefer, str(settings.origin("prefer"))) == ("vendor", "platform file ascend.yaml:1:1")
    assert (settings.strict, str(settings.origin("strict"))) == (False, "my.yaml:1:1")
    assert (settings.use_flaggems, str(settings.origin("use_flaggems"))) == (False, "environment variable USE_FLAGGEMS")
    assert dict(settings.op_backends) == {
        "moe_sum": ("vendor", "flagos"),
        "rms_norm": ("reference",),
        "topk_softmax": ("flagos", "vendor"),
    }
    assert {op: str(settings.origin("op_backends", op)) for op in settings.op_backends} == {
        "moe_sum": "platform file ascend.yaml:5:3",
        "rms_norm": "my.yaml:3:3",
        "topk_softmax": "environment variable VLLM_FL_PER_OP",
    }
    assert str(settings.origin("op_backends")) == "my.yaml:2:1"


def test_strict_of_a_platform_file_counts(load: Load) -> None:
    assert load(platform="strict: yes\n").strict is True


@pytest.mark.parametrize("word", ["true", "1", "yes", "on", "TRUE", "Yes", "oN"])
@pytest.mark.parametrize("value", [True, False])
def test_booleans(load: Load, word: str, value: bool) -> None:
    opposite = {"true": "false", "1": "0", "yes": "no", "on": "off"}
    text = word if value else opposite[word.lower()].upper()
    assert load(VLLM_FL_STRICT=text).strict is value
    assert load(file=f"strict: {text}\n").strict is value
    assert load(file=f"strict: '{text}'\n").strict is value


def test_operator_configuration_wins_over_per_operator(load: Load) -> None:
    settings = load(VLLM_FL_PER_OP="a=vendor;b=vendor", VLLM_FL_OP_CONFIG='{"b": "flagos", "c": ["vendor", "flagos"]}')
    assert dict(settings.op_backends) == {"a": ("vendor",), "b": ("flagos",), "c": ("vendor", "flagos")}
    assert str(settings.origin("op_backends", "a")) == "environment variable VLLM_FL_PER_OP"
    assert str(settings.origin("op_backends", "b")) == "environment variable VLLM_FL_OP_CONFIG"


@pytest.mark.parametrize(
    "text",
    ["[vendor:acme, flagos]", "vendor:acme|flagos", "' vendor:acme | flagos '", "\n  - vendor:acme\n  - flagos"],
    ids=["list", "text", "text with spaces", "block"],
)
def test_spellings_of_tokens(load: Load, text: str) -> None:
    assert load(file=f"op_backends:\n  moe_sum: {text}\n").op_backends == {"moe_sum": ("vendor:acme", "flagos")}


@pytest.mark.parametrize("text", ["[a, b]", "a,b", "' a , b '", "\n- a\n- b"], ids=["list", "text", "spaces", "block"])
def test_spellings_of_lists(load: Load, text: str) -> None:
    assert load(file=f"deny_vendors: {text}\n").deny_vendors == {"a", "b"}


def test_an_empty_allow_list_allows_nobody(load: Load) -> None:
    assert load(VLLM_FL_ALLOW_VENDORS="").allow_vendors == frozenset()
    assert load(file="allow_vendors: []\n").allow_vendors == frozenset()
    assert load(file="allow_vendors: []\n").policy().is_vendor_allowed("acme") is False


def test_a_plain_list_replaces(load: Load) -> None:
    settings = load(platform="flagos_blacklist: [mm, bmm]\n", VLLM_FL_FLAGOS_BLACKLIST="addmm")
    assert settings.flagos_blacklist == {"addmm"}
    assert str(settings.origin("flagos_blacklist", "addmm")) == "environment variable VLLM_FL_FLAGOS_BLACKLIST"


@pytest.mark.parametrize("layer", ["file", "environment", "platform"])
@pytest.mark.parametrize("key", ["flagos_whitelist", "flagos_blacklist", "oot_whitelist", "oot_blacklist"])
def test_lists_of_every_layer_count(load: Load, layer: str, key: str) -> None:
    layers = {f"VLLM_FL_{key.upper()}": "mm"} if layer == "environment" else {layer: f"{key}: mm\n"}
    assert getattr(load(**layers), key) == {"mm"}


def test_edits_change_the_list_below(load: Load) -> None:
    settings = load(
        file="flagos_blacklist:\n- +mm\n",
        platform="flagos_blacklist: [mm, bmm]\n",
        VLLM_FL_FLAGOS_BLACKLIST="+addmm,-mm",
    )
    assert {item: str(settings.origin("flagos_blacklist", item)) for item in settings.flagos_blacklist} == {
        "mm": "my.yaml:2:3",
        "bmm": "platform file ascend.yaml:1:24",
        "addmm": "environment variable VLLM_FL_FLAGOS_BLACKLIST",
    }


def test_edits_of_a_restriction(load: Load) -> None:
    settings = load(platform="allow_vendors: [a, b]\n", VLLM_FL_ALLOW_VENDORS="-a,+c")
    assert settings.allow_vendors == frozenset({"b", "c"})


def test_append_adds_to_the_platform(load: Load) -> None:
    settings = load(platform="flagos_blacklist: [mm]\n", VLLM_FL_FLAGOS_BLACKLIST_APPEND="bmm, addmm")
    assert settings.flagos_blacklist == {"mm", "bmm", "addmm"}
    variable = "environment variable VLLM_FL_FLAGOS_BLACKLIST_APPEND"
    assert str(settings.origin("flagos_blacklist", "addmm")) == variable


def test_append_adds_to_the_variable(load: Load) -> None:
    settings = load(
        platform="flagos_blacklist: [mm]\n", VLLM_FL_FLAGOS_BLACKLIST="bmm", VLLM_FL_FLAGOS_BLACKLIST_APPEND="addmm"
    )
    assert settings.flagos_blacklist == {"bmm", "addmm"}


def test_appending_nothing_keeps_the_list(load: Load) -> None:
    settings = load(platform="flagos_blacklist: [mm]\n", VLLM_FL_FLAGOS_BLACKLIST_APPEND="")
    assert settings.flagos_blacklist == {"mm"}


def test_removal_names_the_nearest(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load(platform="flagos_blacklist: [addmm, softmax]\n", VLLM_FL_FLAGOS_BLACKLIST="-admm")
    assert str(caught.value) == (
        "environment variable VLLM_FL_FLAGOS_BLACKLIST: flagos_blacklist: '-admm' removes nothing: "
        "the list below holds addmm, softmax; did you mean 'addmm'?"
    )


@pytest.mark.parametrize("key", ["flagos_whitelist", "oot_whitelist", "allow_vendors"])
def test_every_one_lifts_a_restriction(load: Load, key: str) -> None:
    settings = load(file=f"{key}: '*'\n", platform=f"{key}: [a]\n")
    assert getattr(settings, key) is None
    assert str(settings.origin(key)) == "my.yaml:1:1"


def test_a_whitelist_after_the_blacklist_is_switched_off(load: Load) -> None:
    settings = load(platform="flagos_blacklist: [mm]\n", VLLM_FL_FLAGOS_WHITELIST="bmm", VLLM_FL_FLAGOS_BLACKLIST="")
    assert (settings.flagos_whitelist, settings.flagos_blacklist) == (frozenset({"bmm"}), frozenset())


def test_families_do_not_mix(load: Load) -> None:
    settings = load(VLLM_FL_FLAGOS_WHITELIST="a", VLLM_FL_OOT_BLACKLIST="b")
    assert (settings.flagos_whitelist, settings.oot_blacklist) == (frozenset({"a"}), frozenset({"b"}))


def test_remaining_keys(load: Load, tmp_path: Path) -> None:
    settings = load(
        file="plugin_modules: [a.b, c]\nlog_level: debug\ndispatch_debug: on\nprefer_enabled: off\nplatform: ascend\n",
        FLAGGEMS_ENABLE_OPLIST_PATH="~/ops.txt",
        VLLM_FL_OOT_ENABLED="no",
        VLLM_FL_DENY_VENDORS="a",
    )
    assert settings.plugin_modules == ("a.b", "c")
    assert str(settings.origin("plugin_modules", "c")) == "my.yaml:1:23"
    assert (settings.log_level, settings.dispatch_debug) == ("DEBUG", True)
    assert (settings.prefer_enabled, settings.platform) == (False, "ascend")
    assert settings.oplist_path == Path.home() / "ops.txt"
    assert (settings.oot_enabled, settings.deny_vendors) == (False, frozenset({"a"}))


def test_a_file_of_comments_overrides_nothing(load: Load) -> None:
    assert load(file="# prefer: vendor\n", VLLM_FL_PREFER="vendor").prefer == "vendor"


def test_policy(load: Load) -> None:
    settings = load(
        file="prefer: vendor\nstrict: yes\nop_backends: {b: flagos, a: vendor|reference}\nallow_vendors: [x, y]\n"
        "deny_vendors: [y]\nflagos_blacklist: [c]\n"
    )
    assert settings.policy() == SelectionPolicy(
        prefer="vendor",
        strict=True,
        per_op_order=(("a", ("vendor", "reference")), ("b", ("flagos",))),
        allow_vendors=frozenset({"x", "y"}),
        deny_vendors=frozenset({"y"}),
        flagos_blacklist=frozenset({"c"}),
    )


@pytest.mark.parametrize("switch", ["USE_FLAGGEMS", "VLLM_FL_PREFER_ENABLED"])
def test_switches_leave_no_flagos(load: Load, switch: str) -> None:
    assert load().policy().flagos_enabled is True
    assert load(**{switch: "0"}).policy().flagos_enabled is False


def test_settings_cannot_be_changed(load: Load) -> None:
    settings = load(VLLM_FL_PER_OP="a=vendor")
    with pytest.raises(AttributeError):
        settings.strict = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        settings.op_backends["a"] = ()  # type: ignore[index]


def test_origin_of_what_is_not_there(load: Load) -> None:
    with pytest.raises(KeyError, match=r"no configuration key 'prefr'; did you mean 'prefer'\?"):
        load().origin("prefr")
    with pytest.raises(KeyError, match=r"op_backends has no item 'rms_nrom'; did you mean 'rms_norm'\?"):
        load(VLLM_FL_PER_OP="rms_norm=vendor").origin("op_backends", "rms_nrom")
    with pytest.raises(KeyError, match="prefer has no item 'flagos'"):
        load().origin("prefer", "flagos")


def test_describe(load: Load) -> None:
    settings = load(
        file="op_backends:\n  moe_sum: vendor|flagos\nallow_vendors: []\n", VLLM_FL_FLAGOS_BLACKLIST="mm,bmm"
    )
    rows = [(row.key, row.item, row.value, str(row.origin)) for row in settings.describe()]
    variable = "environment variable VLLM_FL_FLAGOS_BLACKLIST"
    assert rows[:9] == [
        ("prefer", None, "flagos", "default"),
        ("strict", None, False, "default"),
        ("op_backends", "moe_sum", ("vendor", "flagos"), "my.yaml:2:3"),
        ("parameters", None, (), "default"),
        ("allow_vendors", None, (), "my.yaml:3:1"),
        ("deny_vendors", None, (), "default"),
        ("use_flaggems", None, True, "default"),
        ("flagos_whitelist", None, None, "default"),
        ("flagos_blacklist", "bmm", True, variable),
    ]
    assert {row.key for row in settings.describe()} == set(KEYS)


def test_check_file_judges_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("flagos_blacklist: [-mm]\nallow_vendors: [+a]\nop_backends: {x: vendor:y}\n")
    assert check_file(path) == []
    path.write_text("oot_blacklist: [a]\noot_whitelist: [b]\n")
    assert [problem.where for problem in check_file(path)] == [f"{path}:2:1"]


def test_check_file_judges_the_names_of_edits(tmp_path: Path) -> None:
    path = tmp_path / "edits.yaml"
    path.write_text("deny_vendors: [+acme, +acne]\noot_blacklist: [-rms_nrom]\n")
    names = KnownNames(vendors={"acme"}, oot_layers={"rms_norm"})
    assert [str(problem) for problem in check_file(path, names)] == [
        f"{path}:1:23: deny_vendors: unknown vendor 'acne' (known: acme); did you mean 'acme'?",
        f"{path}:2:17: oot_blacklist: unknown layer 'rms_nrom' (known: rms_norm); did you mean 'rms_norm'?",
    ]


def test_check_file_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    expected = f"file '{path}' does not exist; give the path of a YAML file"
    assert [str(problem) for problem in check_file(path)] == [expected]


def test_a_byte_order_mark_is_accepted(load: Load) -> None:
    assert load(file="\ufeffprefer: vendor\n").prefer == "vendor"


def test_aliases_are_accepted(load: Load) -> None:
    settings = load(file="op_backends:\n  rms_norm: &order [vendor, flagos]\n  moe_sum: *order\n")
    assert settings.op_backends == {"rms_norm": ("vendor", "flagos"), "moe_sum": ("vendor", "flagos")}


def test_an_implementation_has_to_be_one_of_the_operator(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("op_backends: {rms_norm: ['impl:vendor.moe']}\n")
    impls = [
        OpImpl(op_name, impl_id, BackendImplKind.VENDOR, print, vendor="acme")
        for op_name, impl_id in (("rms_norm", "vendor.norm"), ("moe_sum", "vendor.moe"))
    ]
    names = KnownNames(impl_ids={impl.impl_id for impl in impls}, implementations=impls)
    (problem,) = check_file(path, names)
    assert problem.text == (
        "unknown implementation of rms_norm 'vendor.moe' (known: vendor.norm); did you mean 'vendor.norm'?"
    )
