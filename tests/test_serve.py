"""The command line, run as a user would, on a tiny pair with a tiny tokenizer."""

import json
import shutil

import pytest

from dflash_jax import generate, load_target, serve
from dflash_jax.cache import pages
from dflash_jax.models import FAMILIES
from tests import tiny


def run(pair, tmp_path, lines, *arguments, drafter="drafter", resume=False):
    """Exit status, output records and summary; of one block size, if no other is asked for: it compiles sooner."""
    source, output, summary = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "summary.json"))
    if not resume:
        output.unlink(missing_ok=True)
    source.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    models = ["--target", str(pair / "target"), "--drafter", str(pair / drafter)]
    files = ["--input", str(source), "--output", str(output), "--summary", str(summary)]
    one = [] if {"--block-size", "--no-speculation"} & {*arguments} else ["--block-size", "8"]
    status = serve.main([*models, *files, "--max-new-tokens", "12", *one, *arguments])
    records = [json.loads(line) for line in output.read_text().splitlines()] if status < 2 else []
    return status, records, json.loads(summary.read_text()) if status < 2 else None


def test_every_line_form_is_answered_and_every_bad_line_reported(pair, tmp_path):
    lines = [
        {"id": "p", "prompt": "hello there"},
        {"prompt_token_ids": [1, 2, 3], "max_new_tokens": 5, "temperature": 0.8, "seed": 3},
        {"id": 7, "messages": [{"role": "user", "content": "abc"}]},
        {"id": "t", "turns": ["first", "second"]},
        b"{broken",
        b"[1, 2]",
        b'{"id": "utf", "prompt": "\xff\xfe"}',
        b"[" * 100_000,
        {"id": "none"},
        {"id": "both", "prompt": "a", "turns": ["b"]},
        {"id": "type", "prompt": 3},
        {"id": "empty", "prompt": ""},
        {"id": "vocab", "prompt_token_ids": [64]},
        {"id": "bool", "prompt_token_ids": [True]},
        {"id": "temp", "prompt": "a", "temperature": -1},
        {"id": "nan", "prompt": "a", "temperature": float("nan")},
        {"id": "topp", "prompt": "a", "top_p": 0},
        {"id": "topk", "prompt": "a", "top_k": "3"},
        {"id": "huge", "prompt": "a", "top_k": 10**30},
        {"id": "seed", "prompt": "a", "seed": -1},
        {"id": "penalty", "prompt": "a", "repetition_penalty": 1e-46},
        {"id": "long", "prompt": "a" * 500},
        {"id": "stop", "prompt": "a", "stop": [""]},
        {"id": "role", "messages": [{"role": "user"}]},
        {"id": "surrogate", "prompt": "\ud800"},
        {"id": [1], "prompt": "a"},
        {"id": "\ud800", "prompt": "a"},
        {"id": "role2", "messages": [{"role": "\ud800", "content": "a"}]},
        b"",
    ]
    status, records, summary = run(pair, tmp_path, lines, "--ordered", "--batch-size", "2", "--max-length", "64")
    assert status == 1
    assert [record["index"] for record in records] == list(range(28))
    good, bad = records[:4], records[4:]
    assert [record["id"] for record in good] == ["p", "1", 7, "t"]
    answers = [answer for record in good for answer in record.get("turns", [record])]
    assert len(answers) == 5
    for record in answers:
        assert record["finish_reason"] in ("stop", "length")
        assert record["usage"]["completion_tokens"] == len(record["token_ids"])
        lengths = record["speculation"]["acceptance_lengths"]
        assert 1 + sum(lengths) == len(record["token_ids"])
        assert record["speculation"]["steps"] == len(lengths)
    assert len(good[1]["token_ids"]) <= 5
    codes = [record["error"]["code"] for record in bad]
    assert codes[:4] == ["invalid_json"] * 4
    assert codes[4:7] == ["invalid_request"] * 3
    assert codes[7:10] == ["empty_prompt", "invalid_token", "invalid_request"]
    assert codes[10:17] == ["invalid_parameter"] * 7
    assert codes[17:] == [
        "prompt_too_long",
        "invalid_parameter",
        "invalid_messages",
        "invalid_request",
        "invalid_request",
        "invalid_request",
        "invalid_request",
    ]
    assert (summary["requests"], summary["failed"]) == (28, 24)
    assert summary["tokens"] == sum(len(record["token_ids"]) for record in answers)
    assert sum(summary["acceptance_histogram"]) == summary["steps"]
    assert len(summary["acceptance_per_position"]) == 7


