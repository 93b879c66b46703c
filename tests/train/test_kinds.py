"""Drafters of every kind: trained from the states that decoding computes, saved, and begun from a DFlash drafter."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import generate, load_drafter, load_target, spec_generate
from dflash_jax.decoding.state import Query, Seen
from dflash_jax.drafters.base import Scored
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.train.blocks import draw_blocks, target_features
from dflash_jax.train.config import make_config
from dflash_jax.train.data import Example
from dflash_jax.train.drafters import converted, frequent_tokens, new_drafter, save_drafter
from dflash_jax.train.step import Batch, init_state, train_step
from tests import tiny

KINDS = ["dflash", "dflash2", "dspark", "eagle3", "lilicorr", "treeflash"]
LENGTH = 24
SMALL = {"block_size": 5, "num_layers": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
SMALL |= {"lilicorr_candidate_topk": 4, "lilicorr_num_heads": 2}
SMALL |= {"markov_rank": 6, "length": LENGTH, "anchors": 12, "row_anchors": 12, "batch_size": 2, "remat": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(tiny.write_target(tmp_path_factory.mktemp("pair") / "target", tiny.target_config()))


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, tiny.EOS, (2, LENGTH)))
    starts = jnp.asarray([[0] * LENGTH, [0] * 10 + [10] * (LENGTH - 10)])
    supervised = jnp.asarray(np.arange(LENGTH)[None] % 10 > 2) & jnp.ones((2, 1), bool)
    return Batch(tokens, starts, supervised)


def made(target, kind, vocabulary=None, **settings):
    """A new drafter, none of whose parameters is zero."""
    config = make_config({"drafter": kind, **SMALL, **settings})
    drafter, raw = new_drafter(target, config, tiny.MASK, vocabulary)
    leaves, tree = jax.tree.flatten(drafter.params)
    rng = np.random.default_rng(1)
    noisy = [x if x.dtype == jnp.int32 else x + 0.2 * rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    return config, drafter.replace(params=jax.tree.unflatten(tree, noisy)), raw


def drawn(config, drafter, batch):
    depth = drafter.depth(config.block_size)
    counts = {"count": 12, "per_document": 12, "block_size": config.block_size, "predictions": depth}
    return draw_blocks(jax.random.split(jax.random.key(0), 2), *batch[:3], **counts)


def alone(target, drafter, kind, text, features, anchor, start, labels):
    """Logits of a block's predictions as a decoding step computes them, all tokens before each being right."""
    count = anchor - start
    tokens, positions = text[start:anchor][None], jnp.arange(count)[None]
    state = drafter.init_state(1, 64)
    seen = Seen(tokens, features[start:anchor][None], positions, jnp.zeros(1, jnp.int32), jnp.asarray([count]))
    state, lengths = drafter.commit(target, state, seen), jnp.asarray([count])
    previous = jnp.concatenate([text[anchor][None], labels[:-1]])
    if kind == "eagle3":
        known, before, out = state.feature[:, None], None, []
        for token in previous:
            hidden, known, before = drafter.forward(target, known, token[None, None], state, lengths - 1, before)
            out.append(drafter.unembed(target, hidden)[0, 0])
        return jnp.stack(out)
    size = len(labels) + (0 if drafter.config.anchor_predicts else 1)
    hidden = drafter.denoise(target, getattr(state, "cache", state), Query(text[anchor][None], lengths, size))
    if kind == "treeflash":
        return drafter.behind(target, hidden, previous[None, :, None])[0, :, 0]
    if kind == "dspark":
        carried, hidden = drafter.begun(text[anchor][None], hidden)
    logits = drafter.unembed(target, hidden)[0]
    if kind == "dspark":
        for i, token in enumerate(previous):
            carried, latent = drafter.latent(carried, token[None], hidden[:, i])
            logits = logits.at[i].add(drafter.bias(latent[:, None])[0, 0])
    return logits


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in KINDS),
        pytest.param("dspark", {"markov_head_type": "gated"}, marks=pytest.mark.slow),
        pytest.param("dspark", {"markov_head_type": "rnn"}, marks=pytest.mark.slow),
        ("dspark", {"markov_head_type": "rnn", "anchor_predicts": False}),
    ],
    ids=[*KINDS, "gated", "rnn", "rnn, masks predict"],
)
def test_training_sees_what_decoding_computes(kind, settings, target, batch):
    given = {name: value for name, value in settings.items() if name != "anchor_predicts"}
    config, drafter, _ = made(target, kind, **given)
    if "anchor_predicts" in settings:
        drafter = drafter.replace(config=dataclasses.replace(drafter.config, anchor_predicts=False))
    blocks = drawn(config, drafter, batch)
    features, _ = target_features(target, drafter.taps, batch.tokens, batch.starts)
    seen = jax.jit(drafter.teacher_forced)(target, features, blocks)
    compared = 0
    for row, at in ((0, 1), (0, 7), (1, 2), (1, 9)):
        if not blocks.labelled[row, at].any():
            continue
        logits = drafter.score(target, drafter.heads(), jax.tree.map(lambda x, at=(row, at): x[at], seen))
        where = int(blocks.anchors[row, at]), int(blocks.starts[row, at]), blocks.labels[row, at]
        if where[0] + len(where[2]) >= LENGTH:
            continue
        expected = alone(target, drafter, kind, batch.tokens[row], features[row], *where)
        np.testing.assert_allclose(logits, expected, atol=2e-5)
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("vocabulary", [None, list(range(1, 62, 2))], ids=["whole", "reduced"])
def test_the_selector_learns_from_the_scores_it_decodes_with(vocabulary, target):
    _, drafter, _ = made(target, "dflash2", vocabulary)
    rng, width = np.random.default_rng(0), drafter.config.hidden_size
    ids = np.arange(drafter.config.vocab_size) if vocabulary is None else np.asarray(vocabulary)
    hidden = jnp.asarray(rng.standard_normal((9, width)), jnp.float32)
    labels, previous = (jnp.asarray(rng.integers(0, end, 9)) for end in (len(ids), tiny.EOS))
    gates = drafter.gates(hidden[None])[0]
    seen = hidden, drafter.params["candidate_selector"]["predecessor_codebook"][previous] * gates
    logits = drafter.score(target, drafter.heads(), seen)
    loss, correct = drafter.refine(target, drafter.heads(), Scored(seen, logits, labels))
    for i in range(9):
        candidates = np.argsort(-logits[i])[: drafter.config.selector_top_k]
        if labels[i] not in candidates:
            candidates[-1] = labels[i]
        pairs = drafter.pairs(gates[i : i + 1], previous[i : i + 1, None], jnp.asarray(ids[candidates])[None])[0, 0]
        scores = logits[i][candidates] + pairs
        place = list(candidates).index(int(labels[i]))
        np.testing.assert_allclose(loss[i], -jax.nn.log_softmax(scores)[place], rtol=1e-4)
        assert bool(correct[i]) <= (int(jnp.argmax(scores)) == place)


