"""A reduced vocabulary is chosen from as it is; the tokens are those of logits that are scattered over all ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.decoding.penalties import History, Penalties
from dflash_jax.decoding.proposing import propose
from dflash_jax.decoding.selection import rank
from tests import tiny

B, DEPTH, V = 6, 5, 60
IDS = jnp.asarray(np.sort(np.random.default_rng(3).permutation(V)[:23]))
LOGITS = jax.random.normal(jax.random.key(1), (B, DEPTH, len(IDS))) * 2
# Of few digits no sum rounds: then it does not matter which of them a compiler puts together.
short = lambda x: jnp.round(x * 64) / 64
BEFORE = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, 3)))
FORBIDDEN = int(IDS[4]), 1


def choices():
    """Greedy and sampled rows under every setting; what a drafter does with them; chains and trees."""
    draw = lambda seed, high, *shape: jnp.asarray(np.random.default_rng(seed).integers(0, high, shape))
    choice = tiny.choice_of(B, DEPTH, V, 0.9)
    temperature = jnp.asarray([0.0, 0.5, 1.0, 1.0, 1.0, 2.0])
    sampling = choice.sampling.replace(
        temperature=temperature,
        top_k=jnp.asarray([0, 5, 40, 0, 3, 0]),
        top_p=jnp.asarray([1.0, 1.0, 0.9, 0.8, 1.0, 1.0]),
        min_p=jnp.asarray([0.0, 0.0, 0.0, 0.0, 0.1, 0.02]),
    )
    noise = jnp.where(temperature[:, None, None] > 0, short(choice.noise), 0.0)
    choice = choice.replace(sampling=sampling, noise=noise, history=History(draw(1, V, B, 8), draw(2, 4, B)))
    choice = choice.replace(known=jnp.full(B, 7), decodable=jnp.arange(V) % 7 != 3)
    penalties = Penalties(
        jnp.asarray([1.0, 2.0, 0.5, 1, 1, 2.0]), jnp.full(B, 0.5), jnp.full(B, 0.25), jnp.zeros(B, jnp.int32)
    )
    reliability = jnp.stack([jnp.linspace(-1, 0.5, 2 * DEPTH), jnp.linspace(0.4, 1.6, 2 * DEPTH)], axis=-1)
    calibrated = {"sharpness": draw(5, 5, DEPTH), "reliability": reliability.reshape(2, DEPTH, 2)}
    return {
        "plain": choice.replace(plain=True),
        "coupled": choice,
        "penalised": choice.replace(penalties=penalties),
        "calibrated": choice.replace(penalties=penalties, **calibrated),
        "tree": choice.replace(penalties=penalties, nodes=9, **calibrated),
        "plain tree": choice.replace(nodes=9, plain=True),
    }


def scattered(logits):
    everything = jnp.full((*logits.shape[:2], V), -jnp.inf)
    return everything.at[:, :, IDS].set(logits)


def assert_same(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), ours, theirs)


DAILY = ("tree",)


@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in choices()]
)
def test_proposals_and_tokens(name):
    choice = choices()[name]
    logits = LOGITS if choice.nodes else short(LOGITS)  # of which many paths would be as good as others
    for forbidden in ((), FORBIDDEN):
        own, whole = choice.restricted(IDS, forbidden=forbidden), choice.restricted(forbidden=forbidden)
        ours, theirs = propose(own, logits), propose(whole, scattered(logits))
        assert_same((ours.tokens, ours.parents), (theirs.tokens, theirs.parents))
        if choice.nodes:
            np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-5)
        else:
            assert_same(ours.lessons, theirs.lessons)
        for depth in (0, 2):
            part = short(LOGITS[:, depth:])
            for before in (None, BEFORE):
                given = {"depth": depth, "before": before}
                assert_same(own.tokens(part, **given), whole.tokens(scattered(part), **given))


def test_ranks_of_nodes_with_their_own_ancestors():
    choice, seen = choices()["tree"], jnp.asarray(np.random.default_rng(4).integers(0, 2, (1, DEPTH, 3)), bool)
    own, whole, one = choice.restricted(IDS, forbidden=FORBIDDEN), choice.restricted(forbidden=FORBIDDEN), slice(1, 2)
    ours, learnt = rank(own, own.allowed(LOGITS, BEFORE, seen), one)
    theirs, other = rank(whole, whole.allowed(scattered(LOGITS), BEFORE, seen), one)
    assert_same((ours.tokens, learnt.tokens), (theirs.tokens, other.tokens))
    np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-5)


def test_nothing_of_the_whole_vocabularys_size_is_made_but_noise():
    """Five candidates of sharpness look at the reduced vocabulary alone."""
    choice = choices()["calibrated"].replace(decodable=None)
    program = jax.make_jaxpr(lambda choice, logits: propose(choice.restricted(IDS), logits))(choice, LOGITS)
    large = [eqn.primitive.name for eqn in program.eqns for out in eqn.outvars if out.aval.shape == (B, DEPTH, V)]
    assert set(large) <= {"slice"}  # of the noise


def test_a_choice_is_restricted_to_one_vocabulary():
    choice = choices()["coupled"].restricted(IDS)
    with pytest.raises(ValueError, match="restricted to a vocabulary already"):
        choice.restricted(forbidden=FORBIDDEN)
