"""Drafters compute what the packages compute that train them: numbers of each, and the config.json it saves, are in
tests/golden/drafters (made by tests/oracle/make_goldens.py, which says the versions)."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import load_drafter
from dflash_jax.decoding.state import Query, Seen
from dflash_jax.drafters.lattice import Lattice
from tests import tiny
from tests.oracle import seeded

FILES = sorted((Path(__file__).parents[1] / "golden" / "drafters").glob("*.json"))


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
    seen = Seen(jnp.asarray(tokens[None, :length]), jnp.asarray(features), positions, jnp.zeros_like(count), count)
    return drafter.commit(target, state, seen), count, jnp.asarray(tokens[length:])


def of_eagle(drafter, target, golden):
    """Logits of a chain of passes, each after the golden's tokens."""
    state, lengths, anchor = committed(drafter, target, golden, 3)
    known, token, fresh, logits = state.feature[:, None], anchor, None, []
    for after in golden["tokens"]:
        hidden, known, fresh = drafter.forward(target, known, token[:, None], state, lengths - 1, fresh)
        logits.append(drafter.unembed(target, hidden)[0, 0])
        token = jnp.asarray([after])
    depth = len(logits)
    proposal = drafter.propose(target, state, Query(anchor, lengths, depth + 1), tiny.choice_of(1, depth, seeded.VOCAB))
    return {"logits": jnp.stack(logits), "tokens": proposal.tokens[0]}


def of_block(drafter, target, golden):
    """What a block computes; with a Markov head, after the golden's tokens."""
    (state, lengths, anchor), block = committed(drafter, target, golden, 2), golden["block"]
    hidden = drafter.denoise(target, getattr(state, "cache", state), Query(anchor, lengths, block))
    logits = drafter.unembed(target, hidden)[0]
    choice = tiny.choice_of(1, drafter.depth(block), seeded.VOCAB)
    proposal = drafter.propose(target, state, Query(anchor, lengths, block), choice)
    predicting = slice(-len(golden["hidden"]), None)
    found = {"hidden": hidden[0, predicting], "logits": logits[predicting], "tokens": proposal.tokens[0]}
    if "corrected" in golden:
        carried, hidden = drafter.begun(anchor, hidden)
        biases = []
        for slot, before in enumerate([anchor[0], *golden["tokens"][:-1]]):
            carried, latent = drafter.latent(carried, jnp.asarray([before]), hidden[:, slot])
            biases.append(drafter.bias(latent[None])[0, 0])
        found["corrected"] = (logits + jnp.stack(biases)).at[:, seeded.MASK].set(0)  # never proposed
    if "pairs" in golden:
        best = lattice(drafter, logits)
        anchor = drafter.anchor(state.feature[:, None], lengths[:, None] > 0)
        scores = drafter.potentials(target, drafter.params["lilicorr"], best, hidden, anchor)
        found |= {"first": scores.first[0], "pairs": scores.pairs[0]}
    return found


def lattice(drafter, logits):
    """The best tokens of each slot, as a chain without penalties has them."""
    allowed = logits.at[:, seeded.MASK].set(-jnp.inf)
    _, ids = jax.lax.top_k(allowed, drafter.config.lilicorr_candidate_topk)
    return Lattice(ids[None], jnp.take_along_axis(jax.nn.log_softmax(logits), ids, axis=1)[None])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_others_compute(path, tmp_path):
    golden = json.loads(path.read_text())
    shapes = {name: tuple(shape) for name, shape in golden["tensors"].items()}
    tiny.write(tmp_path / "drafter", golden["config"], seeded.tensors(shapes, golden["seed"]))
    drafter = load_drafter(tmp_path / "drafter", dtype="float32", num_target_layers=8)
    compute = of_eagle if "eagle3" in path.stem else of_block
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    whole = lambda drafter: compute(drafter, stub_target(golden["seed"]), golden)
    found = jax.jit(whole, compiler_options=quick)(drafter)
    compared = [name for name in ("hidden", "logits", "corrected", "first", "pairs", "tokens") if name in golden]
    for name in compared:
        np.testing.assert_allclose(found[name], golden[name], atol=1e-4, err_msg=name)
    assert len(compared) > 1


def test_every_package_is_there():
    assert {path.stem.split("_")[0] for path in FILES} == {"dflash", "specforge", "angelslim", "speculators", "sglang"}