@pytest.mark.slow
def test_ids_are_told_apart_as_text(pair, tmp_path, capsys):
    status, records, _ = run(pair, tmp_path, [{"id": "1", "prompt": "a"}, {"prompt": "b"}], "--ordered")
    assert status == 0
    assert [record["id"] for record in records] == ["1", "line-1"]
    assert run(pair, tmp_path, [{"id": 7, "prompt": "a"}, {"id": "7", "prompt": "b"}])[0] == 2
    assert "unique" in capsys.readouterr().err


@pytest.mark.slow
def test_one_greedy_budget_does_not_size_the_job(pair, tmp_path):
    """Without --max-length a row is at most as long as the target was trained for."""
    lines = [{"id": "a", "prompt": "a", "max_new_tokens": 10**9, "stop": "\x00"}, {"id": "b", "prompt": "b"}]
    status, records, _ = run(pair, tmp_path, lines, "--ordered", "--batch-size", "2")
    assert status == 0
    assert len(records[0]["token_ids"]) < 1024
    assert len(records[1]["token_ids"]) <= 12


def test_answers_are_those_of_the_library_and_of_no_speculation(pair, tmp_path):
    lines = [{"id": str(i), "prompt_token_ids": [i + 1, 5, 9]} for i in range(3)]
    status, records, summary = run(pair, tmp_path, lines, "--ordered")
    assert status == 0
    expected = generate(load_target(pair / "target"), [[i + 1, 5, 9] for i in range(3)], max_new_tokens=12)
    assert [record["token_ids"] for record in records] == expected.tokens
    status, plain, _ = run(pair, tmp_path, lines, "--ordered", "--no-speculation")
    assert [record["token_ids"] for record in plain] == expected.tokens
    assert plain[0]["speculation"] == {"steps": 0, "acceptance_lengths": [], "tau": None}
    assert summary["tau"] >= 1


@pytest.mark.slow
def test_lines_that_are_longer_than_the_sample(pair, tmp_path, monkeypatch, capsys):
    """They, and conversations that become longer, are answered as if all had been known."""
    monkeypatch.setattr("dflash_jax.infer.jobs.sample.FIRST", 2)
    monkeypatch.setattr("dflash_jax.infer.jobs.sample.LARGEST", 1)
    lines = [
        {"id": "short", "prompt": "hello"},
        {"id": "talk", "turns": ["abc" * 20, "de" * 20, "fg"], "max_new_tokens": 60, "ignore_eos": True},
        {"id": "bytes", "prompt": "a" * 240},
        {"id": "long", "prompt": "hi", "max_new_tokens": 300, "ignore_eos": True},
    ]
    found = {}
    for job, given in ("all", lines), ("one", [lines[1]]), ("two", [lines[3]]):
        (tmp_path / job).mkdir()
        length = () if job == "all" else ("--max-length", "1024")
        status, records, _ = run(pair, tmp_path / job, given, *length)
        assert status == 0
        found[job] = {record["id"]: record for record in records}
    assert "longer than the others; loading another engine" in capsys.readouterr().err
    assert [turn["token_ids"] for turn in found["all"]["talk"]["turns"]] == [
        turn["token_ids"] for turn in found["one"]["talk"]["turns"]
    ]
    assert found["all"]["long"]["token_ids"] == found["two"]["long"]["token_ids"]
    assert len(found["all"]["long"]["token_ids"]) == 300


