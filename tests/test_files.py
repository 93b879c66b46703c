"""Files that appear whole or not at all."""

import os

import pytest

from dflash_jax import files


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})
    before = path.stat().st_ino
    files.write_json(path, {"a": 1})
    assert path.stat().st_ino == before  # it says nothing new
    files.write_json(path, {"a": 2})
    assert path.read_text() == '{\n  "a": 2\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.replace(path, b"old")

    def full(self, data):
        self.touch()
        raise OSError("full")

    monkeypatch.setattr(type(path), "write_bytes", full)
    with pytest.raises(OSError, match="full"):
        files.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_written_is_named(tmp_path):
    path = tmp_path / "gone" / "figures.json"
    with pytest.raises(FileNotFoundError) as failed:
        files.write_json(path, {})
    assert failed.value.filename == str(path)


def test_links_stay_and_pipes_are_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    files.write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_text(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