@pytest.mark.parametrize(
    "vocabulary",
    [pytest.param(None, id="whole", marks=pytest.mark.exhaustive), pytest.param(list(range(0, 62, 2)), id="reduced")],
)
@pytest.mark.parametrize(
    "kind", [kind if kind == "dflash" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_every_kind_learns_and_is_saved(kind, vocabulary, target, batch, tmp_path):
    config = make_config({"drafter": kind, "learning_rate": 3e-3, "kl": 0.5, **SMALL})
    drafter, raw = new_drafter(target, config, tiny.MASK, vocabulary)
    state = init_state(drafter, config, 40)
    before = state.params
    step = jax.jit(partial(train_step, config, 40))
    losses = []
    for _ in range(25):
        state, metrics = step(target, drafter, state, batch)
        assert metrics["finite"]
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    moved = jax.tree.map(lambda old, new: bool(jnp.any(old != new)), before, state.params)
    assert all(jax.tree.leaves(moved))
    trained = drafter.replace(params=state.params | {k: drafter.params[k] for k in drafter.params if k not in before})
    save_drafter(tmp_path / "drafter", trained, raw)
    loaded = load_drafter(tmp_path / "drafter")
    assert loaded.config == trained.config
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, trained.params))
    prompts, settings = [[5, 9, 11], [1, 2, 3, 4]], {"max_new_tokens": 12, "temperature": 1.0}
    assert spec_generate(target, loaded, prompts, **settings).tokens == generate(target, prompts, **settings).tokens


@pytest.mark.parametrize(
    "vocabulary",
    [pytest.param(None, id="whole", marks=pytest.mark.exhaustive), pytest.param(list(range(1, 62, 2)), id="reduced")],
)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("dflash2", "dspark", "treeflash")]
)
def test_a_dflash_drafter_becomes_another_kind(kind, vocabulary, target, tmp_path):
    _, started, raw = made(target, "dflash", vocabulary)
    config = make_config({"drafter": kind, **SMALL})
    drafter, raw = converted(target, started, raw, config)
    prompts = [[5, 9, 11], [1, 2, 3, 4, 5, 6]]
    ours, theirs = (spec_generate(target, x, prompts, max_new_tokens=16) for x in (drafter, started))
    assert ours.acceptance_lengths == theirs.acceptance_lengths
    save_drafter(tmp_path / "drafter", drafter, raw)
    assert load_drafter(tmp_path / "drafter").config == drafter.config
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["architectures"] == raw["architectures"]
    _, eagle, raw = made(target, "eagle3")
    with pytest.raises(ValueError, match=f"an? eagle3 drafter cannot become a {kind} one"):
        converted(target, eagle, raw, config)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reduced_head_is_rows_of_the_targets(tied, tmp_path, monkeypatch):
    directory = tiny.write_target(tmp_path, tiny.target_config(tie_word_embeddings=tied))
    mesh = make_mesh(parse_mesh("fsdp=2,model=2", jax.devices()[:4]), jax.devices()[:4])
    for target in (load_target(directory), load_target(directory, mesh=mesh)):
        whole = target.head(jnp.eye(target.config.hidden_size)[None])[0]
        monkeypatch.setattr(type(target), "head", None)  # a product with the whole head costs its memory twice
        drafter, _ = new_drafter(target, make_config(SMALL), tiny.MASK, [2, 5, 40])
        monkeypatch.undo()
        np.testing.assert_array_equal(drafter.params["lm_head"], whole[:, np.asarray([2, 5, 40])].T)


def test_frequent_tokens():
    example = Example(np.array([9, 9, 9, 3, 5, 5, 7]), np.array([0, 0, 0, 1, 1, 1, 1]))
    assert frequent_tokens([example], 0) is None
    assert frequent_tokens([example], 2) == [3, 5]
    with pytest.raises(ValueError, match="at most 3"):
        frequent_tokens([example], 4)
