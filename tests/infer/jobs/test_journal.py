"""What is noted beside an output, and who may write it."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_jax import files
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.jobs import journal, parts, records
from dflash_jax.infer.jobs.answering import job_settings
from dflash_jax.infer.jobs.journal import FORMAT, Journal, settings_path
from dflash_jax.infer.jobs.records import rewrite_in_order
from dflash_jax.infer.text import Text

SETTINGS = {"target": "here", "target_fingerprint": "f" * 64, "temperature": 0.5}


def record_id(record):
    return record["id"]


def made(output, settings=SETTINGS, **options):
    with Journal(output, settings, record_id, **options) as book:
        if not book.done:
            book.append({"id": "a"})
    return book


def check_part(output, settings=SETTINGS):
    parts.check_settings(output, settings)


@pytest.fixture(params=["journal", "part"])
def noted(request, tmp_path):
    """An output with one record, its settings file, and what refuses a continuation."""
    output = tmp_path / "out.jsonl"
    if request.param == "journal":
        made(output)
        return settings_path(output), lambda settings=SETTINGS: made(output, settings)
    part = parts.part_path(output, 1, 2)
    made(part)
    return settings_path(part), lambda settings=SETTINGS: check_part(output, settings)


def test_settings_of_the_same_job_continue_it(noted):
    path, check = noted
    assert json.loads(path.read_text()) == {"format": FORMAT} | SETTINGS
    check()
    check(SETTINGS | {"target": "moved"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": 0.7}, "temperature 0.5, now 0.7"),
        ({"target_fingerprint": "0" * 64}, r"target here \(fingerprint ffffffffffff\), now here \(fingerprint 0000"),
        ({"target_fingerprint": None}, r"now here \(fingerprint None\)"),
        ({"top_k": 4}, "top_k None, now 4"),
    ],
)
def test_other_settings_are_refused(noted, change, named):
    with pytest.raises(ValueError, match=f"other settings: .*{named}.*--force"):
        noted[1](SETTINGS | change)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (json.dumps(SETTINGS).encode(), f"format {FORMAT}, found none"),
        (json.dumps({"format": FORMAT - 1} | SETTINGS).encode(), f"format {FORMAT}, found {FORMAT - 1}"),
        (json.dumps({"format": FORMAT + 1} | SETTINGS).encode(), f"format {FORMAT}, found {FORMAT + 1}"),
        (json.dumps({"format": [FORMAT]} | SETTINGS).encode(), f"format {FORMAT}, found"),
        (b"[]", r"must hold a JSON object, found \[\]"),
        (b"null", "must hold a JSON object, found null"),
        (b"\xff\xfe{}", "readable"),
        (b"{", "readable"),
        (b"[" * 100_000, "readable"),
        (None, "readable"),
    ],
    ids=["none", "older", "newer", "odd", "list", "null", "binary", "torn", "deep", "missing"],
)
def test_settings_that_cannot_be_compared_are_refused_and_forced(noted, content, named):
    path, check = noted
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{named}.*--force") as caught:
        check()
    assert path.name in str(caught.value)
    output = path.with_name(path.name.removesuffix(".settings.json"))
    assert made(output, force=True).done == {"a"}
    check()


def test_other_commands_have_other_remedies(tmp_path):
    made(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="now 1. Burn it$"):
        made(tmp_path / "out.jsonl", SETTINGS | {"temperature": 1}, remedy="Burn it")


def test_an_output_begun_alone_is_not_shared_with_other_settings(tmp_path):
    made(tmp_path / "out.jsonl")
    check_part(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="temperature 0.5, now 1"):
        check_part(tmp_path / "out.jsonl", SETTINGS | {"temperature": 1})


def test_a_process_that_has_just_begun_disturbs_no_other(tmp_path):
    output = tmp_path / "out[1].jsonl"
    part = parts.part_path(output, 0, 2)
    part.touch()
    settings_path(part).with_name(settings_path(part).name + ".writing").write_text("{")
    check_part(output)
    assert parts.found_parts(output) == [part]


def test_settings_of_a_target_without_directory(target, pair_directory):
    noted = lambda target: job_settings(target.directory, target.dtype.name, Text(""), SamplingParams(4), [], 0, None)
    loaded, made = noted(target), noted(target.replace(directory=""))
    assert len(loaded["target_fingerprint"]) == 64
    assert loaded["target"] == str(pair_directory / "target")
    assert made == loaded | {"target": "", "target_fingerprint": None}


def crowd(work, threads):
    """Runs `work` in many threads at once; raises what one of them raised."""
    errors = []

    def guarded():
        try:
            work()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=guarded) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


def test_only_one_at_a_time_is_alone(tmp_path):
    inside, most = 0, 0

    def work():
        nonlocal inside, most
        for _ in range(40):
            with parts._alone(tmp_path / "out.jsonl"):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                inside -= 1

    crowd(work, 6)
    assert most == 1
    assert list(tmp_path.iterdir()) == []


def test_many_merge_at_once(tmp_path):
    output = tmp_path / "out.jsonl"
    names = [str(i) for i in range(6)]
    place = {name: i for i, name in enumerate(names)}.get
    for _ in range(20):
        for i, name in enumerate(names):
            with Journal(parts.part_path(output, i, len(names)), SETTINGS, record_id) as book:
                book.append({"id": name})
        merged = []
        crowd(lambda merged=merged: merged.append(parts.merge(output, len(names), place)), 6)
        assert merged == [True] * 6
        assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == names
        assert {path.name for path in tmp_path.iterdir()} == {output.name, settings_path(output).name}
        check_part(output)
        output.unlink()


def run_out(monkeypatch, error, times):
    """The disk is full for so many writes of a file; returns the seconds that were waited."""
    waited, left = [], iter(range(times))
    replace_by = files.replace_by

    def full(path, pieces):
        if next(left, None) is not None:
            raise OSError(error, os.strerror(error), str(path))
        replace_by(path, pieces)

    for module in (files, records):
        monkeypatch.setattr(module, "replace_by", full)
    monkeypatch.setattr(journal.time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_job_that_begins_on_a_full_disk_waits(tmp_path, monkeypatch, caplog, error):
    waited = run_out(monkeypatch, error, 3)
    made(tmp_path / "out.jsonl")
    assert sum(waited) == pytest.approx(3 * journal.PAUSE)
    assert caplog.text.count("no space left for") == 1
    assert json.loads(settings_path(tmp_path / "out.jsonl").read_text()) == {"format": FORMAT} | SETTINGS


def test_a_job_that_continues_writes_no_settings_again(tmp_path, monkeypatch):
    made(tmp_path / "out.jsonl")
    waited = run_out(monkeypatch, errno.ENOSPC, 10**6)
    assert made(tmp_path / "out.jsonl").done == {"a"}
    assert not waited


def test_an_interrupt_ends_the_wait_at_the_beginning(tmp_path, monkeypatch):
    waited = run_out(monkeypatch, errno.ENOSPC, 10**6)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "out.jsonl", stopping=lambda: len(waited) > 2)
    monkeypatch.undo()
    made(tmp_path / "out.jsonl")


def test_the_end_of_a_job_waits_for_room(tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    with Journal(output, SETTINGS, record_id) as book:
        for name in "ba":
            book.append({"id": name})
    waited = run_out(monkeypatch, errno.ENOSPC, 2)
    rewrite_in_order(output, {"a": 0, "b": 1}.get)
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == ["a", "b"]
    assert sum(waited) == pytest.approx(2 * journal.PAUSE)


def test_what_cannot_be_written_otherwise_is_named(tmp_path):
    with Journal(tmp_path / "out.jsonl", SETTINGS, record_id) as book:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            with pytest.raises(OSError, match="too large") as failed:
                book.append({"id": "a" * 1000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, before)
    assert failed.value.filename == str(tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    "damage", [b"[" * 100_000, b"[]", b"7", b"{}", b"\xff", b'{"id": []}', b'{"id": "a", "error": ' + b"[" * 10**5, b""]
)
def test_a_damaged_line_is_an_error_that_names_it(tmp_path, damage):
    output = tmp_path / "out.jsonl"
    made(output)
    output.write_bytes(output.read_bytes() + damage + b"\n")
    for read in (
        lambda: made(output),
        lambda: parts.answered(output, 0, {}.get),
        lambda: rewrite_in_order(output, {}.get),
    ):
        if damage == b'{"id": []}' and "made" not in read.__code__.co_names:
            continue
        with pytest.raises(ValueError, match=r"out\.jsonl is damaged in line 2: ") as failed:
            read()
        assert str(failed.value).isprintable()


def test_a_command_shows_that_the_disk_is_full(tmp_path):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "out.jsonl").symlink_to(full)
    code = """if True:
        import sys
        from dflash_jax import load_target, loading, serve
        from dflash_jax.infer.jobs import journal
        from dflash_jax.infer import text
        text.Text("")
        def slept(seconds):
            raise SystemExit(3)
        journal.time.sleep = slept
        journal.Journal(sys.argv[1], {}, None).append({"id": 1})
    """
    run = [sys.executable, "-c", code, str(tmp_path / "out.jsonl")]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 3
    assert "no space left for" in done.stderr
    assert "the job continues" in done.stderr
