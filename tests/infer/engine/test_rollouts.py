"""Rollouts: log-probabilities are those of one teacher-forced pass, and samples those of autoregressive decoding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, SamplingParams, load_drafter, load_target, rollouts
from dflash_jax.decoding.sampling import Sampling, reference
from tests import tiny

SETTINGS = {"slots": 5, "max_length": 96, "prefill_chunk": 16, "steps_per_visit": 3, "prefix_chunks": 8}
SETTINGS |= {"logprobs": 0, "sampled_logprobs": True}
PROMPTS = [[(5 * i) % 50 + 3 for i in range(37)], [7, 9], [4]]
PARAMS = SamplingParams(24, temperature=0.8, eos_token_ids=(62,))


def logits_of(target, tokens):
    """Of one pass over whole rows."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden, _, _ = target.forward(jnp.asarray(tokens), positions, None, target.init_cache(len(tokens), 1))
    return target.unembed(hidden)


def of_chosen(logits, tokens):
    """Log-probabilities of each token after the first, given those before it."""
    scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(scores, jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]
    return np.concatenate([np.zeros((len(tokens), 1)), np.asarray(chosen)], axis=1)


@pytest.mark.lossless
@pytest.mark.parametrize(
    ("params", "settings"),
    [
        (PARAMS, {}),
        (replace(PARAMS, top_k=9, top_p=0.8), {"tree": 9}),
        pytest.param(replace(PARAMS, min_p=0.1), {"verify_budget": 3, "prefill_budget": 8}, marks=pytest.mark.slow),
        pytest.param(replace(PARAMS, temperature=0.0), {}, marks=pytest.mark.slow),
    ],
)
def test_log_probabilities_are_those_of_one_pass(target, drafter, params, settings):
    engine = Engine(target, drafter, **(SETTINGS | settings))
    made = rollouts(engine, PROMPTS, 4, params, pad=1)
    assert made.tokens.shape == made.mask.shape == (12, made.lengths.max())
    assert made.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert (made.mask.sum(axis=1) == made.lengths - made.prompt_lengths).all()
    for row, group in enumerate(made.groups):
        assert made.tokens[row, : made.prompt_lengths[row]].tolist() == PROMPTS[group]
        answer = made.completions[row].token_ids
        assert made.tokens[row][made.mask[row]].tolist() == answer
        assert (made.tokens[row, made.lengths[row] :] == 1).all()
        assert made.finish_reasons[row] == ("stop" if answer[-1] == 62 else "length")
    logits = logits_of(target, made.tokens)
    policy = np.where(made.mask, of_chosen(logits, made.tokens), 0)
    np.testing.assert_allclose(made.policy_logprobs, policy, atol=1e-5)
    rows = jnp.ones(len(made.tokens))
    each = lambda value, dtype=jnp.float32: (value * rows).astype(dtype)
    keys = jax.random.split(jax.random.key(0), len(made.tokens))
    how = Sampling(
        temperature=each(params.temperature),
        top_p=each(params.top_p),
        top_k=each(params.top_k, jnp.int32),
        min_p=each(params.min_p),
        key=keys,
    )
    if params.temperature:
        sampled = np.where(made.mask, of_chosen(reference(logits, how), made.tokens), 0)
        np.testing.assert_allclose(made.logprobs, sampled, atol=1e-5)
        assert np.abs(made.logprobs - made.policy_logprobs)[made.mask].max() > 0.1
    else:
        assert (made.logprobs == 0).all()


def test_what_the_filters_let_through(target, drafter):
    """The same tokens as a pass with the reference's filters, in the order of their probability; over them the
    log-probabilities of the sampled tokens are normalized."""
    params = replace(PARAMS, top_k=9, top_p=0.8)
    engine = Engine(target, drafter, **(SETTINGS | {"logprobs": 9}))
    made = rollouts(engine, PROMPTS, 2, params, allowed=True)
    assert made.allowed.shape == (*made.tokens.shape, 9)
    assert (made.allowed[~made.mask] == -1).all()
    logits = np.asarray(logits_of(target, made.tokens), np.float64)
    sizes = set()
    for row, at in zip(*np.nonzero(made.mask), strict=True):
        scores = logits[row, at - 1] / 0.8
        order = np.argsort(-scores, kind="stable")[:9]
        share = np.exp(scores[order] - scores.max())
        before = (np.cumsum(share) - share) / share.sum()
        if np.abs(before - 0.8).min() < 1e-4:  # rounding may decide about the last one
            continue
        expected = order[before < 0.8]
        found = made.allowed[row, at]
        assert found[found >= 0].tolist() == expected.tolist()
        within = scores[made.tokens[row, at]] - np.log(np.exp(scores[expected]).sum())
        assert made.logprobs[row, at] == pytest.approx(within, abs=1e-4)
        sizes.add(len(expected))
    assert len(sizes) > 2
    assert rollouts(engine, PROMPTS[1:2], 1, params).allowed is None
    with pytest.raises(ValueError, match=r"params\.top_k in 1\.\.9"):
        rollouts(engine, PROMPTS, 1, PARAMS, allowed=True)