def test_penalties_logprobs_and_shared_prompts(pair, tmp_path):
    """Each line its own settings; a prompt asked for twice is read once."""
    head = [i % 50 + 1 for i in range(70)]
    given = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logprobs": 2}
    lines = [
        {"id": "plain", "prompt_token_ids": head},
        {"id": "penalised", "prompt_token_ids": head, **given},
        {"id": "several", "prompt_token_ids": [*head, 3], "n": 2, "temperature": 1.0, "logprobs": 0},
        {"id": "refused", "prompt_token_ids": head, "logprobs": 21},
        {"id": "negative", "prompt_token_ids": [-(2**40)]},
    ]
    status, records, summary = run(pair, tmp_path, lines, "--ordered", "--batch-size", "2")
    assert status == 1
    assert [record.get("error", {}).get("code") for record in records[3:]] == ["invalid_parameter", "invalid_token"]
    plain, penalised, several = records[:3]
    assert "logprobs" not in plain
    (alone,) = run(pair, tmp_path, lines[:1], "--no-speculation")[1]
    assert plain["token_ids"] == alone["token_ids"]
    (alone,) = run(pair, tmp_path, lines[1:2], "--no-speculation")[1]
    assert penalised["token_ids"] == alone["token_ids"] != plain["token_ids"]
    assert [entry["id"] for entry in penalised["logprobs"]] == penalised["token_ids"]
    assert all(
        len(entry["top"]) == 2 and entry["logprob"] <= entry["top"][0]["logprob"] for entry in penalised["logprobs"]
    )
    assert all(entry["top"] == [] for sample in several["samples"] for entry in sample["logprobs"])
    assert summary["prompt_tokens"] == 70 + 70 + 71 + 71
    assert summary["prompt_tokens_copied"] >= 2 * 64
    _, again, summary = run(pair, tmp_path, lines, "--ordered", "--batch-size", "2", "--prefix-chunks", "0")
    assert [record["token_ids"] for record in again[:3]] == [record["token_ids"] for record in records[:3]]
    assert summary["prompt_tokens_copied"] == 0


@pytest.mark.slow
def test_rows_that_share_memory(pair, tmp_path, monkeypatch):
    """A job answers as it does with memory for every row, and says how many requests gave theirs back."""
    monkeypatch.setattr(pages, "PAGE", 16)
    lines = [
        {"id": str(i), "prompt": "hello there", "max_new_tokens": 80, "temperature": 0.9 * (i % 2), "ignore_eos": True}
        for i in range(6)
    ]
    given = "--ordered", "--batch-size", "4"
    expected = run(pair, tmp_path, lines, *given)[1]
    status, records, summary = run(pair, tmp_path, lines, *given, "--cache-tokens", "128")
    assert status == 0
    assert [record["token_ids"] for record in records] == [record["token_ids"] for record in expected]
    assert summary["requests_preempted"] > 0
    assert all(record["finish_reason"] == "length" for record in records)


def test_stop_strings_cut_the_text(pair, tmp_path):
    line = {"id": "a", "prompt": "hello there", "max_new_tokens": 30}
    text = run(pair, tmp_path, [line])[1][0]["text"]
    stop = text[4:6]
    record = run(pair, tmp_path, [line | {"stop": stop}])[1][0]
    assert record["text"] == text[: text.index(stop)]
    assert record["finish_reason"] == "stop"
    assert 1 + sum(record["speculation"]["acceptance_lengths"]) == len(record["token_ids"])


def test_a_special_token_can_be_a_stop_string(pair):
    from dflash_jax.infer.text import Text

    text = Text(str(pair / "target"))
    tokens = [*text.encode("abc"), tiny.MASK, *text.encode("def")]
    find = text.find_stop(["<mask>", "never"])
    assert find(tokens, 4) == 4
    assert find(tokens[:3], 1) is None
    assert text.find_stop(["cd"])(tokens, 1) is None
    long = [*text.encode("a" * 100), *text.encode("bcd"), *text.encode("e" * 20)]
    assert text.find_stop(["abcd"])(long, 21) == 103


@pytest.mark.slow
def test_token_ids_need_no_tokenizer(tmp_path, capsys):
    tiny.write_target(tmp_path / "target", tiny.target_config())
    tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config())
    lines = [{"prompt_token_ids": [1, 2, 3]}, {"prompt": "a"}, {"prompt_token_ids": [1], "stop": "x"}]
    status, records, summary = run(tmp_path, tmp_path, lines)
    by_index = {record["index"]: record for record in records}
    assert status == 1
    assert summary["failed"] == 2
    assert by_index[0]["text"] is None
    assert len(by_index[0]["token_ids"]) == 12
    assert by_index[1]["error"]["code"] == by_index[2]["error"]["code"] == "no_tokenizer"
    (tmp_path / "target" / "tokenizer.json").write_text("{")
    assert run(tmp_path, tmp_path, lines)[0] == 2
    assert "must hold a tokenizer" in capsys.readouterr().err


