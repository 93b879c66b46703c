"""Jobs of many lines: what is in memory does not grow with them, and what they are answered in does not matter."""

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from dflash_jax.cli import EngineOptions
from dflash_jax.engines import needs_of_input
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.engine.stats import Stats
from dflash_jax.infer.jobs import job_input, sample
from dflash_jax.infer.jobs.answering import Answering, job_settings
from dflash_jax.infer.jobs.batch_job import Backend, Job, JobFiles
from dflash_jax.infer.jobs.job_input import JobInput, Names
from dflash_jax.infer.jobs.records import answer_record
from dflash_jax.infer.text import Text
from dflash_jax.models import target_config
from tests import tiny

DEFAULTS = SamplingParams(4)


class OneToken(Backend):
    """Answers every request with one token, the last that came first; a few at a time."""

    slots = 8

    def __init__(self, stop_after=None):
        self.queue, self.tickets, self.finished, self.stop_after, self.most = [], 0, 0, stop_after, 0

    @property
    def waiting(self):
        return len(self.queue)

    @property
    def busy(self):
        return 0

    def submit(self, request):
        self.tickets += 1
        self.queue.append((self.tickets, request))
        self.most = max(self.most, len(self.queue))
        return self.tickets

    def step(self, *, admit):
        taken, self.queue = self.queue[-self.slots :], self.queue[: -self.slots]
        self.finished += len(taken)
        return [(ticket, Completion([request.prompt_token_ids[0]], "length")) for ticket, request in reversed(taken)]

    def cancel(self, *tickets):
        pass

    def done(self):
        return Stats(), 1, {}

    def dtype(self):
        return "float32"

    def begin(self, count, admit):
        pass

    def rates(self):
        return ""

    def state(self):
        return ""

    def answers(self, left, count, admit, again):
        going = lambda: self.stop_after is None or self.finished < self.stop_after
        return Answering(self, partial(answer_record, text=Text(""))).run(left, going)


def written(path, count, name=lambda i: {}):
    with path.open("w") as file:
        for i in range(count):
            file.write(json.dumps({**name(i), "prompt_token_ids": [i % 50, 1]}) + "\n")


def run(directory, *, ordered=False, stop_after=None):
    """A job over `in.jsonl`; its exit status and who answered."""
    files = JobFiles([str(directory / "in.jsonl")], directory / "out.jsonl", ordered=ordered)
    lines, backend = JobInput(files.input, Text(""), DEFAULTS), OneToken(stop_after)
    settings = job_settings("", "float32", Text(""), DEFAULTS, lines, 0, None)
    return Job(files, lines, settings, {}, 0.0).run(backend, 0), backend


def ids(directory):
    return [json.loads(line)["id"] for line in (directory / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("stops", [[], [1], [700, 900, 1234]])
def test_every_line_is_answered_once(tmp_path, ordered, stops, caplog):
    """Stopped at some places and continued, too."""
    caplog.set_level("INFO", "dflash_jax")
    count = 3000
    written(tmp_path / "in.jsonl", count, lambda i: {"id": f"n{i}"} if i % 3 else {})
    for stop in stops:
        assert run(tmp_path, ordered=ordered, stop_after=stop)[0] == 130
    status, backend = run(tmp_path, ordered=ordered)
    assert status == 0
    assert backend.most <= 64
    expected = [f"n{i}" if i % 3 else str(i) for i in range(count)]
    assert (ids(tmp_path) if ordered else sorted(ids(tmp_path), key=expected.index)) == expected
    assert f"{backend.finished} answered, 0 errors -> {tmp_path / 'out.jsonl'}" in caplog.text


def test_lines_are_made_in_order_and_few_ahead(tmp_path, monkeypatch):
    written(tmp_path / "in.jsonl", 5000)
    lines, made, lock = JobInput([str(tmp_path / "in.jsonl")], Text(""), DEFAULTS), [], threading.Lock()
    line_of = job_input.line_of

    def counted(row, *given, **how):
        with lock:
            made.append(row.index)
        return line_of(row, *given, **how)

    monkeypatch.setattr(job_input, "line_of", counted)
    stream = lines.lines(lambda index, name: index % 2 == 1)
    assert [next(stream).index for _ in range(40)] == [*range(1, 80, 2)]
    stream.close()
    assert len(made) <= (job_input.AHEAD + 2) * job_input.BATCH
    assert all(index % 2 for index in made)


def test_ids_are_unique_and_generated_ones_step_aside(tmp_path):
    rows = [{"id": "1"}, {}, {"id": "line-1"}, {"id": 3}, {}, {}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row | {"prompt_token_ids": [1]}) + "\n" for row in rows))
    lines = JobInput([str(tmp_path / "in.jsonl")], Text(""), DEFAULTS)
    names = [str(line.id) for line in lines.lines()]
    assert names == ["1", "line-1-", "line-1", "3", "4", "5"]
    assert [lines.place(name) for name in (*names, "2", "line-2")] == [0, 1, 2, 3, 4, 5, None, None]
    written(tmp_path / "in.jsonl", 9, lambda i: {"id": i % 8})
    with pytest.raises(
        ValueError, match="ids must be unique, but these appear more than once: 0; a line may also have none"
    ):
        JobInput([str(tmp_path / "in.jsonl")], Text(""), DEFAULTS)