@pytest.mark.lossless
def test_samples_are_those_of_plain_decoding(target, drafter):
    engine = Engine(target, drafter, **SETTINGS)
    first = rollouts(engine, PROMPTS, 4, PARAMS)
    plain = rollouts(Engine(target, None, **SETTINGS), PROMPTS, 4, PARAMS)
    assert (first.tokens == plain.tokens).all()
    np.testing.assert_allclose(first.logprobs, plain.logprobs, atol=1e-5)
    assert first.stats.tau > 1.0
    assert first.stats.steps < plain.stats.steps
    again = rollouts(engine, PROMPTS, 4, PARAMS, width=90)
    assert again.tokens.shape == (12, 90)
    assert (again.tokens[:, : first.tokens.shape[1]] == first.tokens).all()
    other = rollouts(engine, PROMPTS, 4, PARAMS, step=1)
    assert any(one.token_ids != two.token_ids for one, two in zip(first.completions, other.completions, strict=True))
    assert len({tuple(one.token_ids) for one in first.completions[:4]}) == 4  # samples differ


def test_a_prompt_is_read_once_but_for_what_is_left_of_its_last_chunk(target, drafter):
    engine = Engine(target, drafter, **SETTINGS)
    made = rollouts(engine, PROMPTS[:1], 8, PARAMS)
    assert made.stats.prompt_tokens == 37 + 7 * 5


def test_penalties_count_among_what_is_sampled_from(target, drafter):
    params = replace(PARAMS, repetition_penalty=1.3)
    made = rollouts(Engine(target, drafter, **SETTINGS), PROMPTS[1:], 2, params)
    logits = np.asarray(logits_of(target, made.tokens))
    for row in range(len(made.tokens)):
        for at in np.flatnonzero(made.mask[row]):
            seen = np.unique(made.tokens[row, :at])
            scores = logits[row, at - 1].astype(np.float64)
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / 1.3, scores[seen] * 1.3)
            scores = (scores - scores.max()) / 0.8
            expected = scores[made.tokens[row, at]] - np.log(np.exp(scores).sum())
            assert made.logprobs[row, at] == pytest.approx(expected, abs=2e-5)


def test_what_cannot_be_served(target, drafter):
    engine = Engine(target, drafter, **(SETTINGS | {"sampled_logprobs": False}))
    with pytest.raises(ValueError, match="make the engine with logprobs=0, sampled_logprobs=True"):
        rollouts(engine, PROMPTS)
    with pytest.raises(ValueError, match="sampled_logprobs come with log-probabilities"):
        Engine(target, drafter, sampled_logprobs=True)
    engine = Engine(target, drafter, **SETTINGS)
    with pytest.raises(ValueError, match="width must be at least"):
        rollouts(engine, PROMPTS, 1, PARAMS, width=9)
    with pytest.raises(ValueError, match=r"params\.seed would give"):
        rollouts(engine, PROMPTS, 1, replace(PARAMS, seed=3))
    with pytest.raises(ValueError, match="the prompt is empty"):
        rollouts(engine, [[]], 1, PARAMS)
    assert rollouts(engine, [], 1, PARAMS).tokens.shape == (0, 0)


@pytest.mark.slow
def test_in_bfloat16_they_are_near(tmp_path):
    """The pass that verified a token had other neighbors in its products: they differ by its rounding."""
    tiny.write_target(tmp_path / "target", tiny.target_config())
    tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config())
    pair = load_target(tmp_path / "target", dtype="bfloat16"), load_drafter(tmp_path / "drafter", dtype="bfloat16")
    made = rollouts(Engine(*pair, **SETTINGS), PROMPTS, 4, PARAMS)
    policy = np.where(made.mask, of_chosen(logits_of(pair[0], made.tokens), made.tokens), 0)
    error = np.abs(made.policy_logprobs - policy)[made.mask]
    assert error.max() < 0.2
    assert error.mean() < 0.03
