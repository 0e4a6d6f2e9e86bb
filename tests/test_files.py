"""A file is written whole or not at all."""

import os
from pathlib import Path

import pytest

from jetrl_jax.files import write_whole


@pytest.mark.parametrize("content", ["Größe\n1\r\n", b"\xff\x00"])
def test_a_file_holds_what_was_written_and_stands_alone(tmp_path, content):
    path = tmp_path / "deep" / "er" / "f"
    for _ in range(2):  # new, then in place of the old one
        write_whole(str(path), content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(path.parent.iterdir()) == [path]


def disk_full(self, data):
    with self.open("wb") as file:
        file.write(data[:2])
    raise OSError("no space left on device")


def interrupted(old, new):
    raise KeyboardInterrupt


@pytest.mark.parametrize("content", ["new text", b"new bytes"])
@pytest.mark.parametrize(("where", "name", "fault", "error"), [
    (Path, "write_bytes", disk_full, OSError),
    (os, "replace", interrupted, KeyboardInterrupt),
])  # fmt: skip
def test_a_failure_halfway_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch, content, where, name, fault, error):
    path = tmp_path / "f"
    path.write_text("old")
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(where, name, fault)
        write_whole(path, content)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", "x")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "f", "\ud800")
    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError):
        write_whole(tmp_path / "file" / "f", "x")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder"]
