"""Reading and packing."""

import json

import numpy as np
import pytest

from dflash_jax.infer.text import Text
from dflash_jax.train.config import TrainConfig, make_config, read_settings
from dflash_jax.train.data import Packing, read_examples
from tests import tiny


def write(path, rows):
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def pair(prompt, answer):
    return {"prompt_token_ids": list(range(1, prompt + 1)), "response_token_ids": list(range(20, 20 + answer))}


def test_forms_of_a_line(tmp_path):
    masked = {"token_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 0, 1]}
    failed = {"id": "x", "index": 3, "error": {"code": "empty_prompt", "message": "m"}}
    data = read_examples(write(tmp_path / "a.jsonl", [pair(3, 4), b"", masked, failed, pair(2, 0), pair(5, 1)]), 64, 64)
    assert [len(example.tokens) for example in data.examples] == [7, 5]
    assert data.examples[0].supervised.tolist() == [False] * 3 + [True] * 4
    assert data.examples[1].supervised.tolist() == [False, True, True, False, True]
    assert (data.without_answer, data.cut) == (3, 0)
    thinking = pair(2, 4) | {"loss_mask": [0, 0, 0, 0, 1, 1]}
    (example,) = read_examples(write(tmp_path / "b.jsonl", [thinking]), 64, 64).examples
    assert example.supervised.tolist() == [False] * 4 + [True] * 2
    assert example.begins is None


def test_where_steps_began(tmp_path):
    lines = [pair(2, 4) | {"anchors": [2, 4]}, pair(2, 5) | {"anchors": [2, 6]}, pair(1, 3)]
    data = read_examples(write(tmp_path / "a.jsonl", lines), 6, 64)
    assert data.examples[0].begins.tolist() == [False, False, True, False, True, False]
    assert data.examples[1].begins.tolist() == [False, False, True, False, False, False]
    rows = Packing(data.examples, 12, 1, 0).rows([[0, 2], [1]])
    assert np.flatnonzero(rows.begins[0]).tolist() == [2, 4]  # of the last it is not known
    assert np.flatnonzero(rows.begins[1]).tolist() == [2]


def test_long_sequences_are_cut_and_counted(tmp_path):
    data = read_examples(write(tmp_path / "a.jsonl", [pair(3, 30), pair(30, 3), pair(2, 3)]), 10, 64)
    assert (data.cut, data.without_answer, len(data.examples)) == (2, 1, 2)
    assert data.examples[0].tokens.tolist() == [1, 2, 3, *range(20, 27)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"{", "line 2"),
        (b"[1]", "expected an object"),
        ({"prompt": "x"}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, "2"], "response_token_ids": [3]}, "list of integers"),
        ({"prompt_token_ids": [1], "response_token_ids": [3, 64]}, "0..63"),
        ({"token_ids": [1, 2], "loss_mask": [1]}, "loss_mask 1"),
        ({"prompt_token_ids": [1], "response_token_ids": [3, 4], "loss_mask": [1]}, "have 3 tokens, loss_mask 1"),
        ({"prompt_token_ids": [1], "response_token_ids": [3, 4], "anchors": [3]}, "anchors must lie in 0..2"),
        ({"prompt_token_ids": [1], "response_token_ids": [3, 4], "anchors": 1}, "list of integers"),
    ],
)
def test_bad_lines_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read_examples(write(tmp_path / "a.jsonl", [pair(3, 4), row]), 64, 64)


def test_conversations_with_answers(tmp_path):
    """As they are published: all answers are learned, up to the token that ends each."""
    text = Text(str(tiny.write_tokenizer(tmp_path / "target")))
    said = lambda *turns: [
        {"role": role, "content": turn} for role, turn in zip(("user", "assistant") * 9, turns, strict=False)
    ]
    rows = [{"messages": said("ab", "cd", "e", "fgh"), "source": "x"}, {"messages": said("ab", "cd")}]
    both, one = read_examples(write(tmp_path / "a.jsonl", rows), 200, 64, text, (tiny.EOS,)).examples
    shown = [text.decode(both.tokens[both.supervised].tolist()), text.decode(one.tokens[one.supervised].tolist())]
    asked = text.encode_chat(said("ab"))
    assert one.tokens[: len(asked)].tolist() == asked
    assert not one.supervised[: len(asked)].any()
    assert one.supervised[len(asked)]
    assert "cd" in shown[1]
    assert "ab" not in shown[1]
    assert shown[0].index("cd") < shown[0].index("fgh")
    asked = text.encode_chat(said("ab", "cd", "e"))
    assert both.tokens[: len(asked)].tolist() == asked
    for wrong, why in [
        (said("ab"), "must have an answer"),
        ([{"role": "assistant", "content": "a"}], "must begin with a question"),
        ("hello", "must have an answer"),
    ]:
        with pytest.raises(ValueError, match=f"line 1: .*{why}"):
            read_examples(write(tmp_path / "a.jsonl", [{"messages": wrong}]), 64, 64, text)
    with pytest.raises(ValueError, match="or messages"):
        read_examples(write(tmp_path / "a.jsonl", [{"prompt": "x"}]), 64, 64, text)


