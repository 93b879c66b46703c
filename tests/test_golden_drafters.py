"""Drafters compute what the packages compute that train them: numbers of each, and the config.json it saves, are in
tests/golden/drafters (made by tests/oracle/make_goldens.py, which says the versions)."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import load_drafter
from tests import tiny
from tests.oracle import seeded

FILES = sorted((Path(__file__).parent / "golden" / "drafters").glob("*.json"))


def stub_target(seed):
    """What a drafter asks of its target."""
    embedding, head = map(jnp.asarray, seeded.target(seed))
    return SimpleNamespace(
        dtype=jnp.float32,
        config=SimpleNamespace(embedding_scale=1.0),
        table=lambda tokens: embedding[tokens],
        head=lambda hidden: hidden @ head.T,
    )


def committed(drafter, target, golden, taps):
    """State after the text of a golden, its length, and the anchor behind it."""
    length = golden["positions"]
    tokens, features = seeded.inputs(length, taps, golden["seed"])
    positions, count = jnp.arange(length)[None], jnp.asarray([length])
    state = drafter.init_state(1, 64, length)
    given = jnp.asarray(tokens[None, :length]), jnp.asarray(features), positions, jnp.zeros_like(count), count
    return drafter.commit(target, state, *given), count, jnp.asarray(tokens[length:])


def check_eagle(drafter, target, golden):
    state, lengths, anchor = committed(drafter, target, golden, 3)
    known, token, fresh = state.feature[:, None], anchor[:, None], None
    for i, expected in enumerate(golden["logits"]):
        hidden, known, fresh = drafter.forward(target, known, token, state, lengths - 1, fresh)
        logits = drafter.unembed(target, hidden)[0, 0]
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        token = drafter.vocabulary[jnp.argmax(logits)][None, None]
        assert int(token[0, 0]) == golden["tokens"][i]


def check_block(drafter, target, golden):
    (state, lengths, anchor), block = committed(drafter, target, golden, 2), golden["block"]
    hidden = drafter.denoise(target, anchor, state, lengths, block)
    np.testing.assert_allclose(hidden[0, -len(golden["hidden"]) :], golden["hidden"], atol=1e-4)
    if "logits" in golden:
        logits = drafter.unembed(target, hidden)[0, -len(golden["logits"]) :]
        np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    if "corrected" in golden:
        previous = [int(anchor[0]), *golden["tokens"]][: len(golden["corrected"])]
        carried, hidden = drafter.begun(anchor, hidden)
        for slot, before in enumerate(previous):
            carried, latent = drafter.latent(carried, jnp.asarray([before]), hidden[:, slot])
            logits = drafter.unembed(target, hidden[:, slot : slot + 1])[0, 0] + drafter.bias(latent[None])[0, 0]
            expected = np.asarray(golden["corrected"][slot])
            np.testing.assert_allclose(np.delete(logits, seeded.MASK), np.delete(expected, seeded.MASK), atol=1e-4)
    if "tokens" in golden:
        depth = drafter.depth(block)
        proposal = drafter.propose(target, state, anchor, lengths, block, tiny.choice_of(1, depth, seeded.VOCAB))
        assert proposal.tokens[0].tolist() == golden["tokens"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_others_compute(path, tmp_path):
    golden = json.loads(path.read_text())
    shapes = {name: tuple(shape) for name, shape in golden["tensors"].items()}
    tiny.write(tmp_path / "drafter", golden["config"], seeded.tensors(shapes, golden["seed"]))
    drafter = load_drafter(tmp_path / "drafter", dtype="float32", num_target_layers=8)
    check = check_eagle if "eagle3" in path.stem else check_block
    check(drafter, stub_target(golden["seed"]), golden)


def test_every_package_is_there():
    assert {path.stem.split("_")[0] for path in FILES} == {"dflash", "specforge", "angelslim", "speculators"}
