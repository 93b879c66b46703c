"""The bundled pair's recipe: true problems, a usable tokenizer, a target that learns, one resumable command."""

import json
import re
from itertools import chain, islice, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax import load_drafter, load_target, spec_generate
from dflash_jax.data.problems import is_correct, is_held_out, problems
from dflash_jax.infer.interrupt import INTERRUPTED
from dflash_jax.infer.text import Text
from dflash_jax.train.__main__ import main
from dflash_jax.train.config import StageError, TrainConfig
from dflash_jax.train.data import Example, Packing
from dflash_jax.train.toy.pair import Recipe, build, conversations
from dflash_jax.train.toy.pretrain import language_loss, new_target, pretrain
from dflash_jax.train.toy.tokenizer import train_tokenizer
from tests import tiny


def first(count, seed, **options):
    return list(islice(problems(seed, **options), count))


def test_problems_follow_from_the_seed_and_splits_are_apart():
    assert first(50, 3) == first(50, 3) != first(50, 4)
    training, held_out = first(3000, 3), first(500, 3, held_out=True)
    assert not {p.question for p in training} & {p.question for p in held_out}
    assert all(is_held_out(p.question) for p in held_out)
    assert len({p.question for p in training}) > 2900


def test_every_equation_in_the_workings_is_true():
    checked = 0
    for problem in first(3000, 5):
        assert is_correct(problem, problem.working)
        for equation in re.findall(r"\d[\d +*/=-]*=[\d +*/=-]*\d", problem.working):
            values = {eval(side) for side in equation.split("=")}  # digits and signs only
            assert len(values) == 1, problem
            checked += 1
    assert checked > 3000


def test_only_the_last_result_counts():
    problem = first(1, 0)[0]
    assert is_correct(problem, f"The answer is 0. The answer is {problem.answer}.")
    assert not is_correct(problem, f"The answer is {problem.answer}. The answer is none.")
    assert not is_correct(problem, f"The answer is {problem.answer}")
    assert not is_correct(problem, "")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer((f"{p.question}\n{p.working}" for p in first(400, 0)), 320)


def test_tokenizer(tokenizer):
    for text in ("What is 7 times 13?", "Größe, 日本 🙂\n", " two  spaces", "1234567890"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 320
    assert len(tokenizer.encode("98765")) == 5
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|pad|>", "<|mask|>"]) == [
        316,
        317,
        318,
        319,
    ]
    with pytest.raises(ValueError, match="lower it"):
        train_tokenizer(["one sentence"], 4000)


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(1)
    sizes = rng.integers(6, 30, 12)
    return [Example(rng.integers(0, 60, n).astype(np.int32), np.arange(n) >= 3) for n in sizes]


def test_packed_loss_is_the_loss_of_each_conversation_alone(target, examples):
    rows = Packing(examples, 64, 2, 0).batch(0)[:3]
    contents = Packing(examples, 64, 2, 0).contents(0)
    total = count = 0.0

    @jax.jit
    def losses(tokens):  # by the pass that decoding runs
        hidden, _, _ = target.forward(tokens, jnp.arange(30)[None], None, target.init_cache(1, 256))
        return optax.softmax_cross_entropy_with_integer_labels(target.unembed(hidden[:, :-1]), tokens[:, 1:])

    for index in chain.from_iterable(contents):
        tokens = examples[index].tokens
        alone = losses(jnp.asarray(np.pad(tokens, (0, 30 - len(tokens))))[None])[0]
        total, count = total + float(jnp.sum(alone[2 : len(tokens) - 1])), count + len(tokens) - 3
    packed = jax.jit(language_loss)
    np.testing.assert_allclose(packed(target, *map(jnp.asarray, rows)), total / count, rtol=1e-5)
    tokens, starts, supervised = rows
    joined = tokens, np.zeros_like(starts), supervised  # documents that see each other
    assert abs(float(packed(target, *map(jnp.asarray, joined))) - total / count) > 1e-3


SETTINGS = TrainConfig(length=64, batch_size=2, learning_rate=3e-3, optimizer="muon", max_steps=8, save_every=3)


@pytest.mark.slow
def test_an_interrupted_pretraining_ends_with_the_same_parameters(tmp_path, examples):
    start = new_target(tiny.target_config(), 0)
    losses = []
    report = lambda step, steps, loss: losses.append(loss)
    whole = pretrain(tmp_path / "whole", start, examples, SETTINGS, report)
    rows = map(jnp.asarray, Packing(examples, 64, 2, 0).batch(0)[:3])
    assert losses[-1] < float(jax.jit(language_loss)(start, *rows))

    def stop(step, steps, loss):
        if step == 5:
            raise KeyboardInterrupt

    every = TrainConfig(**{**vars(SETTINGS), "log_every": 1})
    with pytest.raises(KeyboardInterrupt):
        pretrain(tmp_path / "cut", start, examples, every, stop)
    again = pretrain(tmp_path / "cut", start, examples, every)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_an_infinite_loss_stops_the_pretraining(tmp_path, examples):
    broken = new_target(tiny.target_config(), 0)
    broken = broken.replace(params=broken.params | {"embed_tokens": broken.params["embed_tokens"] * jnp.nan})
    with pytest.raises(FloatingPointError, match="lower learning_rate"):
        pretrain(tmp_path, broken, examples, SETTINGS)


RECIPE = Recipe(
    problems=60,
    tokenizer_problems=60,
    shape={
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    pretrain={"length": 256, "batch_size": 4, "max_steps": 3, "optimizer": "muon", "learning_rate": 5e-3},
    prompts=4,
    drafter={"num_layers": 1, "length": 512, "anchors": 8, "row_anchors": 8, "batch_size": 1, "max_steps": 2},
    sharpness=6,
)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_command_makes_a_pair_and_continues(tmp_path, capsys):
    cut = lambda arguments: ["12" if before == "--max-new-tokens" else x for before, x in pairwise(["", *arguments])]
    quick = lambda arguments: main(cut(arguments))
    pair = build(tmp_path, RECIPE, quick, lambda *_: None)
    target, drafter = load_target(pair / "target"), load_drafter(pair / "drafter")
    drafter.config.check_pair(target.config)
    assert drafter.config.mask_token_id == 319
    assert len(drafter.config.proposal_sharpness) == 15
    assert target.config.eos_token_ids == (317,)
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    text = Text(str(pair / "target"))
    asked = conversations(first(4, 1), text, 317)
    for answer, example in zip(sorted(answers, key=lambda a: a["index"]), asked, strict=True):
        prompt = example.tokens[~example.supervised].tolist()
        assert answer["prompt_token_ids"] == prompt  # the drafter's prompts are asked as the target was taught
        # In bfloat16 the shipped weights are the ones that answered.
        assert spec_generate(target, drafter, [prompt], max_new_tokens=12).tokens == [answer["response_token_ids"]]
    before = {path: path.stat().st_mtime_ns for path in pair.rglob("*") if path.is_file()}
    build(tmp_path, RECIPE, quick, lambda *_: None)
    assert {path: path.stat().st_mtime_ns for path in pair.rglob("*") if path.is_file()} == before
    with pytest.raises(ValueError, match="another recipe"):
        build(tmp_path, Recipe(), quick, lambda *_: None)
    with pytest.raises(StageError, match="regenerate failed"):
        build(tmp_path / "other", RECIPE, lambda arguments: 2, lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "other", RECIPE, lambda arguments: INTERRUPTED, lambda *_: None)
