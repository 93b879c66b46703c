"""Files that appear whole or not at all."""

import contextlib
import errno
import os
from pathlib import Path

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


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    files.replace(path, b"old")

    def full():
        yield b"ne"
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        files.replace_by(path, full())
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


def test_what_is_no_text_is_replaced(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xff\xfe")
    files.write_json(path, {})
    assert path.read_text() == "{}\n"


def test_nothing_beside_a_file_is_touched(tmp_path):
    (tmp_path / "a.writing").mkdir()
    long = tmp_path / ("n" * 250)
    for path in (tmp_path / "a", long):
        files.replace(path, b"new")
        assert path.read_bytes() == b"new"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a.writing", long.name}


def test_a_pipe_that_is_an_open_file_is_written_to():
    """`/dev/stdout` is one in `command | jq`; what it is a link to is no path."""
    reader, writer = os.pipe()
    files.write_text(Path(f"/proc/self/fd/{writer}"), "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    os.close(writer)


def test_links_in_a_loop_are_an_error_that_names_them(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for write in (files.check_writable, files.followed, lambda path: files.replace(path, b"")):
        with pytest.raises(OSError, match="symbolic links") as failed:
            write(tmp_path / "a")
        assert failed.value.filename == str(tmp_path / "a")


def test_a_message_is_one_line_that_can_be_printed():
    shown = files.one_line("a\nb\x1b[0m\u2028\ud800 " + "w" * 10**6 + " \u00e9")
    assert shown.isprintable()
    assert shown.startswith("a\\nb\\x1b[0m\\u2028\\ud800 www")
    assert shown.endswith("www \u00e9")
    assert len(shown) < 500
    assert len(files.one_line("word " * 10**5)) <= files.LONGEST_LINE


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("config.json must be right"), "{}/config.json must be right"),
        (ValueError("wrong\nhere"), "{}/config.json: wrong\\nhere"),
        (ValueError("{}/config.json is wrong"), "{}/config.json is wrong"),
        (KeyError("vocab"), "{}/config.json: 'vocab' is missing"),
        (TypeError("no"), "{}/config.json: TypeError: no"),
        (RecursionError("no"), "{}/config.json: it is nested too deeply"),
        (OSError("no errno"), "{}/config.json: no errno"),
    ],
)
def test_whatever_a_reader_raises_names_the_file(error, said, tmp_path):
    if "{}" in str(error):
        error = type(error)(str(error).format(tmp_path))
    with pytest.raises(ValueError) as failed, files.reading(tmp_path / "config.json"):  # noqa: PT011 (compared below)
        raise error
    assert str(failed.value) == said.format(tmp_path)


def test_what_the_system_refuses_stays_so_and_is_named(tmp_path):
    with pytest.raises(OSError, match="too large") as failed, files.reading(tmp_path / "a"):
        raise OSError(errno.EFBIG, "too large")
    assert failed.value.filename == str(tmp_path / "a")
    with pytest.raises(ImportError), files.reading(tmp_path / "a"):
        raise ImportError("what is not installed is not the file's fault")


NO_OBJECTS = [b"", b"[]", b"{", b"\xff{}", b"[" * 10**5, b'{"a":' * 10**5, b'{"a": %s}' % (b"9" * 400), b"{}\0"]


@pytest.mark.parametrize("data", NO_OBJECTS, ids=range(len(NO_OBJECTS)))
def test_what_is_no_json_object_is_an_error_that_names_the_file(data, tmp_path):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"/a\.json must (be|hold)") as failed:
        files.read_json(tmp_path / "a.json")
    assert str(failed.value).isprintable()


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # would wait for ever
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero", "."):
        with pytest.raises(ValueError, match="must be a file"):
            files.read_json(tmp_path / name)


def test_a_directory_is_replaced_whole_and_what_lies_beside_it_stays(tmp_path):
    for name in ("far", "far.old", "far.writing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "before").touch()
    (tmp_path / "link").symlink_to("far")
    with contextlib.suppress(ZeroDivisionError), files.replacing(tmp_path / "link") as directory:
        (directory / "never").touch()
        raise ZeroDivisionError
    assert os.listdir(tmp_path / "far") == ["before"]
    with files.replacing(tmp_path / "link") as directory:
        (directory / "after").touch()
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "far") == ["after"]
    assert sorted(os.listdir(tmp_path)) == ["far", "far.old", "far.writing", "link"]
    with files.replacing(tmp_path / "new" / "deep") as directory:
        (directory / "after").touch()
    assert os.listdir(tmp_path / "new" / "deep") == ["after"]
