"""Batch jobs that survive: continued after a kill, stopped in good order, every form of input."""

import errno
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest

from dflash_jax import serve
from dflash_jax.infer.jobs import journal
from dflash_jax.infer.jobs.journal import Journal, settings_path
from tests.jobs import ROWS, command, records, write


def test_a_job_continues_where_its_output_ends(pair, tmp_path, capsys):
    source, output = write(tmp_path / "in.jsonl", [*ROWS, {"id": "bad"}]), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, output)) == 1
    whole, text = records(output), output.read_text().splitlines(keepends=True)
    for cut in (0, 17, len(text[0]), len("".join(text[:5])) + 3, len("".join(text)) - 1):
        output.write_text("".join(text)[:cut])
        assert serve.main(command(pair, source, output, "--summary", str(tmp_path / "s.json"))) == 1
        assert records(output) == whole
        assert len(output.read_text().splitlines()) == len(whole)
    assert serve.main(command(pair, source, output)) == 1  # nothing left
    assert "8 lines done, 0 left" in capsys.readouterr().err
    assert serve.main(command(pair, source, output, "--temperature", "0.5")) == 2
    assert "temperature 0.0, now 0.5" in capsys.readouterr().err
    assert serve.main(command(pair, source, output, "--temperature", "0.5", "--force")) == 1
    assert serve.main(command(pair, source, output, "--force")) == 1
    output.write_text("no record\n" + "".join(text))
    assert serve.main(command(pair, source, output)) == 2
    assert "damaged in line 1" in capsys.readouterr().err
    output.write_text("".join(text) + text[0])
    assert serve.main(command(pair, source, output)) == 2
    assert "appears twice" in capsys.readouterr().err
    output.write_text("".join(text))
    write(tmp_path / "in.jsonl", ROWS[1:])
    assert serve.main(command(pair, source, output)) == 2
    assert "input 8 lines" in capsys.readouterr().err
    assert serve.main(command(pair, source, output, "--force")) == 2
    assert "is not in the input" in capsys.readouterr().err


def test_processes_share_a_job(pair, tmp_path, capsys):
    """Each writes its part; what one has left, another number of processes finishes; the last merges in order."""
    source, output = write(tmp_path / "in.jsonl", [*ROWS, {"id": "bad"}]), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, tmp_path / "whole.jsonl", "--ordered")) == 1
    shared = lambda share, *more: serve.main(command(pair, source, output, "--processes", share, *more))
    assert shared("1/2") == 1  # of r1, r3, r5 and the bad line
    assert "the job ends with the last one" in capsys.readouterr().err
    assert not output.exists()
    part = tmp_path / "out.jsonl.part-1-of-2"
    assert list(records(part)) == ["bad", "r1", "r3", "r5"]
    part.write_bytes(part.read_bytes()[:-10])  # it was killed: r5 is torn
    assert shared("0/3", "--temperature", "1") == 2
    assert "part-1-of-2 was made with other settings: temperature" in capsys.readouterr().err
    assert [shared(f"{i}/3") for i in range(3)] == [0, 1, 0]  # the bad line is of the second
    whole = (tmp_path / "whole.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in whole] == [
        json.loads(line)["id"] for line in output.read_text().splitlines()
    ]
    assert records(output) == records(tmp_path / "whole.jsonl")
    assert {path.name for path in tmp_path.glob("out.jsonl*")} == {"out.jsonl", "out.jsonl.settings.json"}
    assert [shared(f"{i}/4") for i in (2, 3)] == [0, 1]  # come too late; the bad line is of the last
    assert shared("0/1") == 1  # one that failed is there, whoever answered it
    assert {path.name for path in tmp_path.glob("out.jsonl*")} == {"out.jsonl", "out.jsonl.settings.json"}
    for wrong in ("2/2", "1", "a/b"):
        assert shared(wrong) == 2


def test_a_job_continues_with_a_copy_of_its_target_and_not_with_another(pair, tmp_path, capsys):
    source, output = write(tmp_path / "in.jsonl", ROWS[:3]), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, output)) == 0
    whole, text = records(output), output.read_text().splitlines(keepends=True)
    moved = shutil.copytree(pair, tmp_path / "moved")
    output.write_text(text[0])
    assert serve.main(command(moved, source, output)) == 0
    assert records(output) == whole
    weights = moved / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x3c")
    shared = [*command(moved, source, tmp_path / "parts.jsonl"), "--processes", "1/2"]
    shutil.copy(output, tmp_path / "parts.jsonl.part-0-of-2")
    shutil.copy(settings_path(output), tmp_path / "parts.jsonl.part-0-of-2.settings.json")
    for refused in (command(moved, source, output), shared):
        assert serve.main(refused) == 2
        error = capsys.readouterr().err
        assert f"made with other settings: target {moved / 'target'} (fingerprint " in error
        assert "--force" in error


