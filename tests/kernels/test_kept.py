"""Compiled kernels on disk: what is not whole is not there, and a kernel is filed under all that it was made from."""

import types
import zlib
from pathlib import Path

import pytest

from jetrl_jax.kernels import kept

FOUND = dict.fromkeys(kept.FIELDS, 1) | {"binary": ".version 8.8", "tensordesc_meta": [{"swizzle": 3}]}


def test_what_is_kept_comes_back(tmp_path):
    path = tmp_path / "deep" / "k.z"
    assert kept._read(path) is None and kept._read(None) is None
    kept._write(path, FOUND)
    assert kept._read(path) == FOUND
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"half", zlib.compress(b"{"), zlib.compress(b"[]"), zlib.compress(b'{"name": 1}')])
def test_a_file_that_is_not_whole_is_not_there(tmp_path, content):
    (tmp_path / "k.z").write_bytes(content)
    assert kept._read(tmp_path / "k.z") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    kept._write(tmp_path / "file" / "k.z", FOUND)
    kept._write(tmp_path / "k.z", {"name": object()})
    kept._write(None, FOUND)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_folder_is_named_by_the_environment(monkeypatch):
    monkeypatch.setenv("JETRL_KERNEL_CACHE", "here")
    assert kept.folder() == Path("here")
    monkeypatch.setenv("JETRL_KERNEL_CACHE", "off")
    assert kept.folder() is None
    monkeypatch.delenv("JETRL_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert kept.folder() == Path("cache/jetrl/kernels")


def test_every_difference_has_a_file_of_its_own(monkeypatch):
    compiler = pytest.importorskip("triton.compiler.compiler")
    monkeypatch.setenv("JETRL_KERNEL_CACHE", "here")

    def path(source="a", signature="*fp32", tile=64, fusion=True, capability=90):
        spec = types.SimpleNamespace(signature={"x": signature}, constants={"T": tile}, attrs={(0,): 16}, specialization=[("x", 16)])
        target = compiler.GPUTarget("cuda", capability, 32)
        return kept._path(types.SimpleNamespace(cache_key=source), spec, target, {"enable_fp_fusion": fusion})

    all_ = [path(), path("b"), path(signature="*bf16"), path(tile=128), path(fusion=False), path(capability=100)]
    assert len(set(all_)) == 6 and path() == all_[0]
    assert path(tile=object()) is None  # an address in it would be another in the next process
