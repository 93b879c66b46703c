"""n-gram proposals, alone and beside a drafter: they change no answer, and repeat what was said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, Mixture, Ngram, Proposal, load_drafter, load_target, loading
from dflash_jax.cache import pages
from dflash_jax.cli import EngineOptions, GenerationOptions, ModelOptions
from dflash_jax.constraints.constraint import regex
from dflash_jax.decoding import copying
from dflash_jax.drafters import ngram
from dflash_jax.drafters.ngram import NgramConfig
from dflash_jax.infer.engine import drafts
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny
from tests.fakes import vocabulary
from tests.fakes.drafters import BigramDrafter

SETTINGS = {"max_length": 96, "constraints": True, "steps_per_visit": 4, "prefill_chunk": 32, "slots": 4}
KINDS = [pytest.param(kind, marks=() if kind == "dflash" else pytest.mark.slow) for kind in tiny.kinds()]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 16)
    monkeypatch.setattr(copying, "PIECE", 32)
    monkeypatch.setattr(ngram, "LONG", 3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = vocabulary.write_models(tmp_path_factory.mktemp("ngram"))
    for kind, raw in tiny.kinds().items():
        tiny.write_drafter(directory / kind, raw | {"vocab_size": vocabulary.SIZE})
    return directory


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


def requests():
    """Texts that repeat themselves and texts that do not, with penalties and constraints."""
    asked = []
    for i in range(12):
        more = {"repetition_penalty": 1.2, "min_tokens": 6} if i % 5 == 2 else {}
        if i % 4 == 1:
            more["constraint"] = regex("(abc-|abd-){3,9}x")
        prompt = [(7 * i + 3 * (j % (5 + 20 * (i % 3)))) % 60 + 1 for j in range((1, 50, 30)[i % 3])]
        given = {"eos_token_ids": (vocabulary.END,)}
        asked.append(tiny.ask(prompt, (40, 9)[i % 2], (0.0, 0.7, 1.3)[i % 3], id=str(i), **given, **more))
    return asked


def answers(engine):
    return [one.token_ids for one in engine.generate(requests())]


@pytest.fixture(scope="module")
def plain(target):
    return answers(Engine(target, None, **SETTINGS))


slow = lambda settings: pytest.param(settings, marks=pytest.mark.slow)


@pytest.mark.parametrize("tree", [0, 20])
def test_copies_reach_further_than_the_drafter(tree, directory, target):
    """Beside a drafter of small blocks, too; what lies beyond them teaches nothing of it."""
    drafter = load_drafter(directory / "dflash")
    request = tiny.ask([1, 2, 3, 4], 60, eos_token_ids=(vocabulary.END,))
    engine = Engine(target, Mixture(drafter), **SETTINGS, tree=tree)
    (done,) = engine.generate([request])
    assert max(done.acceptance_lengths) > drafter.config.block_size
    (plain,) = Engine(target, None, **SETTINGS).generate([request])
    assert done.token_ids == plain.token_ids
    known = engine.batch.state.calibration.information[:, :, 0]
    assert known.shape[1] == 15
    assert (known[:, 4:] == known[0, -1]).all()
    assert (known[0, :4] > known[0, -1]).any()


class Property:
    """A configuration that cannot be replaced."""

    block_size, proposal_sharpness = property(lambda _: 4), (2.0,)

    def check_pair(self, target):
        raise ValueError("no pair")


@pytest.mark.slow
def test_larger_blocks_need_nothing_of_a_drafter_but_the_protocol(target):
    """Chains whose lessons have places, too, as those of n-grams have."""
    request = tiny.ask([1, 2, 3, 4], 60, eos_token_ids=(vocabulary.END,))
    (plain,) = Engine(target, None, **SETTINGS).generate([request])
    (done,) = Engine(target, Mixture(Ngram(NgramConfig(4))), **SETTINGS).generate([request])
    assert done.token_ids == plain.token_ids
    assert max(done.acceptance_lengths) > 4
    config = Mixture(Ngram(Property())).config
    assert (config.block_size, config.proposal_sharpness) == (16, (2.0,))
    with pytest.raises(ValueError, match="no pair"):
        config.check_pair(target.config)


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tree": 9, "cache_tokens": 192, "verify_budget": 3, "prefill_budget": 16},
        slow({"tree": 40}),
        slow({"cache_tokens": 192, "prefix_chunks": 4}),
        slow({"verify_budget": 2, "prefill_budget": 16}),
        slow({"tree": 9}),
        slow({"block_size": 2, "tree": 40}),
        slow({"slots": 16, "cache_tokens": 960}),
        slow({"deterministic": True, "max_length": 512}),
        slow({"block_size": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["ngram", *KINDS])
def test_no_answer_changes(kind, settings, directory, target, plain):
    drafter = Ngram() if kind == "ngram" else Mixture(load_drafter(directory / kind, num_target_layers=4))
    engine = Engine(target, drafter, **(SETTINGS | settings))
    assert answers(engine) == plain
    # A block of 2 proposes one token; drafters of random weights are only known to add something.
    least = 1.0 if kind not in ("ngram", "dflash") else 1.1 if settings.get("block_size") == 2 else 1.2
    assert engine.stats.decode_tokens > least * engine.stats.row_steps


@pytest.mark.lossless
@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"tree": 9}, {"cache_tokens": 384}], ids=str)
@pytest.mark.parametrize("mixed", [False, True])
def test_on_a_mesh(mixed, more, directory, plain):
    devices = jax.devices()[:4]
    mesh = make_mesh(parse_mesh("data=2,model=2", devices), devices)
    target, drafter = load_target(directory / "target", mesh=mesh), Ngram()
    if mixed:
        drafter = Mixture(load_drafter(directory / "dflash", num_target_layers=4, mesh=mesh))
    assert answers(Engine(target, drafter, **(SETTINGS | more))) == plain


def test_what_is_repeated_is_right(target):
    """A greedy answer that has begun to repeat itself needs a step for each block."""
    engine = Engine(target, Ngram(), max_length=256)
    (done,) = engine.generate([tiny.ask([1, 2, 3], 200, stop_token_ids=())])
    assert done.acceptance_lengths[-2] == 16
    tree = Engine(target, Ngram(), max_length=256, tree=15)
    assert tree.generate([tiny.ask([1, 2, 3], 200, stop_token_ids=())])[0].tau >= 0.9 * done.tau


@pytest.mark.parametrize("tree", [0, 15])
@pytest.mark.parametrize("kind", [None, "dflash"])
def test_a_constraint_proposes_what_it_asks_for(kind, tree, directory, target):
    """What has only one continuation under a constraint is right, though it was never said before."""
    drafter = Mixture(load_drafter(directory / kind, num_target_layers=4)) if kind else Ngram()
    engine = Engine(target, drafter, **SETTINGS, tree=tree)
    constraint = regex("the only answer there can be")
    (done,) = engine.generate([tiny.ask([1, 2, 3], 60, eos_token_ids=(vocabulary.END,), constraint=constraint)])
    assert done.finish_reason == "stop"
    assert done.tau > 3


def test_budgets_of_an_accelerators_choice(target, monkeypatch):
    """Where 32 rows decode, `auto` tries budgets, which a drafter without features must serve as well."""
    monkeypatch.setattr(drafts, "BUDGET_ROWS", 4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    made = drafts.Drafts(Ngram(), EngineConfig(slots=4, max_length=96, block_size="auto"))
    budget = next(draft for draft in made.programs if draft.budget)
    monkeypatch.undo()
    engine = Engine(target, Ngram(), **SETTINGS | {"verify_budget": budget.budget, "block_size": budget.block_size})
    assert [one.token_ids for one in engine.generate(requests()[:2])]


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("tree", [0, 9])
def test_beside_a_drafter_that_says_no_probabilities(tree, forked, target, plain):
    """One that makes the same chain, or tree, whatever is asked for."""
    engine = Engine(target, Mixture(BigramDrafter(vocabulary.SIZE, forked)), **SETTINGS, tree=tree)
    assert answers(engine) == plain


class Counted(Ngram):
    """A drafter that says when it runs."""

    def propose(self, target, state, query, choice):
        jax.debug.callback(lambda: RUNS.append(1))
        return Proposal(jnp.zeros((query.anchor.shape[0], self.depth(query.block_size)), jnp.int32))


RUNS: list[int] = []


def test_the_drafter_rests_while_all_rows_copy(target):
    mixture = Mixture(Counted())
    (text,) = Engine(target, None, max_length=256).generate([tiny.ask([1, 2, 3], 200, stop_token_ids=())])
    RUNS.clear()
    engine = Engine(target, mixture, max_length=256, slots=2)  # one of its rows is idle
    engine.generate([tiny.ask([1, 2, 3, *text.token_ids], 20, stop_token_ids=())])  # which goes on repeating itself
    jax.effects_barrier()
    steps = engine.stats.steps
    assert steps > 0
    assert not RUNS
    engine.generate([tiny.ask([9], 3, stop_token_ids=())])
    jax.effects_barrier()
    assert 0 < len(RUNS) <= engine.stats.steps - steps


def test_new_weights_of_its_drafter(directory, target):
    first = load_drafter(directory / "dflash", num_target_layers=4)
    engine = Engine(target, Mixture(first), **SETTINGS)
    new = jax.tree.map(lambda x: x + 1, first.params)
    engine.update(drafter=new)
    assert isinstance(engine.drafter, Mixture)
    np.testing.assert_array_equal(engine.drafter.drafter.params["norm"]["weight"], new["norm"]["weight"])
    engine.update(drafter=Mixture(first))
    np.testing.assert_array_equal(engine.drafter.drafter.params["norm"]["weight"], first.params["norm"]["weight"])
    with pytest.raises(ValueError, match="no drafter with weights"):
        Engine(target, Ngram(), **SETTINGS).update(drafter=new)


def test_names(directory, monkeypatch):
    assert ngram.named("ngram") == (True, None)
    assert ngram.named("ngram+some/where") == (True, "some/where")
    assert ngram.named("./ngram") == (False, "./ngram")
    assert ngram.named("owner/ngram") == (False, "owner/ngram")
    with pytest.raises(ValueError, match="must name a drafter after the plus"):
        ngram.named("ngram+")
    load = lambda drafter: loading.load(
        ModelOptions(target=str(directory / "target"), drafter=drafter), GenerationOptions()
    )
    assert isinstance(load("ngram").drafter, Ngram)
    mixture = load(f"ngram+{directory / 'dflash'}").drafter
    assert isinstance(mixture, Mixture)
    assert (mixture.config.block_size, mixture.drafter.config.block_size) == (16, 5)
    with pytest.raises(ValueError, match="got nowhere"):
        load("ngram+nowhere")
    with pytest.raises(ValueError, match="needs no model. or --no-speculation"):
        load(None)
    monkeypatch.chdir(directory)
    (directory / "ngram").symlink_to(directory / "dflash")
    assert not isinstance(load("./ngram").drafter, Ngram | Mixture)


def test_a_deterministic_job_knows_its_drafter(directory):
    options = EngineOptions(deterministic=True)
    which = lambda drafter: options.fixed(GenerationOptions(), drafter)["drafter"]
    found = [which(name) for name in (None, "ngram", str(directory / "dflash"), f"ngram+{directory / 'dflash'}")]
    assert len(set(found)) == 4


def test_without_a_target_the_bundled_one_is_used():
    loaded = loading.load(ModelOptions(drafter="ngram"), GenerationOptions())
    assert isinstance(loaded.drafter, Ngram)


def test_rows_share_the_pages_of_a_common_beginning(target):
    """Proposals that carry nothing do not stand in the way."""
    plain, ngrams = (
        Engine(target, drafter, max_length=96, slots=2, prefill_chunk=32, cache_tokens=288, prefix_chunks=4)
        for drafter in (None, Ngram())
    )
    assert ngrams.batch.prefixes._table is not None
    assert ngrams.batch.prefixes.at_ends == plain.batch.prefixes.at_ends
    asked = [tiny.ask([*range(1, 41), i], 12, stop_token_ids=()) for i in range(3)]
    assert [one.token_ids for one in ngrams.generate(asked)] == [one.token_ids for one in plain.generate(asked)]
    assert ngrams.stats.prefix_tokens == plain.stats.prefix_tokens > 0