def test_two_processes_never_write_one_output(pair, tmp_path, capsys):
    source, output = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with Journal(output, {}, lambda record: record["id"]):
        assert serve.main(command(pair, source, output)) == 2
    assert "another process is writing" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_process_that_dies_stops_no_other(pair, tmp_path):
    rows = [{"id": f"r{i}", "prompt_token_ids": [i % 60 + 1, 5], "max_new_tokens": 60} for i in range(40)]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, tmp_path / "whole.jsonl", "--ordered")) == 0
    run = [sys.executable, "-m", "dflash_jax.serve", *command(pair, source, output)]
    started = [subprocess.Popen([*run, "--processes", f"{i}/4"], stderr=subprocess.DEVNULL) for i in range(4)]
    doomed = tmp_path / "out.jsonl.part-2-of-4"
    while not (doomed.exists() and doomed.stat().st_size):
        time.sleep(0.05)
    started[2].kill()
    assert [process.wait() for process in started] == [0, 0, -signal.SIGKILL, 0]
    assert subprocess.run([*run, "--processes", "0/2"], stderr=subprocess.DEVNULL).returncode == 0
    assert subprocess.run([*run, "--processes", "1/2"], stderr=subprocess.DEVNULL).returncode == 0
    assert records(output) == records(tmp_path / "whole.jsonl")
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [row["id"] for row in rows]


def test_an_interrupt_finishes_what_is_in_progress(pair, tmp_path, monkeypatch, capsys):
    source, output = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, tmp_path / "whole.jsonl", "--batch-size", "2")) == 0
    append = Journal.append

    def interrupted(self, record):
        append(self, record)
        if len(output.read_text().splitlines()) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Journal, "append", interrupted)
    assert serve.main(command(pair, source, output, "--batch-size", "2")) == 130
    found = records(output)
    assert 2 <= len(found) <= 3  # the row beside it, but no new one
    assert "left, with which the same command continues" in capsys.readouterr().err
    monkeypatch.setattr(Journal, "append", append)
    assert serve.main(command(pair, source, output, "--batch-size", "2")) == 0
    assert records(output) == records(tmp_path / "whole.jsonl")


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(pair, tmp_path, monkeypatch, capsys):
    source, output = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, tmp_path / "whole.jsonl", "--batch-size", "3")) == 0
    append = Journal.append

    def insisted(self, record):
        append(self, record)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Journal, "append", insisted)
    assert serve.main(command(pair, source, output, "--batch-size", "3")) == 130
    assert len(records(output)) == 1  # though two more were in progress
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.setattr(Journal, "append", append)
    assert serve.main(command(pair, source, output, "--batch-size", "3")) == 0
    assert records(output) == records(tmp_path / "whole.jsonl")


