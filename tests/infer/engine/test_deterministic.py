"""`deterministic`: the bits of an answer follow from its request and the engine's configuration alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target, replay
from tests import tiny

HEAD = [(5 * i + 3) % 60 for i in range(24)]


@pytest.fixture(scope="module")
def pair(pair_directory):
    """In bfloat16, where products of another width, and sums in another order, do round differently."""
    return tuple(
        load(pair_directory / name, dtype="bfloat16")
        for load, name in ((load_target, "target"), (load_drafter, "drafter"))
    )


def requests():
    """Prompts of many lengths, some of which begin alike; greedy, sampled, filtered and penalized."""
    tails = [[7, 7], [1, 2, 3], [9] * 20, [4], [50] * 17, [2]]
    prompts = [HEAD[: 24 - 4 * (i % 3)] + tail for i, tail in enumerate(tails)] + [[40], [3, 1, 4, 1, 5, 9, 2, 6]]
    given = [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}, {"presence_penalty": 0.7}]
    return [tiny.ask(p, 18, id=f"r{i}", logprobs=2, **given[i % 4]) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def experts(pair, tmp_path_factory):
    """The same drafter on a target whose tokens go to experts together with their neighbors'."""
    raw = tiny.target_config(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    folder = tiny.write_target(tmp_path_factory.mktemp("experts"), raw | tiny.FAMILIES["qwen3_moe"])
    return load_target(folder, dtype="bfloat16"), pair[1]


def engine(pair, **settings):
    fixed = {"slots": 3, "max_length": 96, "prefill_chunk": 8, "logprobs": 2, "deterministic": True}
    return Engine(*pair, **fixed | settings)


def answers(engine, order):
    """What each request gets, by its id, if they arrive in this order."""
    asked = [requests()[i] for i in order]
    done = engine.generate(asked)
    outcome = lambda c: (c.token_ids, c.acceptance_lengths, c.logprobs, c.top_logprobs, c.finish_reason)
    return {request.id: outcome(completion) for request, completion in zip(asked, done, strict=True)}


@pytest.mark.lossless
@pytest.mark.slow
@pytest.mark.parametrize("of", ["pair", "experts"])
def test_neighbours_arrival_prefixes_and_lengths_change_no_bit(of, request):
    pair = request.getfixturevalue(of)
    everyone = range(len(requests()))
    alike = engine(pair)
    first = answers(alike, everyone)
    assert len({str(outcome) for outcome in first.values()}) == len(first)  # two greedy rows may end in one loop
    assert answers(engine(pair, max_length=300), reversed(everyone)) == first
    shuffled = np.random.default_rng(0).permutation(len(first)).tolist()
    assert answers(engine(pair, steps_per_visit=1, prefix_chunks=16), shuffled) == first
    for i in everyone:  # nobody beside it
        assert answers(alike, [i]).items() <= first.items()


@pytest.mark.slow
@pytest.mark.parametrize("tree", [0, 9])
def test_replay_explains_every_difference_by_rounding(pair, tree):
    """In bfloat16 wide and narrow steps may choose otherwise, but only where scores are almost the same."""
    asked = requests()
    for request, done in zip(
        asked, Engine(*pair, slots=3, max_length=96, tree=tree, logprobs=2).generate(asked), strict=True
    ):
        given = request.prompt_token_ids, done.token_ids
        found = replay(pair[0], *given, request.params, request_id=request.id, chunk=16)
        assert found.mismatches == found.near_ties
    wrong = [*done.token_ids[:5], (done.token_ids[5] + 1) % 60, *done.token_ids[6:]]
    found = replay(pair[0], request.prompt_token_ids, wrong, request.params, request_id=request.id, chunk=16)
    assert found.mismatches > found.near_ties


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replay_knows_how_far_a_dtype_rounds(dtype, tmp_path):
    """Tokens 2k and 2k + 1 score alike but for one rounding error of bfloat16."""
    target = load_target(tiny.write_target(tmp_path, tiny.target_config(tie_word_embeddings=False)), dtype=dtype)
    twins = jnp.repeat(target.params["lm_head"][::2], 2, axis=0)
    twins = twins.at[1::2].multiply(1 - 2.0**-8)
    target = target.replace(params={**target.params, "lm_head": twins})
    tokens = Engine(target, max_length=96).generate([tiny.ask(HEAD, 8)])[0].token_ids
    assert replay(target, HEAD, tokens).mismatches == 0
    found = replay(target, HEAD, [*tokens[:-1], tokens[-1] ^ 1])  # its twin
    assert (found.mismatches, found.near_ties) == (1, int(dtype == "bfloat16"))
    assert 0 < found.worst_gap < 0.1


def test_nothing_is_chosen_by_the_clock(pair):
    fixed = Engine(*pair, slots=2, max_length=64, prefill_chunk=8, block_size="auto", deterministic=True)
    fixed.warm_up()
    assert not fixed.choosers
    assert fixed.block_size == pair[1].config.block_size
    assert Engine(*pair, slots=2, max_length=64, block_size="auto").drafts.auto


@pytest.mark.slow
def test_what_the_option_fixes_matters_here(pair):
    """The control: in bfloat16 other widths do round differently, on most machines."""
    everyone = range(len(requests()))
    first, *others = (
        [x[2] for x in answers(engine(pair, **fixed), everyone).values()]
        for fixed in ({"block_size": 2}, {"block_size": 3}, {"block_size": 8}, {"prefill_chunk": 3})
    )
    if all(other == first for other in others):
        pytest.skip("products of all widths round alike on this machine")
