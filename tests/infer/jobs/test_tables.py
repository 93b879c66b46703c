"""Parquet files and datasets as inputs of jobs, and Parquet files as their outputs."""

import datetime
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_jax import __main__ as commands
from dflash_jax import serve
from dflash_jax.constraints.tools.form import Form
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.jobs import record_fields, tables
from dflash_jax.infer.jobs.answering import job_settings
from dflash_jax.infer.jobs.batch_job import Job, JobFiles
from dflash_jax.infer.jobs.inputs import input_lines
from dflash_jax.infer.jobs.job_input import Answered, JobInput
from dflash_jax.infer.jobs.lines import Line
from dflash_jax.infer.jobs.records import answer_record
from dflash_jax.infer.text import Text
from tests import tiny
from tests.infer.jobs.test_long_jobs import DEFAULTS, OneToken
from tests.jobs import ROWS, command, records, write

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def table(path, rows, **options):
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return str(path)


def read(names):
    return [json.loads(line) for line in input_lines(names)]


@pytest.mark.parametrize("name", ["a.parquet", "a.PARQUET", "rows"])
def test_rows_are_lines_without_nulls(tmp_path, name):
    said = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "c"}]
    rows = [{"id": i, "messages": said[: 1 + i % 2], "seed": i if i % 3 else None} for i in range(3000)]
    source = table(tmp_path / name, rows, row_group_size=700)
    found = read([source])
    assert [row.get("seed") for row in found] == [row["seed"] for row in rows]
    assert all("seed" not in row for row in found[::3])
    assert found[1]["messages"] == said  # without the null that the first has in its column
    write(tmp_path / "b.jsonl", [{"id": "last"}])
    assert read([source, str(tmp_path / "b.jsonl")])[-2:] == [found[-1], {"id": "last"}]


def test_a_large_row_group_is_not_in_memory(tmp_path):
    rng = np.random.default_rng(0)
    rows = [{"id": i, "prompt": rng.bytes(500).hex()} for i in range(20_000)]
    source, before = table(tmp_path / "a.parquet", rows), pa.total_allocated_bytes()
    assert pq.ParquetFile(source).num_row_groups == 1
    used = [pa.total_allocated_bytes() - before for _ in tables.parquet_lines(source)]
    assert len(used) == len(rows)
    assert max(used) < Path(source).stat().st_size / 3


def test_what_json_cannot_hold(tmp_path, caplog):
    day, image = datetime.date(2024, 5, 6), {"bytes": b"\xff", "path": "a.png"}
    rows = [{"day": day, "é": "ü\n", "n": float("nan"), "image": image, "many": [{"a": float("inf"), "b": 1}]}] * 2
    expected = {"day": "2024-05-06", "é": "ü\n", "image": {"path": "a.png"}, "many": [{"b": 1}]}
    assert read([table(tmp_path / "a.parquet", rows)]) == [expected] * 2
    (warning,) = caplog.messages
    assert warning.endswith("a.parquet: column image has bytes, for which JSON has no form; they are left out")


def test_a_line_that_cannot_be_repeated_is_an_error_of_its_own(tmp_path):
    rows = [{"prompt_token_ids": [1], "metadata": {"note": note}} for note in ("a", "\ud83d", "b", float("nan"))]
    write(tmp_path / "in.jsonl", rows)
    assert run(tmp_path, ordered=True, fields=("token_ids", "input")) == 1
    found = lines_of(tmp_path)
    assert ["error" in one for one in found] == ["input" not in one for one in found] == [False, True, False, True]
    assert "the line" in found[3]["error"]["message"]


@pytest.mark.parametrize("name", ["a.parquet", "rows"])
def test_a_damaged_table_is_an_error_that_names_it(tmp_path, name, capsys):
    table(tmp_path / name, [{"prompt": "a" * 100}] * 99)
    whole = (tmp_path / name).read_bytes()
    for data in (whole[:-9], whole[:20] + whole[60:], b"PAR1", b"{}" if "." in name else b"PAR1{}"):
        (tmp_path / name).write_bytes(data)
        assert serve.main(["--input", str(tmp_path / name), "--output", str(tmp_path / "out.jsonl")]) == 2
        assert f"{tmp_path / name}: " in capsys.readouterr().err


