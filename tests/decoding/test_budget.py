"""A verification budget: answers are those of autoregressive decoding, whatever is verified."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.constraints.constraint import regex
from dflash_jax.decoding.budget import within_budget
from dflash_jax.decoding.proposal import Proposal, accept, make_block
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.packing import Packing
from tests import tiny
from tests.fakes import vocabulary

KINDS = [
    pytest.param(kind, marks=() if kind in ("dflash", "dspark") else pytest.mark.slow)
    for kind in ("dflash", "dflash2", "dspark", "eagle3", "lilicorr", "treeflash")
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vocabulary.write_models(tmp_path_factory.mktemp("budget"))


def requests():
    """Greedy and sampled, with penalties, constraints, log-probabilities, and answers that end soon."""
    asked = []
    for i in range(14):
        more = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "min_tokens": 6} if i % 3 == 2 else {}
        if i % 4 == 1:
            more["constraint"] = regex("([a-f]{3}-){3,6}x")
        prompt = [(7 * i + 3 * j) % 60 + 1 for j in range(1 + 5 * (i % 3))]
        given = {"eos_token_ids": (vocabulary.END,), "logprobs": 2 if i % 2 else None}
        asked.append(tiny.ask(prompt, (2, 9, 30)[i % 3], (0.0, 0.7, 1.3)[i % 3], id=str(i), **given, **more))
    return asked


def answers(engine):
    done = engine.generate(requests())
    return [(one.token_ids, one.finish_reason) for one in done], [one.logprobs for one in done]


SETTINGS = {"max_length": 64, "constraints": True, "logprobs": 2, "steps_per_visit": 3, "prefill_chunk": 8}


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


@pytest.fixture(scope="module")
def plain(target):
    return answers(Engine(target, None, slots=1, **SETTINGS))


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        {"verify_budget": 2},
        {"verify_budget": 3, "tree": 9},
        pytest.param({"verify_budget": 3, "cache_tokens": 192}, marks=pytest.mark.slow),
        pytest.param({"verify_budget": 2, "slots": 16, "proposals": "argmax"}, marks=pytest.mark.slow),
        pytest.param({"verify_budget": 4, "proposals": "independent"}, marks=pytest.mark.slow),
        pytest.param({"verify_budget": 2, "block_size": "auto", "tree": 5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_plain_decoding(kind, settings, directory, target, plain):
    """And log-probabilities: a row gets more or less than another, and neighbors come and go."""
    drafter = load_drafter(directory / kind, num_target_layers=4)
    engine = Engine(target, drafter, **(SETTINGS | {"slots": 5} | settings))
    tokens, scores = answers(engine)
    assert tokens == plain[0]
    for ours, theirs in zip(scores, plain[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    if settings.get("block_size") == "auto":
        label = f"{engine.block_size}, budget 2"
        assert label in engine.steps_by_block_size


@pytest.mark.lossless
@pytest.mark.slow
@pytest.mark.parametrize("axes", ["data=2", "data=2,model=2"])
def test_a_mesh_has_a_budget_for_each_part(axes, directory, plain):
    devices = jax.devices()[: int(np.prod([int(part[-1]) for part in axes.split(",")]))]
    on = make_mesh(parse_mesh(axes, devices), devices)
    pair = load_target(directory / "target", mesh=on), load_drafter(directory / "dflash", num_target_layers=4, mesh=on)
    assert answers(Engine(*pair, slots=4, verify_budget=2, **SETTINGS))[0] == plain[0]


def block_of(scores, parents=None):
    scores = jnp.log(jnp.asarray(scores))
    tokens = jnp.arange(scores.size, dtype=jnp.int32).reshape(scores.shape)
    return make_block(jnp.full(scores.shape[0], 99, jnp.int32), Proposal(tokens, parents, scores.shape[1], scores))


def test_the_likeliest_nodes_of_all_rows_are_verified():
    chain = block_of([[0.9, 0.9, 0.9], [0.5, 0.9, 0.9], [0.9, 0.1, 0.9], [0.99, 0.99, 0.99]])
    remaining = jnp.asarray([9, 9, 9, 0])  # the last row is idle
    counts = {each: within_budget(chain, remaining, each).counts.tolist() for each in (1, 2, 3, 4)}
    # Reached: 0.9, 0.81, 0.73; 0.5, 0.45, 0.405; 0.9, 0.09, 0.081.
    assert counts == {1: [2, 1, 1, 0], 2: [4, 2, 2, 0], 3: [4, 4, 4, 0], 4: [4, 4, 4, 0]}
    some = within_budget(chain, jnp.asarray([2, 1, 9, 9]), 4)  # beyond the end of an answer nothing is committed
    assert some.counts.tolist() == [2, 1, 4, 4]
    tree = block_of([[0.9, 0.5, 0.4], [0.8, 0.7, 0.6]], jnp.asarray([[0, 0, 1], [0, 1, 2]]))
    assert within_budget(tree, jnp.asarray([9, 9]), 3).counts.tolist() == [2, 4]
    for bad in (jnp.nan, jnp.inf, -jnp.inf, 1.0):  # of a drafter that knows no better: no other row loses its anchor
        odd = block_of([[0.9, 0.9, 0.9]] * 4)
        odd = odd._replace(proposal=odd.proposal.replace(scores=odd.proposal.scores.at[0].set(bad)))
        assert within_budget(odd, jnp.full(4, 9), 1).counts.tolist() == [1, 1, 1, 1]
        assert within_budget(odd, jnp.full(4, 9), 2).counts.tolist() == [1, 3, 2, 2]
    without = make_block(jnp.zeros(4, jnp.int32), Proposal(jnp.zeros((4, 3), jnp.int32)))
    with pytest.raises(ValueError, match=r"needs `Proposal.scores`"):
        within_budget(without, remaining, 4)


def test_what_is_not_verified_is_not_accepted():
    chosen = jnp.asarray([[0, 1, 2, 7], [3, 4, 5, 7]])  # all proposals are right
    for counts in ([4, 4], [1, 3], [2, 0]):
        block = block_of([[0.9] * 3, [0.9] * 3])
        block = block._replace(packing=Packing.of(jnp.asarray(counts), 4, 4))
        accepted, _ = accept(chosen, block, jnp.asarray([9, 9]), jnp.full((2, 1), -1))
        assert accepted.count.tolist() == [max(1, count) for count in counts]


def test_packing():
    block = jnp.arange(24).reshape(4, 6)
    for counts in ([2, 0, 6, 1], [0, 0, 0, 0], [6, 6, 0, 0], [0, 3, 3, 3]):
        packing = Packing.of(jnp.asarray(counts), 6, 3)
        kept = [int(block[b, t]) for b in range(4) for t in range(counts[b])]
        packed = packing.pack(block)
        assert packed.shape == (4, 3)
        assert packed.reshape(-1)[: len(kept)].tolist() == kept
        assert packing.valid.tolist() == [min(3, max(0, len(kept) - 3 * i)) for i in range(4)]
        spread = packing.spread(packing.pack(jnp.repeat(block[..., None], 3, axis=2)))
        for b in range(4):
            assert spread[b, : counts[b], 2].tolist() == block[b, : counts[b]].tolist()
        of_rows = packing.of_rows(jnp.asarray([5, 6, 7, 8])).reshape(-1)
        assert of_rows[: len(kept)].tolist() == [5 + x // 6 for x in kept]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verify_budget": 1}, "verify_budget must be at least 2"),
        ({"verify_budget": 3, "deterministic": True}, "verify_budget and deterministic cannot be combined"),
    ],
)
def test_impossible_budgets_are_refused(target, settings, message):
    with pytest.raises(ValueError, match=message):
        Engine(target, None, max_length=64, **settings)
