"""The joint distribution of consecutive tokens under speculation, against the target's own in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dflash_jax import load_drafter, load_target
from dflash_jax.decoding.calibration import init_calibration
from dflash_jax.decoding.choice import Choice
from dflash_jax.decoding.sampling import Sampling
from dflash_jax.decoding.step import run, speculative_step, step_functions
from tests import tiny
from tests.decoding.test_speculative import start

VOCAB, PROMPT, ANCHOR = 8, [3, 1, 4, 1], 5
ROWS, BATCHES, TOKENS, BLOCK = 4096, 13, 3, 4
SETTINGS = {
    "coupled": {"temperature": 1.0},
    "calibrated": {"temperature": 1.0, "proposals": "calibrated"},
    "independent": {"temperature": 1.0, "proposals": "independent"},
    "filtered": {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "tree": {"temperature": 1.0, "proposals": "calibrated", "nodes": 7},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a drafter of eight tokens."""
    directory = tmp_path_factory.mktemp("eight")
    small = {"vocab_size": VOCAB, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    target = tiny.target_config(**small, num_hidden_layers=2, eos_token_id=0)
    nested = {"mask_token_id": VOCAB - 1, "target_layer_ids": [0]}
    drafter = tiny.drafter_config(**small, num_hidden_layers=1, num_target_layers=2, dflash_config=nested)
    tiny.write_target(directory / "target", target)
    tiny.write_drafter(directory / "drafter", drafter)
    return load_target(directory / "target"), load_drafter(directory / "drafter")


def exact(target, temperature, top_k=VOCAB, top_p=1.0):
    """p(t1) p(t2 | t1) p(t3 | t1, t2) after prompt and anchor, [V, V, V]."""
    seconds = np.stack(np.meshgrid(np.arange(VOCAB), np.arange(VOCAB), indexing="ij"), axis=-1).reshape(-1, 2)
    tokens = np.concatenate([np.tile([*PROMPT, ANCHOR], (VOCAB**2, 1)), seconds], axis=1).astype(np.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden, _, _ = target.forward(jnp.asarray(tokens), positions, None, target.init_cache(VOCAB**2, 8))
    scores = np.asarray(target.unembed(hidden), np.float64)[:, -TOKENS:] / temperature
    best = np.argsort(-scores, axis=-1)
    weight = np.exp(np.take_along_axis(scores, best, axis=-1))
    weight[..., top_k:] = 0
    weight /= weight.sum(axis=-1, keepdims=True)
    weight[np.cumsum(weight, axis=-1) - weight >= top_p] = 0
    weight /= weight.sum(axis=-1, keepdims=True)
    p = np.zeros_like(weight)
    np.put_along_axis(p, best, weight, axis=-1)
    p = p.reshape(VOCAB, VOCAB, TOKENS, VOCAB)
    return p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]


def drawn(target, parts, drafter, temperature, top_k=0, top_p=1.0, batches=BATCHES):
    """How often each triple came, [V, V, V], and the tokens of each row's first step."""
    one, _ = start(target, drafter, [PROMPT], max_new_tokens=TOKENS + 1, slots=16)
    full = lambda value, dtype=jnp.float32: jnp.full(ROWS, value, dtype)

    @jax.jit
    def program(one, key):
        keys = jax.random.split(key, ROWS)
        sampling = Sampling(full(temperature), full(top_k, jnp.int32), full(top_p), full(0), keys)
        tiled = jax.tree.map(lambda x: jnp.repeat(x, ROWS, axis=0), one.replace(sampling=None, calibration=None))
        calibration = init_calibration(drafter.depth(BLOCK), [2.0])  # which the steps go on changing
        state = tiled.replace(sampling=sampling, anchor=full(ANCHOR, jnp.int32), calibration=calibration)
        _, trace = run(partial(speculative_step, parts), state, jnp.int32(TOKENS), jnp.int32(0), TOKENS)
        # [M, B, J] to [B, M J]: the steps' tokens after one another, those that do not count last.
        counts = jnp.arange(trace.tokens.shape[2])[None, None] < trace.count[:, :, None]
        flat = lambda x: x.swapaxes(0, 1).reshape(ROWS, -1)
        order = jnp.argsort(~flat(counts), axis=1, stable=True)[:, :TOKENS]
        return jnp.take_along_axis(flat(trace.tokens), order, axis=1), trace.count

    counts, first = np.zeros((VOCAB,) * TOKENS), []
    for key in jax.random.split(jax.random.key(0), batches):
        tokens, committed = program(one, key)
        assert (np.asarray(committed).sum(axis=0) == TOKENS).all()
        np.add.at(counts, tuple(np.asarray(tokens).T), 1)
        first.append(np.asarray(committed)[0])
    return counts, np.concatenate(first)


def p_value(counts, p):
    """Of the chi-square test, with cells of fewer than five expected draws taken together."""
    assert counts[p == 0].sum() == 0
    expected = p * counts.sum()
    rare = expected < 5
    pool = lambda x: np.append(x[~rare], x[rare].sum() if expected[rare].sum() else [])
    assert (~rare).sum() > 40
    return stats.chisquare(pool(counts), pool(expected)).pvalue


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [pytest.param(each, id=name, marks=[pytest.mark.slow] * (name != "tree")) for name, each in SETTINGS.items()],
)
def test_three_tokens_come_as_often_as_the_target_has_them(pair, settings):
    target, drafter = pair
    asked = {name: value for name, value in settings.items() if name not in ("proposals", "nodes")}
    parts = step_functions(target, drafter, BLOCK, settings.get("proposals", "coupled"), settings.get("nodes", 0))
    counts, first = drawn(target, parts, drafter, **asked)
    p = exact(target, **asked)
    assert counts.sum() > 50_000
    assert p_value(counts, p) > 1e-4
    assert all((first == n).mean() > 0.005 for n in (1, 2, 3))  # proposals are taken, and are not


class Reusing(Choice):
    """Wrong: every position has the noise of the first."""

    def for_block(self, logits, block, states=None):
        same = jnp.broadcast_to(self.noise[:, :1], self.noise.shape)
        return Choice.for_block(self.replace(noise=same), logits, block)


class Lenient(Choice):
    """Wrong: a proposal is taken if it is among the target's four likeliest tokens."""

    def for_block(self, logits, block, states=None):
        chosen = Choice.for_block(self, logits, block)
        likely = jnp.sort(logits, axis=-1)[:, :-1, -4]
        proposed = block.proposal.tokens
        taken = jnp.take_along_axis(logits[:, :-1], proposed[:, :, None], axis=2)[:, :, 0] >= likely
        return chosen.at[:, :-1].set(jnp.where(taken, proposed, chosen[:, :-1]))


@pytest.mark.parametrize("wrong", [Reusing, Lenient])
def test_a_wrong_rule_is_noticed(pair, wrong):
    target, drafter = pair
    parts = step_functions(target, drafter, BLOCK, "independent")
    choosing = lambda state: wrong(**vars(parts.choose(state)))
    counts, _ = drawn(target, parts._replace(choose=choosing), drafter, 1.0, batches=2)
    assert p_value(counts, exact(target, 1.0)) < 1e-10