def test_a_table_through_a_pipe_is_refused(tmp_path):
    table(tmp_path / "a.parquet", [{"prompt": "a"}])
    reader, writer = os.pipe()
    os.write(writer, (tmp_path / "a.parquet").read_bytes())
    os.close(writer)
    with pytest.raises(ValueError, match="is a Parquet file, which cannot be read from a pipe"):
        read([f"/dev/fd/{reader}"])
    os.close(reader)


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("pyarrow.parquet", "parquet", ["--input", "in.parquet", "--output", "out.jsonl"]),
        ("pyarrow.parquet", "parquet", ["--input", "in.jsonl", "--output", "out.parquet"]),
        ("datasets", "datasets", ["--input", "hf://a/b", "--output", "out.jsonl"]),
    ],
)
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, capsys, package, extra, arguments):
    monkeypatch.chdir(tmp_path)
    table("in.parquet", [{"prompt": "a"}])
    write(Path("in.jsonl"), ROWS)
    monkeypatch.setitem(sys.modules, package, None)
    assert serve.main(arguments) == 2
    assert f"needs another package: pip install '.[{extra}]' in the checkout" in capsys.readouterr().err


def test_datasets_by_name(tmp_path, monkeypatch):
    """A folder of this name is read in place of the hub's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    data = Path("owner/name.v1")
    data.mkdir(parents=True)
    table(data / "train-00000.parquet", [{"prompt": "train", "n": None}])
    table(data / "test-00000.parquet", [{"prompt": f"test {i}"} for i in range(5)])
    assert read(["hf://owner/name.v1"]) == [{"prompt": "train"}]
    assert read(["hf://datasets/owner/name.v1/default:test"]) == [{"prompt": f"test {i}"} for i in range(5)]
    lines = JobInput(["hf://owner/name.v1:test"], Text(""), DEFAULTS)
    (data / "test-00000.parquet").unlink()  # it is read once, and kept
    assert [line.index for line in lines.lines()] == [*range(5)]
    lines.close()
    for name, why in {
        "hf://owner": r"must be hf://OWNER/NAME\[/CONFIG\]\[:SPLIT\]",
        "hf://owner/name.v1:train[:9]": "must be hf://",
        "hf://owner/name.v1:other": "hf://owner/name.v1:other cannot be read: ",
        "hf://owner/name.v1/other": "hf://owner/name.v1/other cannot be read: ",
    }.items():
        with pytest.raises(ValueError, match=why):
            read([name])


def run(directory, *, ordered=False, stop_after=None, fields=None, share=(0, 1), rows=None, **options):
    """A job with a table over `in.jsonl`; its exit status."""
    source = directory / "in.jsonl"
    if rows is not None:
        write(source, rows)
    output = directory / "out.parquet.jsonl"
    files = JobFiles([str(source)], output, ordered=ordered, table=directory / "out.parquet")
    files = JobFiles(files.input, output, None, False, ordered, *share, table=files.table)
    files.check()
    lines = JobInput(files.input, Text(""), DEFAULTS, keep_rows="input" in (fields or ()))
    settings = job_settings("", "float32", Text(""), DEFAULTS, lines, 0, None)
    return Job(files, lines, settings, {}, 0.0, fields, **options).run(OneToken(stop_after), 0)


def lines_of(directory):
    return [json.loads(line) for line in (directory / "out.parquet.jsonl").read_text().splitlines()]


def given(count):
    return [
        {"id": f"n{i}" if i % 3 else i, "prompt_token_ids": [i % 50, 1], "metadata": {"i": i}} for i in range(count)
    ]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_table_is_made_when_all_is_answered(tmp_path, monkeypatch, ordered):
    """In the order of the lines of JSON, in several groups."""
    monkeypatch.setattr(tables, "GROUP", 256)
    for stop in (1, 700):
        assert run(tmp_path, ordered=ordered, stop_after=stop, rows=given(1000)) == 130
        assert not (tmp_path / "out.parquet").exists()
    for _ in range(2):  # the second time, nothing is left
        assert run(tmp_path, ordered=ordered) == 0
        lines, found = lines_of(tmp_path), pq.read_table(tmp_path / "out.parquet").to_pylist()
        assert pq.ParquetFile(tmp_path / "out.parquet").num_row_groups == 4
        assert [row["index"] for row in found] == [line["index"] for line in lines]
        assert (sorted if not ordered else list)(row["index"] for row in found) == [*range(1000)]
        for row, line in zip(found, lines, strict=True):
            assert row["id"] == str(line["id"])
            assert json.loads(row["metadata"]) == line["metadata"]
            same = ("text", "token_ids", "finish_reason", "usage", "speculation")
            assert [row[name] for name in same] == [line[name] for name in same]


@pytest.mark.parametrize("fields", [None, ("usage", "text"), ("input", "token_ids")])
def test_the_columns_follow_from_the_fields(tmp_path, fields):
    """Not from the records, so that files of many jobs fit together."""
    found = []
    for name, rows in {"one": given(3), "two": [{"id": "bad", "prompt": 3}], "none": []}.items():
        (tmp_path / name).mkdir()
        assert run(tmp_path / name, ordered=True, fields=fields, rows=rows) == (name == "two")
        found.append(pq.read_schema(tmp_path / name / "out.parquet"))
    assert found[0] == found[1] == found[2]
    assert set(found[0].names) == {*record_fields.ALWAYS, *(record_fields.CHOSEN if fields is None else fields)}
    (bad,) = pq.read_table(tmp_path / "two" / "out.parquet").to_pylist()
    assert bad["error"]["code"] == "invalid_request"
    if fields and "input" in fields:
        rows = pq.read_table(tmp_path / "one" / "out.parquet")["input"].to_pylist()
        assert [json.loads(row) for row in rows] == given(3)


def test_every_field_of_a_record_has_a_column(tmp_path):
    """Of one that has all that a record may have."""
    tiny.write_tokenizer(tmp_path, chat=True)
    text = Text(str(tmp_path))
    done = Completion([3, 4], "stop", logprobs=[-1.0, -2.0], top_logprobs=[[(3, -1.0)], [(4, -2.0)]], prompt_tokens=2)
    line = Line(0, "a", Request([1]), later=("b",), form=Form("thinking"), n=2, metadata={"m": 1}, row={"prompt": "a"})
    record = answer_record(line, [done, done], text) | {"error": None}
    assert set(record) == {*record_fields.ALWAYS, *serve.RECORD_FIELDS}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    tables.write_parquet(tmp_path / "a.parquet", tmp_path / "a.jsonl", serve.RECORD_FIELDS)
    (row,) = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert {name for name, value in row.items() if value is not None} == set(record) - {"error"}
    assert json.loads(row["logprobs"]) == record["logprobs"]


def test_long_records_are_in_small_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "GROUP_BYTES", 3000)
    rows = [{"id": f"{i}", "prompt_token_ids": [1], "metadata": "x" * (10 if i % 4 else 4000)} for i in range(20)]
    assert run(tmp_path, ordered=True, rows=rows) == 0
    file = pq.ParquetFile(tmp_path / "out.parquet")
    assert file.num_row_groups >= 10
    assert [json.loads(one) for one in file.read()["metadata"].to_pylist()] == [row["metadata"] for row in rows]


def test_a_kill_while_the_table_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    """Which is none, at first; the same command writes it."""
    write_batch = pq.ParquetWriter.write_batch

    def killed(*given, **options):
        write_batch(*given, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(tables, "GROUP", 10)
    for _ in range(2):
        monkeypatch.setattr(pq.ParquetWriter, "write_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, rows=given(25))
        before = {path.name for path in tmp_path.iterdir()} - {"in.jsonl"}
        assert before <= {"out.parquet", "out.parquet.jsonl", "out.parquet.jsonl.settings.json"}
        monkeypatch.setattr(pq.ParquetWriter, "write_batch", write_batch)
        assert run(tmp_path) == 0
        assert len(pq.read_table(tmp_path / "out.parquet")) == 25


def test_processes_make_one_table(tmp_path):
    assert run(tmp_path, share=(1, 2), rows=given(20)) == 0
    assert not (tmp_path / "out.parquet").exists()
    assert run(tmp_path, share=(0, 2)) == 0
    assert pq.read_table(tmp_path / "out.parquet")["index"].to_pylist() == [*range(20)]


def test_a_table_without_its_answers_is_kept(tmp_path):
    assert run(tmp_path, rows=given(3)) == 0
    (tmp_path / "out.parquet.jsonl").unlink()
    for share in ((0, 1), (0, 2)):
        with pytest.raises(ValueError, match=r"out.parquet is there without out.parquet.jsonl.*--force"):
            run(tmp_path, share=share)


def test_openai_batches_have_no_columns(tmp_path):
    body = {"prompt": "a"}
    rows = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}]
    with pytest.raises(ValueError, match="out.parquet: OpenAI batch lines are answered in JSON lines"):
        run(tmp_path, rows=rows)


@pytest.mark.parametrize(("most", "status"), [(0, 1), (1, 1), (2, 0), (9, 0)])
def test_some_errors_may_be_allowed(tmp_path, most, status):
    """Of the whole job, however often it was begun."""
    rows = [{"id": "bad", "prompt": 3}, *given(40), {"id": "worse"}]
    assert run(tmp_path, rows=rows, stop_after=9, max_errors=most) == 130
    assert run(tmp_path, max_errors=most) == status
    assert run(tmp_path, max_errors=most) == status


def test_tables_in_and_out_of_a_command(pair, tmp_path, capsys):
    """As lines of JSON. `replay` reads them, too."""
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.parquet"
    assert serve.main(command(pair, write(tmp_path / "in.jsonl", ROWS), whole)) == 0
    source = table(tmp_path / "in.parquet", ROWS)
    for _ in range(2):
        assert serve.main(command(pair, [source], output, "--ordered", "--max-errors", "3")) == 0
        assert f"-> {output}" in capsys.readouterr().err
    found = {row["id"]: row for row in pq.read_table(output).to_pylist()}
    expected = records(whole)
    assert list(found) == [row["id"] for row in ROWS]
    same = ("token_ids", "text", "finish_reason", "usage")
    for name, row in found.items():
        assert [row[field] for field in same] == [expected[name][field] for field in same]
    for answers in (f"{output}.jsonl", str(output)):
        assert commands.main(["replay", answers, "--input", source, "--target", str(pair / "target")]) == 0
        assert "7 answers, " in capsys.readouterr().out
    assert serve.main(command(pair, [source], output, "--max-errors", "-1")) == 2
    assert serve.main(command(pair, [str(output)], output)) == 2
    assert "out.parquet is the input" in capsys.readouterr().err


def test_a_column_is_the_prompt(pair, tmp_path, capsys):
    """Of rows that are no requests; what else they have is data, and sets nothing."""
    rows = [{"id": f"q{i}", "question": text, "n": "seven", "answer": i} for i, text in enumerate(["abc", "de"])]
    rows += [{"id": "none", "answer": 3}]
    source, output = table(tmp_path / "in.parquet", rows), tmp_path / "out.jsonl"
    more = ["--prompt-column", "question", "--fields", "token_ids,input", "--max-errors", "1", "--ordered"]
    assert serve.main(command(pair, [source], output, *more)) == 0
    found = [json.loads(line) for line in output.read_text().splitlines()]
    asked = [{"id": f"q{i}", "messages": [{"role": "user", "content": text}]} for i, text in enumerate(["abc", "de"])]
    assert serve.main(command(pair, write(tmp_path / "m.jsonl", asked), tmp_path / "same.jsonl")) == 0
    same = records(tmp_path / "same.jsonl")
    assert [record["token_ids"] for record in found[:2]] == [same[f"q{i}"]["token_ids"] for i in range(2)]
    assert [record["input"] for record in found] == [{k: v for k, v in row.items() if v is not None} for row in rows]
    assert "question must be a text or a list of messages or token ids; it is missing" in found[2]["error"]["message"]
    check = ["replay", str(output), "--input", source, "--target", str(pair / "target")]
    assert commands.main(check) == 0
    capsys.readouterr()
    assert serve.main(command(pair, [source], output, *more[2:], "--prompt-column", "answer")) == 2
    assert "prompt_column 'question', now 'answer'" in capsys.readouterr().err
    assert serve.main(command(pair, [source], tmp_path / "wrong.jsonl")) == 1
    assert "--prompt-column NAME says which field has the prompt" in capsys.readouterr().err


def test_forms_of_a_prompt_column(tmp_path):
    tiny.write_tokenizer(tmp_path / "chat", chat=True)
    tiny.write_tokenizer(tmp_path / "plain", chat=False)
    said = [{"role": "user", "content": "ab"}]
    for name, row, same in [
        ("chat", "ab", {"messages": said}),
        ("plain", "ab", {"prompt": "ab"}),
        ("chat", said, {"messages": said}),
        ("chat", [3, 4], {"prompt_token_ids": [3, 4]}),
        ("chat", [], None),
        ("chat", 3, None),
    ]:
        text, made = Text(str(tmp_path / name)), []
        for rows, column in ([{"p": row, "custom_id": "a", "seed": "x"}], "p"), ([same or {}], None):
            source = write(tmp_path / "in.jsonl", rows)
            made.append(JobInput(source, text, DEFAULTS, prompt_column=column).sample[0])
        assert (made[0].error is None) == (same is not None)
        if same:
            assert made[0].request.prompt_token_ids == made[1].request.prompt_token_ids
        assert (made[0].id, made[0].is_batch) == ("a", False)


def test_answers_are_counted_in_a_byte_each(tmp_path):
    write(tmp_path / "in.jsonl", given(9))
    lines = JobInput([str(tmp_path / "in.jsonl")], Text(""), DEFAULTS)
    answered = Answered(lines)
    for name in ("n1", "3", "n1"):
        answered.add(name)
    assert len(answered) == 2
    assert "n1" in answered
    assert "n2" not in answered
    assert "other" not in answered
    assert np.flatnonzero(answered.flags).tolist() == [1, 3]
