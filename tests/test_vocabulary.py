"""Rows of a padded vocabulary are never chosen, and a drafter's mask token is never proposed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import generate, load_drafter, load_target, spec_generate
from dflash_jax.decoding.state import Query, init_state
from dflash_jax.decoding.step import make_choose, make_propose
from dflash_jax.vocabulary import decodable_tokens
from tests import tiny

PADDED = 80  # rows of the embedding, of which the tokenizer knows 64
PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7], [40]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("padded")
    tiny.write_target(directory / "target", tiny.target_config(vocab_size=PADDED))
    tiny.write_tokenizer(directory / "target")
    tiny.write_drafter(directory / "drafter", tiny.drafter_config(vocab_size=PADDED))
    return directory


def loud(target, rows):
    """The target with these rows of its tied head far louder than the others."""
    embedding = target.params["embed_tokens"].at[jnp.asarray(rows)].multiply(8.0)
    return target.replace(params=target.params | {"embed_tokens": embedding})


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_padded_rows_are_never_emitted(directory, temperature):
    target, drafter = loud(load_target(directory / "target"), range(64, PADDED)), load_drafter(directory / "drafter")
    given = {"max_new_tokens": 30, "temperature": temperature, "stop_token_ids": []}
    plain = generate(target, PROMPTS, **given)
    assert max(map(max, plain.tokens)) < 64
    assert spec_generate(target, drafter, PROMPTS, **given).tokens == plain.tokens
    free = generate(target.replace(decodable=None), PROMPTS, **given)
    assert max(map(max, free.tokens)) >= 64  # the control: it would have chosen them


def test_the_mask_token_is_never_proposed(directory):
    target, drafter = loud(load_target(directory / "target"), [tiny.MASK]), load_drafter(directory / "drafter")
    state = init_state(target, drafter, 3, 32, 2).replace(anchor=jnp.asarray([5, 9, 11]))
    logits = drafter.logits(target, state.draft, Query(state.anchor, state.lengths, 8))
    assert (np.asarray(jnp.argmax(logits, axis=-1)) == tiny.MASK).any()  # the control
    proposal = jax.jit(lambda s: make_propose(target, drafter, 8, "coupled")(s, make_choose(target, 7)(s)))(state)
    assert not (np.asarray(proposal.tokens) == tiny.MASK).any()
    # Whether it may be emitted is the target's affair alone: no drafter changes an output.
    plain = generate(target, PROMPTS, max_new_tokens=20, stop_token_ids=[])
    assert any(tiny.MASK in row for row in plain.tokens)
    assert spec_generate(target, drafter, PROMPTS, max_new_tokens=20, stop_token_ids=[]).tokens == plain.tokens


def test_what_a_tokenizer_knows(directory, tmp_path):
    assert decodable_tokens(tmp_path, 64) is None  # no tokenizer
    assert decodable_tokens(directory / "target", 64) is None  # all rows are known
    known = decodable_tokens(directory / "target", PADDED)
    assert known is not None
    assert known.tolist() == [True] * 64 + [False] * 16
    raw = json.loads((directory / "target" / "tokenizer.json").read_text())
    raw["added_tokens"].append({"id": 70, "content": "<later>", "special": True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    added = decodable_tokens(tmp_path, PADDED)
    assert added is not None
    assert np.flatnonzero(added)[-1] == 70
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a tokenizer"):
        decodable_tokens(tmp_path, PADDED)