def test_names_with_one_hash_are_compared():
    names = Names(job_input.np.array([hash("a"), hash("b"), hash("a")]))
    assert (names.place("a"), names.place("b"), names.place("c")) == (0, 1, None)
    assert names.repeated().tolist() == [2]


def test_an_input_that_changes_meanwhile(tmp_path):
    """Lines that come are another job's; one that changes, or goes, is an error before it is answered."""
    written(tmp_path / "in.jsonl", 10)
    lines = JobInput([str(tmp_path / "in.jsonl")], Text(""), DEFAULTS)
    written(tmp_path / "in.jsonl", 11)
    assert [line.index for line in lines.lines()] == [*range(10)]
    for count, name, why in [(9, {}, "has lost lines"), (10, {"seed": 1}, "line 7 of the input has changed")]:
        written(tmp_path / "in.jsonl", count, lambda i, name=name: name if i == 7 else {})
        with pytest.raises(ValueError, match=why):
            list(lines.lines())


def test_what_cannot_be_read_twice_is_copied(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=written, args=(tmp_path / "pipe", 100))
    writer.start()
    lines = JobInput([str(tmp_path / "pipe")], Text(""), DEFAULTS)
    writer.join()
    for _ in range(2):
        assert [line.index for line in lines.lines()] == [*range(100)]
    lines.close()


def test_engines_are_made_for_all_lines(tmp_path):
    """By a sample, the longest, and what any of them asks for."""
    config = target_config(tiny.target_config())
    for more, expected in [
        ({"logprobs": 3}, (3, False, (2, 4))),
        ({"logprobs": 10**6}, (None, False, (2, 4))),  # its line is an error, and no more
        ({"logprobs": -5}, (None, False, (2, 4))),
        ({"regex": "a+"}, (None, True, (2, 4))),
        ({"prompt_token_ids": [1] * 50}, (None, False, (50, 4))),
    ]:
        written(tmp_path / "in.jsonl", 3 * sample.FIRST, lambda i, m=more: m if i == 2 * sample.FIRST else {})
        if "prompt_token_ids" in more:
            with (tmp_path / "in.jsonl").open("a") as file:
                file.write(json.dumps(more) + "\n")
        needs = needs_of_input(config, JobInput([str(tmp_path / "in.jsonl")], Text(""), DEFAULTS), EngineOptions())
        assert (needs.logprobs, needs.constraints, max(needs.sizes)) == expected


def test_plain_prompts_of_a_chat_model_are_noted_once(tmp_path, caplog):
    for case, (template, rows, warnings) in enumerate(
        [
            (True, [{"prompt": "a"}, {"prompt": "b"}], 1),
            (True, [{"prompt_token_ids": [1]}, {"messages": [{"role": "user", "content": "a"}]}], 0),
            (False, [{"prompt": "a"}], 0),
        ]
    ):
        caplog.clear()
        directory = tmp_path / str(case)
        tiny.write_tokenizer(directory, chat=template)
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        JobInput([str(tmp_path / "in.jsonl")], Text(str(directory)), DEFAULTS)
        assert caplog.text.count("continued as plain text") == warnings


MEMORY = """
import resource, sys
from pathlib import Path
from tests.infer.jobs.test_long_jobs import run
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
status, backend = run(Path(sys.argv[1]), ordered=True)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(status, backend.finished, (after - before) // 1024)
"""


def memory_of(directory, count):
    """MiB that a job of so many lines needs, run in a process of its own; its output is in order."""
    written(directory / "in.jsonl", count, lambda i: {"id": f"request-{i}"})
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(directory)], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    status, finished, mib = map(int, done.stdout.split()) if done.returncode == 0 else pytest.fail(done.stderr)
    assert (status, finished) == (0, count)
    with (directory / "out.jsonl").open() as file:
        assert all(json.loads(line)["id"] == f"request-{i}" for i, line in enumerate(file))
    return mib


@pytest.mark.slow
def test_memory_hardly_grows_with_the_lines(tmp_path):
    few, many = (tmp_path / name for name in ("few", "many"))
    few.mkdir(), many.mkdir()
    assert memory_of(many, 60_000) - memory_of(few, 5_000) < 100


@pytest.mark.exhaustive
def test_a_million_lines_fit_into_memory(tmp_path):
    assert memory_of(tmp_path, 1_000_000) < 1536