def test_one_prompt_streams_to_the_terminal(pair, capsys):
    arguments = [
        "--target",
        str(pair / "target"),
        "--drafter",
        str(pair / "drafter"),
        "--max-new-tokens",
        "9",
    ]
    assert serve.main([*arguments, "--prompt", "hello"]) == 0
    out = capsys.readouterr()
    assert len(out.out.rstrip("\n")) > 0
    assert "tau" in out.err


def test_unusable_arguments_and_files_exit_2(pair, tmp_path, capsys):
    target, drafter = str(pair / "target"), str(pair / "drafter")
    source, output = tmp_path / "in.jsonl", str(tmp_path / "out.jsonl")
    source.write_text('{"prompt": "a"}\n')
    models = ["--target", target, "--drafter", drafter]
    endless = [
        "--target",
        str(tiny.write_target(tmp_path / "endless", tiny.target_config(max_position_embeddings=None))),
    ]
    job = ["--input", str(source), "--output", output]
    cases = {
        "No such file": [*models, "--input", str(tmp_path / "gone"), "--output", output],
        "needs --output": [*models, "--input", str(source)],
        "Is a directory": [*models, "--input", str(source), "--output", str(tmp_path)],
        "is the input": [*models, "--input", str(source), "--output", str(source)],
        "no drafter given": ["--target", target, *job],
        "block_size must lie in 1..8": [*models, *job, "--block-size", "9"],
        "top_p must lie in": [*models, *job, "--top-p", "2"],
        "temperature must be": [*models, *job, "--temperature", "-1"],
        "max-new-tokens": [*models, *job, "--max-new-tokens", "0"],
        "--batch-size must be": [*models, *job, "--batch-size", "0"],
        "--max-length must be at least 1": [*models, *job, "--max-length", "0"],
        "--max-length must be at most 1024, the context length of the target, got 10000000": [
            *models,
            *job,
            *("--max-length", "10000000"),
        ],
        "not enough memory for": [
            *endless,
            *job,
            *("--no-speculation", "--max-length", "2000000000", "--batch-size", "1000"),
        ],
        "--cache-tokens must be at least 512, for the longest request; got 511": [
            *models,
            *job,
            *("--max-length", "512", "--cache-tokens", "511"),
        ],
        "--draft-window must be at least 1": [*models, *job, "--draft-window", "0"],
        "--verify-budget must be at least 2": [*models, *job, "--verify-budget", "1"],
        "verify_budget and deterministic": [*models, *job, "--verify-budget", "3", "--deterministic"],
        "--prefill-budget must be at least 0": [*models, *job, "--prefill-budget", "-1"],
        "prefill_budget and deterministic": [*models, *job, "--prefill-budget", "8", "--deterministic"],
        "--cache-tokens must be at least 1 and below": [*models, *job, "--cache-tokens", "0"],
        "--stats-interval must be at least 0 and finite, got nan": [*models, *job, "--stats-interval", "nan"],
        "top_k must lie in": [*models, *job, "--top-k", "3000000000"],
        "seed must lie in": [*models, *job, "--seed", "10000000000000000000"],
        "are both": [*models, *job, "--summary", output],
        "--prefix-chunks must be": [*models, *job, "--prefix-chunks", "-1"],
        "matches no file": [*models, "--input", str(tmp_path / "*.gone"), "--output", output],
        "dtype must be": [*models, *job, "--dtype", "int8"],
        "target must be a checkpoint directory": ["--target", "/no/where", "--prompt", "a"],
        "pass --drafter, --drafter ngram": ["--target", target, "--prompt", "a"],
        "drafter must be a checkpoint directory": ["--target", target, "--drafter", "/no/where", *job],
    }
    for message, arguments in cases.items():
        assert serve.main(arguments) == 2, message
        assert message in capsys.readouterr().err
    source.write_text('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n')
    assert serve.main([*models, *job]) == 2
    assert "unique" in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        serve.main(["--target", target])
    assert error.value.code == 2


def test_a_drafter_of_another_target_is_refused(pair, tmp_path, capsys):
    tiny.write_drafter(tmp_path / "other", tiny.drafter_config(vocab_size=80))
    status, _, _ = run(pair, tmp_path, [{"prompt": "a"}], drafter=str(tmp_path / "other"))
    assert status == 2
    assert "vocabulary size 80 (target: 64)" in capsys.readouterr().err


