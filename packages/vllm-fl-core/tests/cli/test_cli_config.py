"""``vllm-fl config``: forty broken files, each with its place, its value, what is allowed and the nearest match."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_fl.cli import main
from vllm_fl.config import KEYS, KnownNames

NAMES = KnownNames(
    operators=frozenset({"rms_norm", "silu_and_mul", "moe_sum"}),
    vendors=frozenset({"acme", "nvidia"}),
    impl_ids=frozenset({"reference.torch", "flagos.triton", "vendor.acme"}),
)
_OPERATORS = "moe_sum, rms_norm, silu_and_mul"
_TOKENS = "flagos, reference, vendor, vendor:NAME, impl:ID"
_BOOLEAN = "true/false, yes/no, on/off or 1/0"
_LEVELS = "DEBUG, INFO, WARNING, ERROR, CRITICAL"
_NONE = ""
_OPS = "op_backends:\n  "

#: name -> (text of the file, "line:column", value, what is allowed, nearest match). What a mistake has none of is "".
BROKEN: dict[str, tuple[str, str, str, str, str]] = {
    "key misspelt": ("\nprefr: vendor\n", "2:1", "'prefr'", ", ".join(KEYS), "prefer"),
    "key of another program": ("strict: no\nper_op: {}\n", "2:1", "'per_op'", "the key is 'op_backends'", _NONE),
    "key in the wrong case": ("Strict: yes\n", "1:1", "'Strict'", "known: ", "strict"),
    "key with a dash": ("op-backends: {}\n", "1:1", "'op-backends'", "known: ", "op_backends"),
    "key of the tuner": ("action: auto_tune\n", "1:1", "'action'", "vllm-fl tune MODEL", _NONE),
    "key twice": ("strict: yes\nstrict: no\n", "2:1", "first in line 1", "keep one of them", _NONE),
    "kind": ("prefer: flaggems\n", "1:9", "'flaggems'", "flagos, vendor, reference", "flagos"),
    "kind in capitals": ("prefer: Vendor\n", "1:9", "'Vendor'", "flagos, vendor, reference", "vendor"),
    "kind as a number": ("prefer: 1\n", "1:9", "'1'", "flagos, vendor, reference", _NONE),
    "kind without a value": ("prefer:\n", "1:8", "has no value", "flagos, vendor, reference", _NONE),
    "kinds as a list": ("prefer: [vendor, flagos]\n", "1:9", "a list", "flagos, vendor, reference", _NONE),
    "boolean misspelt": ("strict: ture\n", "1:9", "'ture'", _BOOLEAN, "true"),
    "boolean as a number": ("strict: 2\n", "1:9", "'2'", _BOOLEAN, _NONE),
    "boolean as a word": ("use_flaggems: never\n", "1:15", "'never'", _BOOLEAN, _NONE),
    "boolean as a mapping": ("oot_enabled: {a: b}\n", "1:14", "a mapping", _BOOLEAN, _NONE),
    "operator misspelt": (_OPS + "rmsnorm: vendor\n", "2:3", "'rmsnorm'", _OPERATORS, "rms_norm"),
    "operator that is no name": (
        "op_backends:\n  rms norm: vendor\n",
        "2:3",
        "'rms norm'",
        "name of an operator",
        _NONE,
    ),
    "operator twice": (
        "op_backends:\n  moe_sum: vendor\n  moe_sum: flagos\n",
        "3:3",
        "first in line 2",
        "keep one",
        _NONE,
    ),
    "operators as a list": ("op_backends: [moe_sum]\n", "1:14", "a list", "'rms_norm: [vendor, flagos]'", _NONE),
    "token misspelt": (_OPS + "moe_sum: [flagos, refrence]\n", "2:21", "'refrence'", _TOKENS, "reference"),
    "token of a wrong form": (
        "op_backends:\n  moe_sum: vendorr:acme\n",
        "2:12",
        "'vendorr:acme'",
        _TOKENS,
        "vendor:acme",
    ),
    "token without a name": ("op_backends: {moe_sum: 'impl:'}\n", "1:24", "'impl:'", _TOKENS, _NONE),
    "token twice": (
        "op_backends: {moe_sum: vendor|vendor}\n",
        "1:24",
        "vendor more than once",
        "each token once",
        _NONE,
    ),
    "no token": ("op_backends: {moe_sum: []}\n", "1:24", "names no token", _TOKENS, _NONE),
    "vendor in a token": ("op_backends: {moe_sum: vendor:acmee}\n", "1:24", "'acmee'", "acme, nvidia", "acme"),
    "implementation in a token": (
        _OPS + "moe_sum: impl:flagos.trition\n",
        "2:12",
        "'flagos.trition'",
        "flagos.triton, reference.torch, vendor.acme",
        "flagos.triton",
    ),
    "vendor denied": ("deny_vendors: [nvdia]\n", "1:16", "'nvdia'", "acme, nvidia", "nvidia"),
    "vendor allowed": ("allow_vendors:\n  - acme\n  - acne\n", "3:5", "'acne'", "acme, nvidia", "acme"),
    "vendor that is no name": ("deny_vendors: [a b]\n", "1:16", "'a b'", "the name of a vendor", _NONE),
    "list with a hole": ("deny_vendors: acme,,nvidia\n", "1:15", "'acme,,nvidia'", "names separated by commas", _NONE),
    "list as a mapping": ("deny_vendors: {a: b}\n", "1:15", "a mapping", "names separated by commas", _NONE),
    "edits and plain names": ("oot_blacklist: [a, +b]\n", "1:16", "plain entries (a)", "only +NAME and -NAME", _NONE),
    "added and removed": ("oot_blacklist: [+a, -a]\n", "1:16", "removes a", "keep one of the two", _NONE),
    "star in a blacklist": ("oot_blacklist: ['*']\n", "1:16", "'*'", "name the entries", _NONE),
    "two lists of one family": (
        "oot_blacklist: [a]\noot_whitelist: [b]\n",
        "2:1",
        "oot_blacklist",
        "Remove one",
        _NONE,
    ),
    "log level": ("log_level: WARN\n", "1:12", "'WARN'", _LEVELS, "WARNING"),
    "module": ("plugin_modules: [my-module]\n", "1:18", "'my-module'", "the name of a module", _NONE),
    "path": ("oplist_path: ''\n", "1:14", "''", "a path", _NONE),
    "list in place of keys": ("- prefer\n", "1:1", "a list", "'prefer: vendor'", _NONE),
    "text in place of keys": ("vendor\n", "1:1", "'vendor'", "'prefer: vendor'", _NONE),
    "bracket left open": ("op_backends: {rms_norm: [vendor\n", "2:1", "not valid YAML", "expected", _NONE),
    "tab for a space": ("op_backends:\n\trms_norm: vendor\n", "2:1", "'\\t'", "not valid YAML", _NONE),
    "tag": ("strict: !!python/name:os.system x\n", "1:9", "python/name:os.system", "remove it", _NONE),
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, no_settings: None, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_fl.diagnostics.known_names", lambda: NAMES)


def test_there_are_forty() -> None:
    assert len(BROKEN) >= 40
    assert len({text for text, *_ in BROKEN.values()}) == len(BROKEN)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("name", BROKEN)
def test_broken_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, place, value, allowed, near = BROKEN[name]
    Path("my.yaml").write_text(text)
    assert main(["config", "check", "my.yaml", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert f"{problem['line']}:{problem['column']}" == place
    assert problem["file"] == "my.yaml"
    assert value in problem["message"]
    assert allowed in problem["message"]
    assert ("did you mean" in problem["message"]) == bool(near)
    assert not near or f"; did you mean {near!r}?" in problem["message"]
    assert main(["config", "check", "my.yaml"]) == 2
    assert capsys.readouterr().out.startswith(f"my.yaml:{place}: ")


@pytest.mark.usefixtures("names")
def test_all_mistakes_of_a_file_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text(
        "prefer: flaggems\n"
        "op_backends:\n"
        "  rmsnorm: [vendor:acmee, refrence]\n"
        "  moe_summ: vendor\n"
        "deny_vendors: [nvdia]\n"
        "strict: maybe\n"
    )
    assert main(["config", "check", "my.yaml"]) == 2
    places = [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert places == [
        "my.yaml:1:9",
        "my.yaml:3:3",
        "my.yaml:3:13",
        "my.yaml:3:27",
        "my.yaml:4:3",
        "my.yaml:5:16",
        "my.yaml:6:9",
    ]


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("operators", "columns"),
    [
        ("rmsnorm: [vendor, a, b, reference]", [15, 33, 36]),
        ("rmsnorm: [flagos, vendor, reference, x]", [15, 52]),
        ("rmsnorm: a|vendor:acmee", [15, 24, 24]),
        ("rmsnorm: {a: b}", [15, 24]),
        ("rms norm: a", [15, 25]),
        ("rms norm: vendor", [15]),
        ("rmsnorm: [[a]]", [15, 25]),
        ("rmsnorm: [vendor, vendor]", [15, 24]),
    ],
)
def test_every_mistake_below_an_operator(
    operators: str, columns: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("my.yaml").write_text(f"op_backends: {{{operators}}}\n")
    assert main(["config", "check", "my.yaml", "--json"]) == 2
    assert [problem["column"] for problem in json.loads(capsys.readouterr().out)["problems"]] == columns


def test_a_sound_file_with_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("prefer: vendor\nop_backends: {rms_norm: vendor|flagos}\n")
    assert main(["config", "check", "my.yaml"]) == 0
    assert capsys.readouterr().out == "my.yaml: nothing is wrong.\n"


def test_layers_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("oot_blacklist: [rms_nrom, silu_and_mul]\n")
    assert main(["config", "check", "my.yaml"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("my.yaml:1:17: oot_blacklist: unknown layer 'rms_nrom' (known: ")
    assert out.endswith("; did you mean 'rms_norm'?\n")


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", "your.yaml"]) == 2
    assert capsys.readouterr().out == "file 'your.yaml' does not exist; give the path of a YAML file\n"


def test_show_says_where_each_value_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("my.yaml").write_text(_OPS + "rms_norm: [reference, flagos]\n")
    monkeypatch.setenv("VLLM_FL_CONFIG", "my.yaml")
    monkeypatch.setenv("VLLM_FL_STRICT", "on")
    assert main(["config", "show", "--json"]) == 0
    rows = {(row["key"], row["item"]): row for row in json.loads(capsys.readouterr().out)}
    assert {key for key, _ in rows} == set(KEYS)
    assert rows["op_backends", "rms_norm"] == {
        "key": "op_backends",
        "item": "rms_norm",
        "value": ["reference", "flagos"],
        "layer": "file",
        "origin": "my.yaml:2:3",
    }
    assert rows["strict", None]["value"] is True
    assert rows["strict", None]["origin"] == "environment variable VLLM_FL_STRICT"
    assert {row["origin"] for row in rows.values() if row["layer"] == "default"} == {"default"}
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["config", "show"]) == 0
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "op_backends.rms_norm reference | flagos file my.yaml:2:3" in lines
    assert "strict true environment environment variable VLLM_FL_STRICT" in lines


def test_show_with_a_broken_configuration(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_FL_STRICT", "maybe")
    assert main(["config", "show"]) == 2
    assert "environment variable VLLM_FL_STRICT: 'maybe' is not a boolean" in capsys.readouterr().err


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == set(KEYS)
    assert schema["additionalProperties"] is False
