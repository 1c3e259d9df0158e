"""Finding and loading FlagCX: where it is looked for, what is told by symbols, and what each failure says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from comm_support import FORMS, Doubles

from vllm_fl_comm.errors import FlagCXLoadError, FlagCXStatusError
from vllm_fl_comm.flagcx import RESULTS, Library, find, forget, load

NAME_IT = "name the folder that FlagCX was built in"


def message(path: str | None) -> str:
    with pytest.raises(FlagCXLoadError) as caught:
        find(path)
    return str(caught.value)


@pytest.mark.parametrize("below", ["", "lib", "build/lib"])
def test_finds_the_library_below_the_folder(tmp_path: Path, below: str) -> None:
    file = tmp_path / below / "libflagcx.so"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert find(str(tmp_path)) == str(file)
    assert find(str(file)) == str(file)


def test_prefers_the_installed_one_to_the_built_one(tmp_path: Path) -> None:
    for below in ("lib", "build/lib"):
        (tmp_path / below).mkdir(parents=True)
        (tmp_path / below / "libflagcx.so").touch()
    assert find(str(tmp_path)) == str(tmp_path / "lib/libflagcx.so")


def test_without_a_path_the_loader_is_asked() -> None:
    assert find(None) == "libflagcx.so"


def test_missing_folder_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "flagcx").mkdir()
    wrong = tmp_path / "flagcy"
    assert message(str(wrong)) == (
        f"environment variable FLAGCX_PATH: {str(wrong)!r} does not exist; did you mean 'flagcx'?; {NAME_IT}"
    )


def test_empty_path() -> None:
    assert message("") == f"environment variable FLAGCX_PATH: '' is empty; {NAME_IT}, or unset it"


def test_folder_without_the_library(tmp_path: Path) -> None:
    looked = ", ".join(f"{tmp_path}/{below}libflagcx.so" for below in ("", "lib/", "build/lib/"))
    assert message(str(tmp_path)) == (
        f"environment variable FLAGCX_PATH: {str(tmp_path)!r} holds no libflagcx.so (looked for {looked}); build FlagCX"
        " there (make USE_NVIDIA=1, or the flag of your vendor), or name another folder"
    )


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    file = tmp_path / "libflagcx.so"
    file.write_text("text")
    with pytest.raises(FlagCXLoadError) as caught:
        Library(str(file))
    text = str(caught.value)
    assert text.startswith(f"FlagCX cannot be loaded from {file}: ")
    assert text.endswith(f"; remedy: rebuild FlagCX for this machine; 'ldd {file}' shows which library it lacks")


def test_the_loader_knows_none() -> None:
    with pytest.raises(FlagCXLoadError) as caught:
        load()
    assert str(caught.value).startswith("FlagCX cannot be loaded from libflagcx.so: ")
    assert str(caught.value).endswith("; remedy: let FLAGCX_PATH name the folder that FlagCX was built in")


def test_a_library_that_is_not_flagcx(tmp_path: Path) -> None:
    file = tmp_path / "libflagcx.so"
    source = "int flagcxCommDestroy(void *c) { return c != 0; }"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(file)]
    subprocess.run(command, input=source, text=True, check=True)
    with pytest.raises(FlagCXLoadError) as caught:
        Library(str(file))
    text = str(caught.value)
    assert text.startswith(f"{file} lacks flagcxGetUniqueId, flagcxCommInitRank, flagcxCommCount, ")
    assert "flagcxCommDestroy" not in text
    assert text.endswith("remedy: build FlagCX 0.12 or later and let FLAGCX_PATH name it")


def test_load_remembers_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doubles: Doubles) -> None:
    monkeypatch.setenv("FLAGCX_PATH", str(tmp_path / "later"))
    with pytest.raises(FlagCXLoadError) as first:
        load()
    (tmp_path / "later").symlink_to(doubles())
    with pytest.raises(FlagCXLoadError) as second:
        load()
    assert str(second.value) == str(first.value)
    forget()
    assert load().path == str(tmp_path / "later/lib/libflagcx.so")
    assert load() is load()


@pytest.mark.parametrize("form", FORMS)
def test_features_are_told_by_symbols(doubles: Doubles, form: int) -> None:
    features = doubles.library(form).features
    assert features.fills_unique_id == (form >= 13)
    assert features.abort
    assert not features.custom_all_reduce
    assert not features.device_communicator


def test_features_that_a_build_has_or_lacks(doubles: Doubles) -> None:
    assert doubles.library(13, "CUSTOM").features.custom_all_reduce
    assert doubles.library(13, "CUSTOM").features.device_communicator
    assert not doubles.library(13, "WITHOUT_ABORT").features.abort


@pytest.mark.parametrize("form", FORMS)
def test_unique_ids_of_both_forms(doubles: Doubles, form: int) -> None:
    library = doubles.library(form)
    first, second = library.unique_id(), library.unique_id()
    assert len(first) == len(second) == 256
    assert first != second
    assert first.startswith(b"/flagcx-double-")


@pytest.mark.parametrize("code", [*RESULTS, 11])
def test_status_check(library: Library, code: int) -> None:
    if code == 0:
        library.check(code, "flagcxAllReduce")
        return
    with pytest.raises(FlagCXStatusError) as caught:
        library.check(code, "flagcxAllReduce", "group 'tp:0', rank 1 of 2")
    meaning = RESULTS.get(code, "a code that FlagCX does not document")
    assert str(caught.value) == (
        f"flagcxAllReduce (group 'tp:0', rank 1 of 2) returned {code}: {meaning}; library {library.path};"
        " FLAGCX_DEBUG=INFO makes it say more"
    )
    assert (caught.value.function, caught.value.code) == ("flagcxAllReduce", code)
