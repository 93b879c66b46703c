"""Where a job may write: found out before the work, and without touching anything."""

import os
import threading
from pathlib import Path

import pytest

from dflash_jax.infer.jobs.batch_job import JobFiles
from dflash_jax.infer.jobs.journal import Journal, settings_path
from tests.jobs import records


@pytest.fixture
def room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("{}\n")
    return tmp_path


def everything(room):
    return {
        path: (os.lstat(path).st_mtime_ns, path.is_file() and not path.is_symlink() and path.read_bytes())
        for path in room.rglob("*")
    }


def checked(output="out.jsonl", summary=None, source=("in.jsonl",), **more):
    JobFiles(source, Path(output), Path(summary) if summary else None, **more).check()


@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_touched(room, there):
    """A finished output may appear between two looks; it was opened, and removed if it had not been there before."""
    if there:
        for name in ("out.jsonl", "s.json"):
            Path(name).write_text("{}\n")
    Path("far").mkdir()
    Path("link").symlink_to("far/out.jsonl")
    before = everything(room)
    checked(summary="s.json", ordered=True)
    checked("link", "s.json", process=1, processes=3)
    assert everything(room) == before


def test_a_dangling_link_is_followed(room):
    Path("far").mkdir()
    Path("out.jsonl").symlink_to("far/answers.jsonl")
    checked()
    with Journal("out.jsonl", {}, lambda record: record["id"]) as book:
        book.append({"id": "a"})
    assert Path("out.jsonl").is_symlink()
    assert list(records(room / "far" / "answers.jsonl")) == ["a"]
    assert os.listdir("far") == ["answers.jsonl"]


def link(name, target):
    Path(name).symlink_to(target)


REFUSED = {
    "a loop": (lambda: link("out.jsonl", "out.jsonl"), {}, "out.jsonl"),
    "a longer loop": (lambda: (link("out.jsonl", "b"), link("b", "out.jsonl")), {}, "out.jsonl"),
    "a directory in a loop": (lambda: link("d", "d"), {"output": "d/out.jsonl"}, "d"),
    "a summary in a loop": (lambda: link("s", "s"), {"summary": "s"}, "s"),
    "a link to nowhere": (lambda: link("out.jsonl", "gone/a.jsonl"), {}, "gone"),
    "no directory": (None, {"output": "gone/out.jsonl"}, "gone"),
    "a file as a directory": (None, {"output": "in.jsonl/out.jsonl"}, "in.jsonl"),
    "a directory": (lambda: Path("out.jsonl").mkdir(), {}, "out.jsonl"),
    "a directory as summary": (lambda: Path("s").mkdir(), {"summary": "s"}, "s"),
    "a pipe as summary": (lambda: os.mkfifo("s"), {"summary": "s"}, "s is a pipe"),
    "a pipe to be ordered": (lambda: os.mkfifo("out.jsonl"), {"ordered": True}, "out.jsonl is a pipe"),
    "a name that is too long": (None, {"output": "n" * 300}, "nnn"),
    "a name whose settings file's is": (None, {"output": "n" * 250}, "nnn"),
    "its own settings": (None, {"summary": "out.jsonl.settings.json"}, "which the job keeps beside"),
    "its own settings, linked": (
        lambda: link("s", "out.jsonl.settings.json"),
        {"summary": "s"},
        "s is out.jsonl.settings.json",
    ),
    "its lock": (None, {"summary": "out.jsonl.lock"}, "which the job keeps beside"),
    "its part": (None, {"summary": "out.jsonl.part", "process": 1, "processes": 2}, None),
    "a part": (
        lambda: Path("out.jsonl.part-1-of-2").touch(),
        {"summary": "out.jsonl.part-1-of-2"},
        "which the job keeps beside",
    ),
    "the output": (None, {"summary": "../{}/out.jsonl"}, "choose two files"),
    "the output, linked": (lambda: link("s", "out.jsonl"), {"summary": "s"}, "choose two files"),
    "the input": (None, {"output": "in.jsonl"}, "in.jsonl is the input"),
    "the input as summary": (None, {"summary": "in.jsonl"}, "in.jsonl is the input"),
    "the input, linked": (lambda: link("out.jsonl", "in.jsonl"), {}, "out.jsonl is the input"),
    "the input, linked hard": (lambda: os.link("in.jsonl", "out.jsonl"), {}, "out.jsonl is the input"),
    "the summary of a process": (
        lambda: Path("s.1").touch(),
        {"summary": "s", "source": ("s.1",), "process": 1, "processes": 2},
        "s.1 is the input",
    ),
    "settings as input": (
        lambda: Path("out.jsonl.settings.json").touch(),
        {"source": ("out.jsonl.settings.json",)},
        "is the input",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_and_named(room, name):
    make, given, named = REFUSED[name]
    if make:
        make()
    given = {key: value.format(room.name) if isinstance(value, str) else value for key, value in given.items()}
    before = everything(room)
    if named is None:
        checked(**given)
    else:
        with pytest.raises((ValueError, OSError)) as failed:
            checked(**given)
        error = failed.value
        assert named in (f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
    assert everything(room) == before


def test_a_summary_may_be_anything_that_can_be_replaced(room):
    Path("s.json").write_bytes(b"\xff\xfe")
    checked(summary="s.json")
    reader, writer = os.pipe()
    checked(summary=f"/proc/self/fd/{writer}")
    os.close(reader)
    os.close(writer)


def test_an_input_in_a_loop_is_named(room):
    Path("loop.jsonl").symlink_to("loop.jsonl")
    for source in ("loop.jsonl", "*.jsonl"):
        with pytest.raises(OSError, match="symbolic links") as failed:
            checked(source=(source,))
        assert failed.value.filename == "loop.jsonl"


def test_a_pipe_as_output_says_that_it_waits(room, caplog):
    os.mkfifo("out.jsonl")
    caplog.set_level("INFO", "dflash_jax")
    checked()
    found = []
    reader = threading.Thread(target=lambda: found.append(Path("out.jsonl").read_text()))
    reader.start()
    with Journal("out.jsonl", {}, lambda record: record["id"]) as book:
        book.append({"id": "a"})
    reader.join()
    assert found == ['{"id": "a"}\n']
    assert "waiting until another program reads it" in caplog.text
    assert settings_path(Path("out.jsonl")).exists()
