"""Proposers of your own: functions of the tokens, objects of modules, and what is said of those that do not fit."""

import textwrap

import jax.numpy as jnp
import pytest

from dflash_jax import (
    Engine,
    begin_decoding,
    generate,
    load_target,
    spec_generate,
    speculative_step,
    stateless,
    step_functions,
)
from dflash_jax.cli import ModelOptions
from dflash_jax.drafters.around import Around
from dflash_jax.drafters.function import imported
from dflash_jax.drafters.loading import drafter_named
from dflash_jax.pairs import completed
from dflash_jax.parsing import names_object
from tests import tiny


def last_again(tokens, length):
    """Proposes the last token again and again."""
    return jnp.full(7, tokens[length - 1])


@pytest.fixture(scope="module")
def target(pair):
    return load_target(pair / "target", dtype="float32")


@pytest.mark.lossless
@pytest.mark.parametrize("how", [{}, {"block_size": 4}, {"tree": 5}, {"tree": 12}, {"temperature": 0.9, "top_k": 3}])
def test_answers_are_those_without_it(target, how):
    prompts = [[1, 2, 3], [4, 5], [7] * 40]
    plain = {name: value for name, value in how.items() if name not in ("block_size", "tree")}
    done = spec_generate(target, stateless(last_again, 8), prompts, max_new_tokens=24, seed=3, **how)
    assert done.tokens == generate(target, prompts, max_new_tokens=24, seed=3, **plain).tokens
    assert done.steps == [len(lengths) for lengths in done.acceptance_lengths]


def test_what_it_sees(target):
    """All tokens so far, in pages of memory, too; what it proposes is accepted where it is right."""
    prompt = [3, 1, 4, 1, 5]
    answer = generate(target, [prompt], max_new_tokens=40, ignore_eos=True).tokens[0]
    text = jnp.asarray([*prompt, *answer, *[0] * 8])
    oracle = lambda tokens, length: text[length + jnp.arange(7)]
    for how in ({}, {"cache_tokens": 512, "slots": 2}):
        engine = Engine(target, stateless(oracle, 8), max_length=256, **how)
        (done,) = engine.generate([tiny.ask(prompt, 40, ignore_eos=True)])
        assert done.token_ids == answer
        assert done.tau == pytest.approx(39 / 5)


def test_functions_that_do_not_fit(target):
    with pytest.raises(ValueError, match="block_size must be at least 2, got 1"):
        stateless(last_again, 1)
    with pytest.raises(ValueError, match=r"must return at least 15 token ids, got int32 \(7,\)"):
        spec_generate(target, stateless(last_again), [[1]], max_new_tokens=4)
    with pytest.raises(ValueError, match="must return at least 7 token ids, got float32"):
        spec_generate(target, stateless(lambda tokens, length: jnp.zeros(7), 8), [[1]], max_new_tokens=4)
    far = stateless(lambda tokens, length: jnp.full(7, 10**6), 8)
    assert (
        spec_generate(target, far, [[1]], max_new_tokens=9).tokens == generate(target, [[1]], max_new_tokens=9).tokens
    )


def test_what_is_no_drafter_is_told_what_it_lacks(target):
    with pytest.raises(ValueError, match="object has no config, taps, depth, init_state, propose, commit"):
        Engine(target, object())  # type: ignore[arg-type]


class Dishonest(Around):
    """Says that it proposes less than it does."""

    def depth(self, block_size):
        return 5


def test_a_depth_that_is_not_kept_is_an_error(target):
    honest = stateless(last_again, 8)
    functions = step_functions(target, Dishonest(honest), 8)
    state, _ = begin_decoding(target, honest, [[1, 2]], max_length=64)
    with pytest.raises(ValueError, match="promises chains of 5 tokens by its `depth`, and proposes 7"):
        speculative_step(functions, state)


@pytest.mark.parametrize("name", ["Mine", "made", "MINE"])
def test_objects_of_modules(tmp_path, monkeypatch, name):
    (tmp_path / "own_proposers.py").write_text(
        textwrap.dedent("""
            import jax.numpy as jnp
            from dflash_jax import stateless

            MINE = stateless(lambda tokens, length: jnp.full(3, tokens[length - 1]), 4)
            Mine = type("Mine", (type(MINE),), {"__init__": lambda self: type(MINE).__init__(
                self, MINE.config, function=MINE.function)})
            nothing, made = object, lambda: MINE
        """)
    )
    monkeypatch.chdir(tmp_path)
    assert drafter_named(f"own_proposers:{name}").depth(4) == 3
    assert completed(ModelOptions(target="t", drafter=f"own_proposers:{name}")).drafter == f"own_proposers:{name}"
    with pytest.raises(ValueError, match="own_proposers:gone cannot be imported: "):
        imported("own_proposers:gone")
    with pytest.raises(ValueError, match="object has no config"):
        imported("own_proposers:nothing")
    with pytest.raises(ValueError, match="no_such_module:x cannot be imported"):
        imported("no_such_module:x")
    (tmp_path / "a:b").mkdir()
    assert not names_object("a:b")
