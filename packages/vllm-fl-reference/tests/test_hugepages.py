"""Large pages are asked for where it makes sense, and harm nothing."""

from __future__ import annotations

import mmap
import sys

import pytest

from vllm_fl_reference import hugepages

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


@linux
def test_large_private_memory_is_found_and_keeps_its_contents() -> None:
    size = 32 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:5] = b"first"
        memory[-4:] = b"last"
        assert hugepages.use_huge_pages() >= size - (4 << 20)
        assert (memory[:5], memory[-4:]) == (b"first", b"last")


@linux
def test_mappings_are_whole_pages_of_at_least_the_minimum() -> None:
    for start, length in hugepages._large_mappings(8 << 20):
        assert start % (2 << 20) == 0
        assert length % (2 << 20) == 0
        assert length >= 8 << 20


def test_only_private_writable_anonymous_mappings(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f0000000000-7f0004000000 rw-p 00000000 00:00 0 \n"
        "7f1000000000-7f1004000000 r--p 00000000 00:00 0 \n"
        "7f2000000000-7f2004000000 rw-s 00000000 00:00 0 \n"
        "7f3000000000-7f3004000000 rw-p 00000000 08:01 42 /some/model.bin\n"
        "7f4000000000-7f4004000000 rw-p 00000000 00:00 0 [stack]\n"
        "560000100000-560004000000 rw-p 00000000 00:00 0 [heap]\n"
        "7f5000000000-7f5000100000 rw-p 00000000 00:00 0 \n"
    )
    monkeypatch.setattr(hugepages, "_MAPS", maps)
    assert hugepages._large_mappings(8 << 20) == [(0x7F0000000000, 0x4000000), (0x560000200000, 0x3E00000)]


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert hugepages.use_huge_pages() == 0