@pytest.mark.parametrize("signals", [1, 2])
def test_an_interrupt_while_programs_are_compiled(pair, tmp_path, monkeypatch, capsys, signals):
    """It is obeyed before the next program; what is being compiled is not waited for."""
    source, output = write(tmp_path / "in.jsonl", ROWS[:2]), tmp_path / "out.jsonl"
    compiled, stopped = [], threading.Event()
    compile_one = jax.stages.Lowered.compile

    def slow(self, *options):
        compiled.append(self)
        if len(compiled) == 2:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)
            stopped.wait(600)
        return compile_one(self, *options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", slow)
    assert serve.main(command(pair, source, output)) == 130
    assert not output.read_text()
    assert "the same command continues" in capsys.readouterr().err
    stopped.set()
    monkeypatch.undo()
    assert serve.main(command(pair, source, output)) == 0
    assert len(records(output)) == 2


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_job_killed_at_random_moments_ends_with_each_answer_once(pair, tmp_path):
    source = write(tmp_path / "in.jsonl", [row | {"id": f"k{i}"} for i, row in enumerate(ROWS * 30)])
    run = lambda name: [sys.executable, "-m", "dflash_jax.serve", *command(pair, source, tmp_path / name)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run(run("whole.jsonl"), check=True, env=environment, capture_output=True)
    rng, kills = random.Random(0), 0
    for _ in range(8):  # `python -m tests.soak` kills more often
        process = subprocess.Popen(run("out.jsonl"), env=environment, stderr=subprocess.DEVNULL)
        begin = (tmp_path / "out.jsonl").stat().st_size if (tmp_path / "out.jsonl").exists() else 0
        while process.poll() is None and (
            not (tmp_path / "out.jsonl").exists() or (tmp_path / "out.jsonl").stat().st_size == begin
        ):
            time.sleep(0.01)  # it has not begun to answer
        time.sleep(rng.random() * 0.3)
        if process.poll() is not None:
            break
        process.kill()
        process.wait()
        kills += 1
    subprocess.run(run("out.jsonl"), check=True, env=environment, capture_output=True)
    assert kills > 0
    assert records(tmp_path / "out.jsonl") == records(tmp_path / "whole.jsonl")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(ROWS) * 30


def record_id(record):
    return record["id"]


def two_records(output, meanwhile):
    """Writes two records, and closes the output after something happened."""
    with Journal(output, {}, record_id) as book:
        book.append({"id": 1})
        book.append({"id": 2})
        meanwhile(book)


def test_a_deleted_output_is_noticed(tmp_path):
    output = tmp_path / "out.jsonl"
    for then in (lambda: None, lambda: output.write_text("")):
        for end in (lambda book: None, lambda book: book.append({"id": 3})):
            with pytest.raises(FileNotFoundError, match="deleted or replaced"):
                two_records(output, lambda book, then=then, end=end: (output.unlink(), then(), end(book)))
            output.unlink(missing_ok=True)


@pytest.mark.parametrize("size", [0, 4, 30])
@pytest.mark.parametrize("more", [True, False])
def test_an_output_that_another_program_changes_is_noticed(tmp_path, size, more):
    """At the next answer, or at the end if there is none; what is then left in it is continued, or refused."""
    output = tmp_path / "out.jsonl"
    with pytest.raises(OSError, match=f"out.jsonl has {size} bytes, but 20 were written"):
        two_records(output, lambda book: (os.truncate(output, size), more and book.append({"id": 3})))
    if size > 20:
        output.write_bytes(output.read_bytes() + b"\n")
        with pytest.raises(ValueError, match="damaged in line"):
            Journal(output, {}, record_id)
    else:
        two_records(output, lambda book: None)
        assert list(records(output)) == ["1", "2"]


def test_a_job_whose_output_is_emptied_ends_with_an_error_and_continues(pair, tmp_path, monkeypatch, capsys):
    source, output = write(tmp_path / "in.jsonl", ROWS[:4]), tmp_path / "out.jsonl"
    append, count = Journal.append, itertools.count(1)

    def emptied(self, record):
        append(self, record)
        if next(count) == 4:  # after the last answer
            os.truncate(output, 0)

    monkeypatch.setattr(Journal, "append", emptied)
    assert serve.main(command(pair, source, output)) == 2
    assert f"{output} has 0 bytes" in capsys.readouterr().err
    assert serve.main(command(pair, source, output)) == 0
    assert len(records(output)) == 4


def test_a_part_may_be_merged_before_it_is_closed(tmp_path):
    with Journal(tmp_path / "out.jsonl", {}, record_id, merged=True) as book:
        book.append({"id": 1})
        (tmp_path / "out.jsonl").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["limit", "deleted"])
def test_a_failed_write_ends_the_command(pair, tmp_path, cause):
    """It printed its error and then stayed for ever, with requests in the slots of its engine."""
    rows = [row | {"id": f"{row['id']}-{i}"} for i in range(60) for row in ROWS]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    run = [sys.executable, "-m", "dflash_jax.serve", *command(pair, source, output, "--max-new-tokens", "60")]
    limit = "ulimit -f 8; " if cause == "limit" else ""
    process = subprocess.Popen(
        ["bash", "-c", f'{limit}exec "$@"', "-", *run], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    if cause == "deleted":
        while process.poll() is None and not (output.exists() and output.stat().st_size):
            time.sleep(0.02)
        output.unlink()
    _, error = process.communicate(timeout=600)
    assert process.returncode == 2, error
    assert "error: " in error


def test_an_interrupt_ends_the_wait_for_room(tmp_path, monkeypatch):
    full = lambda self, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
    stopping = []
    with Journal(tmp_path / "out.jsonl", {}, lambda record: 0, stopping=lambda: stopping) as book:
        monkeypatch.setattr(
            book, "_file", type("Full", (), {"write": full, "fileno": book._file.fileno, "close": book._file.close})()
        )
        monkeypatch.setattr(time, "sleep", lambda seconds: stopping.append(1))
        with pytest.raises(KeyboardInterrupt):
            book.append({"id": 1})


def test_several_answers_to_one_prompt(pair, tmp_path):
    line = {"prompt": "hello", "temperature": 1.2, "seed": 4, "max_new_tokens": 9}
    body = {name: value for name, value in line.items() if name != "max_new_tokens"} | {"max_tokens": 9, "n": 3}
    rows = [
        line | {"id": "one"},
        line | {"id": "three", "n": 3},
        {"custom_id": "batch", "method": "POST", "url": "/v1/completions", "body": body},
        {"id": "none", "prompt": "a", "n": 0},
        {"id": "talk", "turns": ["a", "b"], "n": 2},
    ]
    output = tmp_path / "out.jsonl"
    arguments = command(pair, write(tmp_path / "in.jsonl", rows), output, "--ordered", "--batch-size", "2")
    assert serve.main(arguments) == 1
    one, three, batch, none, talk = (json.loads(text) for text in output.read_text().splitlines())
    texts = [sample["text"] for sample in three["samples"]]
    assert len(set(texts)) == 3
    assert texts[0] == three["text"] == one["text"]
    choices = batch["response"]["body"]["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == list(enumerate(texts))
    assert none["error"]["code"] == talk["error"]["code"] == "invalid_parameter"


def test_turns_are_a_conversation(pair, tmp_path):
    output = tmp_path / "out.jsonl"
    rows = [{"id": "c", "turns": ["ab", "cd", "ef"]}, {"id": "long", "turns": ["ab", "c" * 300]}]
    source = write(tmp_path / "in.jsonl", rows)
    options = ["--max-length", "200", "--batch-size", "2"]  # in all of it, so that it compiles once
    assert serve.main(command(pair, source, output, "--ordered", *options)) == 1
    talk, long = (json.loads(line) for line in output.read_text().splitlines())
    assert len(talk["turns"]) == 3
    assert talk["text"] == talk["turns"][2]["text"]
    messages = [{"role": "user", "content": "ab"}]
    for turn, following in zip(talk["turns"], ["cd", "ef", None], strict=True):
        (tmp_path / "alone.jsonl").unlink(missing_ok=True)
        alone = write(tmp_path / "alone-in.jsonl", [{"id": "c", "messages": messages}])
        assert serve.main(command(pair, alone, tmp_path / "alone.jsonl", *options)) == 0
        expected = json.loads((tmp_path / "alone.jsonl").read_text())
        assert turn == {name: expected[name] for name in turn}
        messages += [{"role": "assistant", "content": turn["text"]}, {"role": "user", "content": following}]
    assert long["error"]["code"] == "prompt_too_long"


def test_a_full_disk_pauses_the_job(tmp_path, monkeypatch, caplog):
    class Disk(io.RawIOBase):
        """Takes few bytes at a time, and is full now and then."""

        def __init__(self):
            self.data, self.calls = b"", 0

        def write(self, data):
            self.calls += 1
            if self.calls % 3 == 2:
                raise OSError(errno.ENOSPC, "full")
            self.data += bytes(data[:7])
            return len(data[:7])

    slept = []
    monkeypatch.setattr(journal.time, "sleep", slept.append)
    book = Journal(tmp_path / "out.jsonl", {}, lambda record: record["id"])
    monkeypatch.setattr(book, "_check_file", lambda: None)
    book._file.close()
    book._file = disk = Disk()
    book.append({"id": 1, "text": "a long answer"})
    assert json.loads(disk.data) == {"id": 1, "text": "a long answer"}
    assert len(slept) >= 1
    assert caplog.text.count("no space left") == 1

    class Broken(io.RawIOBase):
        def write(self, data):
            raise OSError(errno.EIO, "broken")

    book._file = Broken()
    with pytest.raises(OSError, match="broken"):
        book.append({"id": 2})


def test_figures_while_a_job_runs(pair, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", ROWS)
    summary = tmp_path / "summary.json"
    arguments = ["--stats-interval", "1e-9", "--summary", str(summary), "--batch-size", "2"]
    assert serve.main(command(pair, source, tmp_path / "out.jsonl", *arguments)) == 0
    err = capsys.readouterr().err
    assert "slots" in err
    assert "MiB" in err
    assert "\r" not in err  # this is a log: plain lines
    latency = json.loads(summary.read_text())["latency_seconds"]
    assert set(latency) == {"queue", "first_token", "per_token", "end_to_end"}
    assert latency["end_to_end"]["p50"] >= latency["first_token"]["p50"] >= latency["queue"]["p50"] >= 0


def test_an_interrupted_command_waits_for_no_thread():
    code = (
        "import threading, time\n"
        "from dflash_jax.infer.interrupt import INTERRUPTED, exit_quietly\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "print('said')\n"
        "exit_quietly(INTERRUPTED)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (130, "said\n", "")


def test_a_signal_while_python_ends_prints_nothing():
    code = (
        "import atexit, os, signal\n"
        "from dflash_jax.infer.interrupt import exit_quietly\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.{}))\n"
        "exit_quietly(3)\n"
    )
    for name in ("SIGINT", "SIGTERM"):
        done = subprocess.run([sys.executable, "-c", code.format(name)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (3, "")
