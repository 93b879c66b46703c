"""The input of jobs: files of every kind, lines of every form, and what is wrong with others."""

import bz2
import gzip
import io
import json
import lzma
import random
import sys

import pytest
from transformers import PreTrainedTokenizerBase

from dflash_jax import serve
from dflash_jax.infer.jobs.inputs import input_lines, zstd
from tests.jobs import ROWS, command, records, write


def test_files_globs_compression_and_standard_input(pair, tmp_path, monkeypatch, capsys):
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (tmp_path / "a.jsonl").write_bytes(lines[0] + b"\n" + lines[1][:-1])  # no newline at its end
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[2] + lines[3]))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd.compress(lines[4]))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines[5] + lines[6])))
    source = [str(tmp_path / "a.jsonl"), str(tmp_path / "[bc].*"), "-"]
    output = tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, output, "--ordered")) == 0
    assert list(records(output)) == [row["id"] for row in ROWS]


DAMAGED = {
    "cut.gz": gzip.compress(b"".join(b"%d\n" % i for i in range(9999)))[:-9],
    "changed.gz": gzip.compress(b"a\n")[:12] + b"\xff" * 12,
    "empty.gz": b"",
    "cut.zst": zstd.compress(random.Random(0).randbytes(9999))[:5000],
    "none.zst": b"no zstandard",
    "changed.jsonl": gzip.compress(b"a\n")[:12] + b"\xff" * 12,
    "cut.jsonl": zstd.compress(random.Random(0).randbytes(9999))[:5000],
    "empty.zst": b"",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_input_is_an_error_that_names_it(name, tmp_path, capsys):
    (tmp_path / name).write_bytes(DAMAGED[name])
    assert serve.main(["--input", str(tmp_path / name), "--output", str(tmp_path / "out.jsonl")]) == 2
    assert f"{name} is damaged after line " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a.jsonl", "a.GZ", "a.zst", "a.jsonl.gz", "-"])
@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress, lambda data: SKIPPED + zstd.compress(data)])
def test_what_a_file_begins_with_says_how_it_is_compressed(name, compress, tmp_path, monkeypatch):
    lines = [b"%d\n" % i for i in range(2000)]
    data = compress(b"".join(lines[:999])) + compress(b"".join(lines[999:]))
    (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert list(input_lines(["-" if name == "-" else str(tmp_path / name)])) == lines


SKIPPED = b"\x53\x2a\x4d\x18\x03\0\0\0abc"  # a frame of zstandard without contents


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xef\xbb\xbf{}\n\n{}", b"\x1f", b"\x28\xb5\x2f", b"a\n" * 9999, b"x" * 10**6, b"\0\n\xff"],
    ids=len,
)
def test_other_files_are_read_as_they_are(data, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    for name in (str(tmp_path / "a.jsonl"), "-"):
        assert list(input_lines([name])) == list(io.BytesIO(data))


@pytest.mark.parametrize(("compress", "named"), [(bz2.compress, "bzip2"), (lzma.compress, "xz")])
def test_compression_that_cannot_be_read_is_refused_by_name(compress, named, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(compress(b"{}"))
    with pytest.raises(ValueError, match=f"a.jsonl is compressed with {named}"):
        list(input_lines([str(tmp_path / "a.jsonl")]))


def test_a_changed_input_is_noticed(pair, tmp_path, capsys):
    """Also where lines have no ids of their own, and their numbers are still right."""
    rows = [{"prompt_token_ids": [i + 1, 5]} for i in range(3)]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert serve.main(command(pair, source, output)) == 0
    output.write_text(output.read_text().splitlines(keepends=True)[0])
    write(tmp_path / "in.jsonl", [{"prompt_token_ids": [9, 5]}, *rows[1:]])
    assert serve.main(command(pair, source, output)) == 2
    assert "made with other settings: input 3 lines" in capsys.readouterr().err
    assert serve.main(command(pair, source, output, "--force")) == 0


def test_a_glob_does_not_mean_the_files_of_the_job(pair, tmp_path):
    write(tmp_path / "in.jsonl", ROWS[:3])
    output, summary = tmp_path / "answers.jsonl", tmp_path / "summary.jsonl"
    for _ in range(2):  # its own files are there the second time
        assert serve.main(command(pair, [str(tmp_path / "*.jsonl")], output, "--summary", str(summary))) == 0
        assert set(records(output)) == {"r0", "r1", "r2"}
    assert serve.main(command(pair, [str(output)], output)) == 2  # by name it is what was asked for


def test_generated_ids_step_aside_for_any_other(pair, tmp_path):
    rows = [{"id": "1"}, {}, {"id": "line-1"}]
    source = write(tmp_path / "in.jsonl", [row | {"prompt_token_ids": [5]} for row in rows])
    output = tmp_path / "out.jsonl"
    for _ in range(2):
        assert serve.main(command(pair, source, output)) == 0
        assert sorted(records(output)) == ["1", "line-1", "line-1-"]


def test_every_bad_field_spoils_its_own_line_only(pair, tmp_path):
    body = {"prompt": "a", "max_tokens": 3}
    batch = lambda name, **more: {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body | more}
    rows = [
        {"id": "good", "prompt": "abc"},
        {"id": "stop", "prompt": "abc", "stop": "\ud800"},
        {"id": "stops", "prompt": "abc", "stop": list("abcde")},
        {"id": "long", "prompt": "abc", "stop": "a" * 2000},
        {"id": "prompt", "prompt": "\ud800"},
        {"id": "role", "messages": [{"role": "\ud800", "content": "a"}]},
        {"id": "content", "messages": [{"role": "user", "content": "\ud800"}]},
        {"id": "refused", "messages": [{"role": "tool", "content": "a" * 40}]},
        {"id": "argument", "messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"m": "\ud800"}},
        batch("model", model="\ud800"),
        batch("models", model=["m"]),
        batch("tokens", max_tokens=0),
        batch("fine", max_completion_tokens=None),
    ]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "in.jsonl").read_bytes())
    assert serve.main(command(pair, source, output)) == 1
    found = {r.get("custom_id", r["id"]): r for r in map(json.loads, output.read_text().splitlines())}
    assert {name for name, r in found.items() if not r.get("error")} == {"good", "fine", "argument"}
    assert found["fine"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert found["tokens"]["error"]["message"].startswith("max_tokens must be")
    assert "no role tool" in found["refused"]["error"]["message"]


def test_what_cannot_fit_is_refused_before_it_is_tokenized(pair, tmp_path, monkeypatch):
    """A text of 50 MB took minutes and 12 GB to tokenize, to be refused for its length."""
    encode = PreTrainedTokenizerBase.encode

    def only_short(self, text, **options):
        assert len(text) < 10_000
        return encode(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "encode", only_short)
    long = [{"id": "text", "prompt": "a b c d " * 10**4}, {"id": "chat", "turns": ["a b c d " * 10**4]}]
    source, output = write(tmp_path / "in.jsonl", [*ROWS[:1], {"id": "short", "prompt": "a"}, *long]), tmp_path / "o"
    assert serve.main(command(pair, source, output, "--max-length", "64")) == 1
    found = {r["id"]: r for r in map(json.loads, output.read_text().splitlines())}
    for name in ("text", "chat"):
        assert found[name]["error"]["code"] == "prompt_too_long"
        assert "cannot fit into 64 tokens" in found[name]["error"]["message"]
    assert "error" not in found["short"]


def test_openai_batch_lines(pair, tmp_path):
    chat = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]}
    rows = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat | {"max_tokens": 5}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": [1, 2, 3], "n": 1}},
        {"custom_id": "c", "method": "GET", "url": "/v1/completions", "body": {"prompt": "a"}},
        {"custom_id": "d", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "best_of": 2}},
        {"custom_id": "e", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "colour": 1}},
        {"custom_id": "f", "method": "POST", "url": "/v1/completions", "body": {"messages": []}},
        {"custom_id": "g", "method": "POST", "url": "/v1/chat/completions", "body": []},
        {"id": "plain", "messages": [{"role": "user", "content": "abc"}], "max_new_tokens": 5},
    ]
    output = tmp_path / "out.jsonl"
    assert serve.main(command(pair, write(tmp_path / "in.jsonl", rows), output, "--ordered")) == 1
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r.get("custom_id", r["id"]) for r in found] == [*"abcdefg", "plain"]
    body = found[0]["response"]["body"]
    assert found[0]["error"] is None
    assert found[0]["response"]["status_code"] == 200
    assert (body["object"], body["model"]) == ("chat.completion", "m")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": found[7]["text"], "refusal": None}
    assert body["choices"][0]["finish_reason"] == found[7]["finish_reason"]
    assert body["usage"] == found[7]["usage"] | {"total_tokens": sum(found[7]["usage"].values())}
    assert body["speculation"] == found[7]["speculation"]
    assert found[1]["response"]["body"]["object"] == "text_completion"
    assert isinstance(found[1]["response"]["body"]["choices"][0]["text"], str)
    for record in found[2:7]:
        assert record["response"] is None
        assert record["error"]["code"] in ("invalid_request", "unsupported_parameter")
    assert serve.main(command(pair, [str(tmp_path / "in.jsonl")], output)) == 1  # continued: nothing is left
    assert len(output.read_text().splitlines()) == 8
