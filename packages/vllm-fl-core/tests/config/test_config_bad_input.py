"""Each mistake in the configuration, with the whole message that it draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_fl.config import KEYS, ConfigProblems, KnownNames, Settings, check_file
from vllm_fl.errors import ConfigError

Load = Callable[..., Settings]

_KNOWN = ", ".join(KEYS)
_TOKENS = "flagos, reference, vendor, vendor:NAME, impl:ID"
_SECONDS = "a number of seconds above 0"
_BYTES = "a number of bytes up to 8388608, such as 65536, 64KiB or 8MiB"
_BOOLEAN = "a boolean (true/false, yes/no, on/off or 1/0)"


def message(load: Load, *args: str, **layers: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*args, **layers)
    return str(caught.value)


FILES = {
    "list": (
        "- prefer\n- vendor\n",
        "my.yaml:1:1: the file holds a list; expected a mapping of keys to values, such as 'prefer: vendor'",
    ),
    "text": (
        "vendor\n",
        "my.yaml:1:1: the file holds the text 'vendor'; expected a mapping of keys to values, such as 'prefer: vendor'",
    ),
    "unknown key": (
        "\nop_backend: {}\n",
        f"my.yaml:2:1: unknown key 'op_backend' (known: {_KNOWN}); did you mean 'op_backends'?",
    ),
    "key of the field's tuner": (
        "action: auto_tune\n",
        "my.yaml:1:1: unknown key 'action': it has no effect here; tuning is a command, 'vllm-fl tune MODEL'",
    ),
    "key of the field's dumper": (
        "io_dump: {dir: x}\n",
        "my.yaml:1:1: unknown key 'io_dump': inputs of operators are kept by a command, "
        "'vllm-fl compare MODEL --dump DIR'; remove the key",
    ),
    "key that the field's other parser read": (
        "per_op: {}\n",
        "my.yaml:1:1: unknown key 'per_op': the key is 'op_backends'",
    ),
    "token": (
        "op_backends:\n  silu_and_mul: [flagos, vendorr:cuda]\n",
        f"my.yaml:2:26: op_backends.silu_and_mul: 'vendorr:cuda' is not a token ({_TOKENS}); "
        "did you mean 'vendor:cuda'?",
    ),
    "token in one line": (
        "op_backends:\n  silu_and_mul: flagos | refrence\n",
        f"my.yaml:2:17: op_backends.silu_and_mul: 'refrence' is not a token ({_TOKENS}); did you mean 'reference'?",
    ),
    "token without a name": (
        "op_backends: {moe_sum: 'vendor:'}\n",
        f"my.yaml:1:24: op_backends.moe_sum: 'vendor:' is not a token ({_TOKENS})",
    ),
    "no token": (
        "op_backends: {moe_sum: []}\n",
        f"my.yaml:1:24: op_backends.moe_sum: names no token; expected at least one of {_TOKENS}, "
        "or no entry for the operator",
    ),
    "token twice": (
        "op_backends: {moe_sum: vendor|flagos|vendor}\n",
        "my.yaml:1:24: op_backends.moe_sum: names vendor more than once; the order needs each token once",
    ),
    "operators as a list": (
        "op_backends: [moe_sum]\n",
        "my.yaml:1:14: op_backends: a list is not a mapping of operators to tokens, such as "
        "'rms_norm: [vendor, flagos]'",
    ),
    "operator that is not a name": (
        "op_backends:\n  moe sum: vendor\n",
        "my.yaml:2:3: op_backends: 'moe sum' is not the name of an operator",
    ),
    "prefer": (
        "prefer: flaggems\n",
        "my.yaml:1:9: prefer: 'flaggems' is not one of flagos, vendor, reference; did you mean 'flagos'?",
    ),
    "prefer as a list": (
        "prefer: [vendor]\n",
        "my.yaml:1:9: prefer: a list is not one of flagos, vendor, reference",
    ),
    "seconds": ("comm_timeout: 5s\n", f"my.yaml:1:15: comm_timeout: '5s' is not {_SECONDS}"),
    "seconds that never come": ("comm_timeout: 0\n", f"my.yaml:1:15: comm_timeout: '0' is not {_SECONDS}"),
    "seconds without an end": ("comm_timeout: inf\n", f"my.yaml:1:15: comm_timeout: 'inf' is not {_SECONDS}"),
    "bytes": ("comm_custom_max_bytes: 1MB\n", f"my.yaml:1:24: comm_custom_max_bytes: '1MB' is not {_BYTES}"),
    "too many bytes": ("comm_custom_max_bytes: 9MiB\n", f"my.yaml:1:24: comm_custom_max_bytes: '9MiB' is not {_BYTES}"),
    "communicator": ("comm: flag cx\n", "my.yaml:1:7: comm: 'flag cx' is not the name of a communicator"),
    "strict": ("strict: maybe\n", f"my.yaml:1:9: strict: 'maybe' is not {_BOOLEAN}"),
    "strict as a number": ("strict: 2\n", f"my.yaml:1:9: strict: '2' is not {_BOOLEAN}"),
    "strict without a value": ("prefer: vendor\nstrict:\n", f"my.yaml:2:8: strict: has no value; expected {_BOOLEAN}"),
    "strict misspelt": ("strict: flase\n", f"my.yaml:1:9: strict: 'flase' is not {_BOOLEAN}; did you mean 'false'?"),
    "duplicate key": (
        "strict: yes\nprefer: vendor\nstrict: no\n",
        "my.yaml:3:1: strict: given twice, first in line 1; keep one of them",
    ),
    "duplicate operator": (
        "op_backends:\n  moe_sum: vendor\n  moe_sum: flagos\n",
        "my.yaml:3:3: op_backends.moe_sum: given twice, first in line 2; keep one of them",
    ),
    "plain entries and edits": (
        "flagos_blacklist: [mm, +bmm]\n",
        "my.yaml:1:19: flagos_blacklist: mixes plain entries (mm) with edits (+bmm); write only plain entries, which "
        "replace the list of the layer below, or only +NAME and -NAME, which edit it",
    ),
    "added and removed": (
        "flagos_blacklist: +mm,-mm\n",
        "my.yaml:1:19: flagos_blacklist: both adds and removes mm; keep one of the two",
    ),
    "empty entry": (
        "deny_vendors: a,,b\n",
        "my.yaml:1:15: deny_vendors: 'a,,b' has an empty entry; expected a list or names separated by commas",
    ),
    "list as a mapping": (
        "deny_vendors: {a: b}\n",
        "my.yaml:1:15: deny_vendors: a mapping is not a list or names separated by commas",
    ),
    "entry as a list": (
        "deny_vendors: [a, [b]]\n",
        "my.yaml:1:19: deny_vendors: a list is not the name of a vendor",
    ),
    "every one beside a name": (
        "allow_vendors: ['*', a]\n",
        "my.yaml:1:16: allow_vendors: '*' means every one and stands alone; remove it or the other entries",
    ),
    "every one in a blacklist": (
        "oot_blacklist: '*'\n",
        "my.yaml:1:16: oot_blacklist: '*' has no meaning here; name the entries",
    ),
    "log level": (
        "log_level: warn\n",
        "my.yaml:1:12: log_level: 'warn' is not one of DEBUG, INFO, WARNING, ERROR, CRITICAL; did you mean 'WARNING'?",
    ),
    "module": ("plugin_modules: [a.b, c-d]\n", "my.yaml:1:23: plugin_modules: 'c-d' is not the name of a module"),
    "path": ("oplist_path: ''\n", "my.yaml:1:14: oplist_path: '' is empty; expected a path"),
    "not YAML": (
        "prefer: vendor\nstrict: {yes\n",
        "my.yaml:3:1: not valid YAML: expected ',' or '}', but got '<stream end>'",
    ),
    "tab": ("strict:\n\t- a\n", "my.yaml:2:1: not valid YAML: found character '\\t' that cannot start any token"),
    "control character": ("prefer: a\x07b\n", "my.yaml:1:10: not valid YAML: the character '\\x07' is not allowed"),
    "two documents": (
        "prefer: vendor\n---\nstrict: yes\n",
        "my.yaml:2:1: not valid YAML: but found another document",
    ),
    "tag": ("strict: !mine yes\n", "my.yaml:1:9: strict: the tag '!mine' has no meaning here; remove it"),
    "tag of a Python object": (
        "prefer: !!python/name:os.system x\n",
        "my.yaml:1:9: prefer: the tag 'tag:yaml.org,2002:python/name:os.system' has no meaning here; remove it",
    ),
    "whitelist and blacklist": (
        "flagos_whitelist: [mm]\nflagos_blacklist: [bmm]\n",
        "my.yaml:1:1: flagos_whitelist is set here and flagos_blacklist by my.yaml:2:1; only one of them can count. "
        "Remove one, or switch off the one of a lower layer: flagos_whitelist '*', or an empty flagos_blacklist",
    ),
    "edit of a restriction that no layer sets": (
        "allow_vendors: [+a]\n",
        "my.yaml:1:1: allow_vendors: +a: there is no list below to edit; write the whole list without + and -",
    ),
    "removal without effect": (
        "flagos_blacklist: [-bmn]\n",
        "my.yaml:1:20: flagos_blacklist: '-bmn' removes nothing: the list below holds nothing",
    ),
}


@pytest.mark.parametrize(("text", "expected"), FILES.values(), ids=FILES)
def test_file(load: Load, text: str, expected: str) -> None:
    assert message(load, text) == expected


VARIABLES = {
    "prefer": (
        {"VLLM_FL_PREFER": "flaggems"},
        "environment variable VLLM_FL_PREFER: 'flaggems' is not one of flagos, vendor, reference; "
        "did you mean 'flagos'?",
    ),
    "prefer empty": (
        {"VLLM_FL_PREFER": ""},
        "environment variable VLLM_FL_PREFER: '' is empty; expected one of flagos, vendor, reference",
    ),
    "strict": ({"VLLM_FL_STRICT": "maybe"}, f"environment variable VLLM_FL_STRICT: 'maybe' is not {_BOOLEAN}"),
    "switch": ({"USE_FLAGGEMS": "2"}, f"environment variable USE_FLAGGEMS: '2' is not {_BOOLEAN}"),
    "misspelt name": (
        {"VLLM_FL_PREFR": "vendor"},
        "environment variable VLLM_FL_PREFR: there is no such variable; did you mean 'VLLM_FL_PREFER'?",
    ),
    "name in small letters": (
        {"vllm_fl_strict": "1"},
        "environment variable vllm_fl_strict: there is no such variable; did you mean 'VLLM_FL_STRICT'?",
    ),
    "prefix that the variable does not have": (
        {"VLLM_FL_USE_FLAGGEMS": "0"},
        "environment variable VLLM_FL_USE_FLAGGEMS: there is no such variable; did you mean 'USE_FLAGGEMS'?",
    ),
    "per operator without tokens": (
        {"VLLM_FL_PER_OP": "moe_sum=vendor;rms_norm"},
        "environment variable VLLM_FL_PER_OP: 'rms_norm' in 'moe_sum=vendor;rms_norm' is not of the form "
        "op=token|token;op=token",
    ),
    "per operator twice": (
        {"VLLM_FL_PER_OP": "moe_sum=vendor;moe_sum=flagos"},
        "environment variable VLLM_FL_PER_OP: 'moe_sum' is given twice; keep one of the two",
    ),
    "per operator token": (
        {"VLLM_FL_PER_OP": "moe_sum=vendorr:cuda"},
        f"environment variable VLLM_FL_PER_OP: moe_sum: 'vendorr:cuda' is not a token ({_TOKENS}); "
        "did you mean 'vendor:cuda'?",
    ),
    "operator configuration not JSON": (
        {"VLLM_FL_OP_CONFIG": "moe_sum"},
        "environment variable VLLM_FL_OP_CONFIG: 'moe_sum' is not JSON (Expecting value at line 1, column 1); "
        """expected an object such as '{"rms_norm": "vendor"}'""",
    ),
    "operator configuration as a list": (
        {"VLLM_FL_OP_CONFIG": "[]"},
        "environment variable VLLM_FL_OP_CONFIG: '[]' is not a JSON object; "
        """expected an object such as '{"rms_norm": "vendor"}'""",
    ),
    "operator configuration twice": (
        {"VLLM_FL_OP_CONFIG": '{"moe_sum": "vendor", "moe_sum": "flagos"}'},
        "environment variable VLLM_FL_OP_CONFIG: 'moe_sum' is given twice; keep one of the two",
    ),
    "operator configuration token": (
        {"VLLM_FL_OP_CONFIG": '{"moe_sum": "flaggems"}'},
        f"environment variable VLLM_FL_OP_CONFIG: moe_sum: 'flaggems' is not a token ({_TOKENS}); "
        "did you mean 'flagos'?",
    ),
    "operator configuration number": (
        {"VLLM_FL_OP_CONFIG": '{"moe_sum": 1}'},
        "environment variable VLLM_FL_OP_CONFIG: moe_sum: 1 is not a list of tokens or tokens separated by '|'",
    ),
    "appended edit": (
        {"VLLM_FL_FLAGOS_BLACKLIST_APPEND": "a,-b"},
        "environment variable VLLM_FL_FLAGOS_BLACKLIST_APPEND: '-b' is not a plain name; "
        "this variable only adds names, without a sign",
    ),
    "appended nothing": (
        {"VLLM_FL_FLAGOS_BLACKLIST_APPEND": "a,,b"},
        "environment variable VLLM_FL_FLAGOS_BLACKLIST_APPEND: '' is empty; expected the name of an operator",
    ),
    "whitelist and blacklist": (
        {"VLLM_FL_OOT_WHITELIST": "a", "VLLM_FL_OOT_BLACKLIST": "b"},
        "environment variable VLLM_FL_OOT_WHITELIST: oot_whitelist is set here and oot_blacklist by environment "
        "variable VLLM_FL_OOT_BLACKLIST; only one of them can count. Remove one, or switch off the one of a lower "
        "layer: oot_whitelist '*', or an empty oot_blacklist",
    ),
}


@pytest.mark.parametrize(("environ", "expected"), VARIABLES.values(), ids=VARIABLES)
def test_variable(load: Load, environ: dict[str, str], expected: str) -> None:
    assert message(load, **environ) == expected


def test_unknown_variable_that_resembles_none_lists_all(load: Load) -> None:
    text = message(load, VLLM_FL_ZZZ="1")
    start = "environment variable VLLM_FL_ZZZ: there is no such variable; known variables: VLLM_FL_CONFIG, "
    assert text.startswith(start)
    assert text.endswith(", FLAGCX_CUSTOM_OP_ENABLE, FLAGCX_PATH")


def test_missing_file(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "nowhere.yaml"
    assert message(load, VLLM_FL_CONFIG=str(path)) == (
        f"environment variable VLLM_FL_CONFIG: file '{path}' does not exist; give the path of a YAML file"
    )


def test_home_of_nobody(load: Load) -> None:
    assert message(load, VLLM_FL_CONFIG="~no-such-user/a.yaml") == (
        "environment variable VLLM_FL_CONFIG: file '~no-such-user/a.yaml' does not exist; give the path of a YAML file"
    )


def test_missing_file_beside_one_of_a_similar_name(load: Load, tmp_path: Path) -> None:
    (tmp_path / "serving.yaml").touch()
    assert message(load, VLLM_FL_CONFIG="servng.yaml") == (
        "environment variable VLLM_FL_CONFIG: file 'servng.yaml' does not exist; did you mean 'serving.yaml'?"
    )


def test_directory_instead_of_a_file(load: Load, tmp_path: Path) -> None:
    assert message(load, VLLM_FL_CONFIG=str(tmp_path)) == (
        f"environment variable VLLM_FL_CONFIG: '{tmp_path}' is a directory; give the path of a YAML file"
    )


def test_file_below_a_file(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert message(load, VLLM_FL_CONFIG="a/b.yaml") == (
        "environment variable VLLM_FL_CONFIG: file 'a/b.yaml' cannot be read: Not a directory; "
        "give the path of a readable YAML file"
    )


@pytest.mark.parametrize("path", ["", " "], ids=["empty", "blank"])
def test_empty_path(load: Load, path: str) -> None:
    assert message(load, VLLM_FL_CONFIG=path) == (
        f"environment variable VLLM_FL_CONFIG: {path!r} is empty; give the path of a YAML file or unset the variable"
    )


def test_file_that_is_not_utf8(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"strict: yes\nprefer: \xff\n")
    assert message(load, VLLM_FL_CONFIG="a.yaml") == "a.yaml:2:9: byte 0xff is not UTF-8; save the file as UTF-8"


def test_endless_file(load: Load) -> None:
    assert message(load, VLLM_FL_CONFIG="/dev/zero") == (
        "/dev/zero:1:1: the file is larger than 1048576 bytes, which no configuration needs"
    )


@pytest.mark.parametrize("text", ["a: &x [*x]\n", "op_backends: &x {a: *x}\n"], ids=["list", "mapping"])
def test_alias_of_itself(load: Load, text: str) -> None:
    assert "nested too deeply" in message(load, text)


def test_deep_nesting(load: Load) -> None:
    assert message(load, "[" * 100_000) == "my.yaml:1:1: not usable: nested too deeply"


def test_all_problems_at_once_in_the_order_of_the_file(load: Load) -> None:
    text = message(
        load,
        "strict: maybe\nprefr: vendor\nop_backends:\n  moe_sum: [x, y]\n",
        "prefer: fast\nlog_level: DEBUG\n",
        VLLM_FL_PREFER="quick",
        VLLM_FL_STRIKT="1",
    )
    assert text == "\n".join(
        (
            "8 problems in the configuration:",
            "  platform file ascend.yaml:1:9: prefer: 'fast' is not one of flagos, vendor, reference",
            "  platform file ascend.yaml:2:1: log_level: a platform file may not set this key, the choice is the "
            "user's; remove it",
            f"  my.yaml:1:9: strict: 'maybe' is not {_BOOLEAN}",
            f"  my.yaml:2:1: unknown key 'prefr' (known: {_KNOWN}); did you mean 'prefer'?",
            f"  my.yaml:4:13: op_backends.moe_sum: 'x' is not a token ({_TOKENS})",
            f"  my.yaml:4:16: op_backends.moe_sum: 'y' is not a token ({_TOKENS})",
            "  environment variable VLLM_FL_STRIKT: there is no such variable; did you mean 'VLLM_FL_STRICT'?",
            "  environment variable VLLM_FL_PREFER: 'quick' is not one of flagos, vendor, reference",
        )
    )


def test_problems_are_kept_one_by_one(load: Load) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load("strict: maybe\nprefer: fast\n")
    assert [(problem.where, problem.key) for problem in caught.value.problems] == [
        ("my.yaml:1:9", "strict"),
        ("my.yaml:2:9", "prefer"),
    ]


def test_whitelist_of_a_variable_and_blacklist_of_the_platform(load: Load) -> None:
    text = message(load, platform="oot_blacklist: [a]\n", VLLM_FL_OOT_WHITELIST="b")
    assert text == (
        "environment variable VLLM_FL_OOT_WHITELIST: oot_whitelist is set here and oot_blacklist by platform file "
        "ascend.yaml:1:1; only one of them can count. Remove one, or switch off the one of a lower layer: "
        "oot_whitelist '*', or an empty oot_blacklist"
    )


def test_missing_platform_file(tmp_path: Path) -> None:
    from vllm_fl.config import load_settings

    with pytest.raises(ConfigError) as caught:
        load_settings({}, tmp_path / "ascend.yaml")
    assert str(caught.value) == (
        "platform file ascend.yaml: cannot be read: No such file or directory; "
        "reinstall the distribution that it belongs to"
    )


NAMES = {
    "operator": (
        "op_backends:\n  silu_and_mull: [vendor]\n",
        "my.yaml:2:3: op_backends: unknown operator 'silu_and_mull' (known: moe_sum, silu_and_mul); "
        "did you mean 'silu_and_mul'?",
    ),
    "vendor of a token": (
        "op_backends:\n  moe_sum: [flagos, 'vendor:acmee']\n",
        "my.yaml:2:21: op_backends.moe_sum: unknown vendor 'acmee' (known: acme); did you mean 'acme'?",
    ),
    "implementation": (
        "op_backends: {moe_sum: impl:vendor.acme}\n",
        "my.yaml:1:24: op_backends.moe_sum: unknown implementation 'vendor.acme' (none is known)",
    ),
    "allowed vendor": (
        "allow_vendors:\n- acme\n- other\n",
        "my.yaml:3:3: allow_vendors: unknown vendor 'other' (known: acme)",
    ),
    "denied vendor": (
        "deny_vendors: [Acme]\n",
        "my.yaml:1:16: deny_vendors: unknown vendor 'Acme' (known: acme); did you mean 'acme'?",
    ),
}


KNOWN = KnownNames(operators=["silu_and_mul", "moe_sum"], vendors=["acme"], impl_ids=[])


@pytest.mark.parametrize(("text", "expected"), NAMES.values(), ids=NAMES)
def test_name_that_nothing_has_registered(load: Load, text: str, expected: str) -> None:
    settings = load(text)
    with pytest.raises(ConfigError) as caught:
        settings.check_names(KNOWN)
    assert str(caught.value) == expected
    assert [str(problem) for problem in check_file("my.yaml", KNOWN)] == [expected]


def test_names_of_variables(load: Load) -> None:
    settings = load(VLLM_FL_PER_OP="rms_nrom=impl:x", VLLM_FL_FLAGOS_BLACKLIST="mn", VLLM_FL_OOT_WHITELIST="moe")
    with pytest.raises(ConfigError) as caught:
        settings.check_names(KnownNames(["rms_norm"], [], ["y"], flagos_operators=["mm"], oot_layers=["fused_moe"]))
    assert str(caught.value) == "\n".join(
        (
            "4 problems in the configuration:",
            "  environment variable VLLM_FL_PER_OP: op_backends: unknown operator 'rms_nrom' (known: rms_norm); "
            "did you mean 'rms_norm'?",
            "  environment variable VLLM_FL_PER_OP: op_backends.rms_nrom: unknown implementation 'x' (known: y)",
            "  environment variable VLLM_FL_FLAGOS_BLACKLIST: flagos_blacklist: unknown flagos operator 'mn' "
            "(known: mm)",
            "  environment variable VLLM_FL_OOT_WHITELIST: oot_whitelist: unknown layer 'moe' (known: fused_moe)",
        )
    )


def test_many_known_names_are_counted(load: Load) -> None:
    settings = load(VLLM_FL_PER_OP="x1o=vendor")
    with pytest.raises(ConfigError) as caught:
        settings.check_names(KnownNames([f"op{i}" for i in range(41)], [], []))
    assert (
        str(caught.value) == "environment variable VLLM_FL_PER_OP: op_backends: unknown operator 'x1o' (41 are known)"
    )