def test_nothing_to_train_on(tmp_path):
    with pytest.raises(ValueError, match="nothing to train on: 1 lines"):
        read_examples(write(tmp_path / "a.jsonl", [pair(3, 0)]), 64, 64)


@pytest.fixture
def examples(tmp_path):
    sizes = np.random.default_rng(0).integers(4, 30, 40)
    rows = [{"token_ids": [i % 60] * int(n), "loss_mask": [1] * int(n)} for i, n in enumerate(sizes)]
    return read_examples(write(tmp_path / "a.jsonl", rows), 64, 64).examples


def test_an_epoch_visits_every_example_once_and_whole(examples):
    packing = Packing(examples, 64, 1, seed=3)
    steps = packing.steps(1)
    seen = [index for step in range(steps) for row in packing.contents(step) for index in row]
    assert sorted(seen) == list(range(40))
    again = [index for step in range(steps, packing.steps(2)) for row in packing.contents(step) for index in row]
    assert sorted(again) == sorted(seen)
    assert again != seen
    filled = sum(len(example.tokens) for example in examples) / (steps * 64)
    assert filled > 0.85
    for step in range(steps):
        rows, (contents,) = packing.batch(step), packing.contents(step)
        at = 0
        for index in contents:
            size = len(examples[index].tokens)
            np.testing.assert_array_equal(rows.tokens[0, at : at + size], examples[index].tokens)
            assert (rows.starts[0, at : at + size] == at).all()
            assert rows.supervised[0, at : at + size].all()
            at += size
        assert not rows.supervised[0, at:].any()
        np.testing.assert_array_equal(rows.starts[0, at:], np.arange(at, 64))


def test_a_step_follows_from_seed_and_number(examples):
    first, second = Packing(examples, 64, 3, seed=5), Packing(examples, 64, 3, seed=5)
    late = second.batch(11)
    for step in range(11):
        first.batch(step)
    for a, b in zip(first.batch(11), late, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(late, Packing(examples, 64, 3, seed=6).batch(11), strict=True))


def test_a_corpus_smaller_than_a_step_is_repeated(examples):
    packing = Packing(examples[:1], 64, 4, seed=0)
    assert packing.steps(1) == 1
    assert packing.contents(0) == [[0]] * 4


def test_partial_epochs(examples):
    packing = Packing(examples, 64, 2, seed=0)
    assert packing.steps(2.5) == packing.steps(2) + (packing.steps(3) - packing.steps(2)) // 2
    assert packing.steps(0.001) == 1


def test_settings_come_from_yaml_json_and_overrides(tmp_path):
    (tmp_path / "a.yaml").write_text("learning_rate: 6e-4\nblock_size: 8\nremat: false\ntarget_layer_ids: [1, 3]\n")
    config = make_config(read_settings(tmp_path / "a.yaml", {"block_size": 10}))
    assert config == TrainConfig(learning_rate=6e-4, block_size=10, remat=False, target_layer_ids=(1, 3))
    (tmp_path / "a.json").write_text('{"epochs": 2, "gamma": 3}')
    assert make_config(read_settings(tmp_path / "a.json")) == TrainConfig(epochs=2.0, gamma=3.0)
    assert make_config(read_settings(None)) == TrainConfig()
    assert [TrainConfig(block_size=size).decay for size in (16, 10, 8)] == [7, 5, 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 1}, "unknown settings lr; known are drafter, block_size"),
        ({"learning_rate": "fast"}, "learning_rate must be float"),
        ({"learning_rate": float("nan")}, "learning_rate must be float"),
        ({"block_size": 1}, "at least 2"),
        ({"block_size": 8.0}, "block_size must be int"),
        ({"optimizer": "sgd"}, "adamw, muon"),
        ({"accumulate": 3}, "must divide"),
        ({"warmup": 4}, "0..1"),
        ({"cross_entropy": 0}, "all losses are off"),
        ({"length": 0}, "positive"),
        ({"clip_norm": 0}, "positive"),
        ({"b1": 1}, "1 excluded"),
        ({"remat": 1}, "remat must be bool"),
    ],
)
def test_bad_settings_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        read_settings(None, given)


def test_a_bad_settings_file_is_refused(tmp_path):
    for text, message in (("a: [", "YAML or JSON"), ("- 1", "named settings")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_settings(tmp_path / "bad.yaml")