def test_an_unknown_target_family_is_refused(pair, tmp_path, capsys):
    tiny.write_target(tmp_path / "target", tiny.target_config())
    (tmp_path / "target" / "config.json").write_text(json.dumps(tiny.target_config(model_type="mixtral")))
    tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config())
    assert run(tmp_path, tmp_path, [{"prompt": "a"}])[0] == 2
    assert f"model_type must be one of {sorted(FAMILIES)}, got 'mixtral'" in capsys.readouterr().err


THINKING = """\
{%- for m in messages %}{{ m['role'] }}.{{ m['content'] }}<end>{% endfor %}
{%- if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"""


@pytest.fixture
def thinking(pair, tmp_path):
    """The pair, with a chat template that can be told not to think."""
    shutil.copytree(pair, tmp_path / "thinking")
    (tmp_path / "thinking" / "target" / "chat_template.jinja").write_text(THINKING)
    return tmp_path / "thinking"


@pytest.mark.slow
def test_arguments_of_the_chat_template(thinking, tmp_path, capsys):
    """The job's, over them the line's own, in later turns too; noted, so that no other job continues this one."""
    chat = {"messages": [{"role": "user", "content": "abc"}]}
    on, off = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (True, False))
    batch = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        {"id": "default"} | chat,
        {"id": "on"} | chat | on,
        {"id": "off"} | chat | off,
        {"custom_id": "batch", "body": chat | on | {"max_tokens": 12}} | batch,
        {"id": "turns", "turns": ["abc", "def"]} | on,
        {"id": "no object"} | chat | {"chat_template_kwargs": 3},
        {"id": "reserved"} | chat | {"chat_template_kwargs": {"messages": []}},
        {"id": "no template", "prompt": "abc"} | off,
    ]
    status, records, summary = run(thinking, tmp_path, lines, "--ordered")
    assert status == 1
    assert [record["error"]["code"] for record in records[5:]] == ["invalid_parameter"] * 3
    assert summary["chat_template_kwargs"] == {}
    tokens = [record["usage"]["prompt_tokens"] for record in records[:3]]
    assert tokens == [tokens[0], tokens[0], tokens[0] + len("no thoughts")]
    unthinking = ["--ordered", "--chat-template-kwargs", '{"enable_thinking": false}']
    status, records, summary = run(thinking, tmp_path, lines, *unthinking)
    assert summary["chat_template_kwargs"] == {"enable_thinking": False}
    assert [record["usage"]["prompt_tokens"] for record in records[:3]] == [tokens[2], tokens[0], tokens[2]]
    assert records[3]["response"]["body"]["usage"]["prompt_tokens"] == tokens[0]
    first, second = (turn["usage"] for turn in records[4]["turns"])
    answered = len("assistant.") + len(records[4]["turns"][0]["text"]) + 1 + len("user.def") + 1
    assert first["prompt_tokens"] == tokens[0]
    assert second["prompt_tokens"] == tokens[0] + answered
    assert run(thinking, tmp_path, lines, *unthinking, resume=True)[0] == 1
    assert run(thinking, tmp_path, lines, "--ordered", resume=True)[0] == 2
    assert "chat_template_kwargs {'enable_thinking': False}, now None" in capsys.readouterr().err


@pytest.mark.slow
def test_a_deterministic_job_fixes_what_decides_its_bits(pair, tmp_path, capsys):
    lines = [{"id": str(i), "prompt_token_ids": [i + 1, 5, 9]} for i in range(3)]
    auto = ["--ordered", "--block-size", "auto"]
    _, records, summary = run(pair, tmp_path, lines, *auto)
    assert (summary["deterministic"], summary["block_size"]) == (False, "auto")
    status, fixed, summary = run(pair, tmp_path, lines, *auto, "--deterministic")
    assert status == 0
    assert [record["token_ids"] for record in fixed] == [record["token_ids"] for record in records]
    assert (summary["deterministic"], summary["block_size"]) == (True, "auto")
    assert list(summary["steps_by_block_size"]) == ["8"]
    assert run(pair, tmp_path, lines, *auto, resume=True)[0] == 2
    assert "deterministic" in capsys.readouterr().err
