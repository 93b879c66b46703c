"""What families, drafters and trees to come rest on, shown with fakes that touch no code of decoding or engine."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, checkpoint, load_drafter, load_target, models
from dflash_jax.benchmarks import planning
from dflash_jax.cache import KV
from dflash_jax.decoding.penalties import Penalties
from dflash_jax.decoding.proposal import Proposal, make_tree
from dflash_jax.decoding.sampling import Sampling
from dflash_jax.decoding.state import RowSettings, init_state
from dflash_jax.decoding.step import make_choose, run, speculative_step, step_functions
from dflash_jax.infer.engine.programs import begin, prefill
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny
from tests.fakes import family
from tests.fakes.drafters import BigramDrafter, random_tree

RAW = tiny.target_config(model_type="toy", architectures=["Toy"])
PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [40], [7, 7, 30, 31, 2, 19, 50]]


@pytest.fixture(scope="module", autouse=True)
def registered():
    models.register("toy", family)
    yield
    del models.FAMILIES["toy"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The toy family's checkpoint, and a drafter for it."""
    directory, rng = tmp_path_factory.mktemp("toy"), np.random.default_rng(0)
    tensors = {}
    for _, leaf in checkpoint.leaves(family.tensors(family.config(RAW))):
        for part in leaf.parts:
            shape = part.source.shape
            x = rng.standard_normal(shape).astype(np.float32) / max(1, shape[-1]) ** 0.5
            if "norm" in str(part.source):
                x = 1 + 0.2 * x
            if leaf.dtype == "int8":
                x = rng.integers(-127, 128, shape).astype(np.int8)
            if "out.scale" in str(part.source):
                x = (1 + rng.random(shape)).astype(np.float32) / 400
            tensors |= part.source.write(x)
    tiny.write(directory / "target", RAW, tensors)
    tiny.write_drafter(directory / "drafter", tiny.drafter_config())
    return directory


@pytest.fixture(scope="module")
def toy(directory):
    return load_target(directory / "target")


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    raw = tiny.target_config(model_type="gemma4", **tiny.FAMILIES["gemma4"])
    return load_target(tiny.write_target(tmp_path_factory.mktemp("gemma4"), raw))


@pytest.fixture(scope="module")
def drafter(directory):
    return load_drafter(directory / "drafter")


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    """A target with latent attention."""
    raw = tiny.target_config(model_type="deepseek_v3", **tiny.FAMILIES["deepseek_v3"])
    return load_target(tiny.write_target(tmp_path_factory.mktemp("latent"), raw))


def requests():
    """Penalties, temperatures and prompts that begin alike."""
    head = [(7 * i + 3) % 60 for i in range(20)]
    prompts = [*PROMPTS, [*head, 1], [*head, 2, 3], [*head[:8], 9]]
    given = {"repetition_penalty": 1.2, "presence_penalty": 0.4}
    return [tiny.ask(p, 16, 0.5 * (i % 3), id=str(i), **(given if i % 2 else {})) for i, p in enumerate(prompts)]


def answers(target, drafter=None, **settings):
    engine = Engine(target, drafter, max_length=64, **settings)
    return [done.token_ids for done in engine.generate(requests())], engine


@pytest.fixture(scope="module")
def plain(toy):
    return answers(toy)[0]


# ------------------------------------------------------------------------------------------------
# A family of another kind


def test_entries_follow_the_layers(toy):
    cache = toy.init_cache(2, 64)
    kinds = [type(entry) for entry in cache.entries]
    assert kinds == [KV, family.Recurrent, KV]
    assert cache.of_layer == (0, 1, 2, 2)
    assert [entry.k.shape for entry in cache.entries if isinstance(entry, KV)] == [(2, 2, 5, 16), (2, 1, 64, 32)]


def test_chunks_give_the_logits_of_one_pass(toy):
    tokens = jnp.asarray([PROMPTS[1]])
    positions = jnp.arange(13)[None]
    forward = jax.jit(partial(toy.forward, visible=None, taps=(0, 2)))
    hidden, features, _ = forward(tokens, positions, cache=toy.init_cache(1, 32), lengths=jnp.asarray([0]))
    cache, parts, at = toy.init_cache(1, 32), [], 0
    for size in (5, 1, 7):
        lengths, piece = jnp.asarray([at]), slice(at, at + size)
        out = forward(tokens[:, piece], positions[:, piece], cache=cache, lengths=lengths)
        from dflash_jax.cache import commit

        cache, at = commit(cache, out[2], lengths, jnp.asarray([size])), at + size
        parts.append(out[:2])
    np.testing.assert_allclose(jnp.concatenate([p[0] for p in parts], axis=1), hidden, atol=1e-5)
    np.testing.assert_allclose(jnp.concatenate([p[1] for p in parts], axis=1), features, atol=1e-5)


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"slots": 1}, marks=pytest.mark.slow),
        pytest.param({"slots": 3, "prefill_chunk": 7}, marks=pytest.mark.slow),
        # Rows decode between the chunks of another's prompt.
        pytest.param({"slots": 2, "prefill_chunk": 4, "steps_per_visit": 1}, marks=pytest.mark.slow),
        {"slots": 2, "prefill_chunk": 4, "prefix_chunks": 8},
        pytest.param({"slots": 2, "block_size": 3}, marks=pytest.mark.slow),
        pytest.param({"slots": 3, "prefill_chunk": 4, "cache_tokens": 128}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_speculation_chunks_slots_and_prefixes_change_nothing(toy, drafter, plain, settings):
    got, engine = answers(toy, drafter, **settings)
    assert got == plain
    if settings.get("prefix_chunks"):
        assert engine.stats.prefix_tokens > 0


@pytest.mark.lossless
@pytest.mark.parametrize("axes", [pytest.param("model=2", marks=pytest.mark.slow), "data=2,model=2"])
def test_a_mesh_changes_nothing(directory, plain, axes):
    count = 4 if "data" in axes else 2
    mesh = make_mesh(parse_mesh(axes, jax.devices()[:count]), jax.devices()[:count])
    target = load_target(directory / "target", mesh=mesh)
    assert answers(target, load_drafter(directory / "drafter", mesh=mesh), slots=2)[0] == plain
    # Without the engine, and with no mesh set: a target enters its own.
    tokens, positions = jnp.asarray([[1, 2, 3]]), jnp.arange(3)[None]
    alone = load_target(directory / "target")
    for t in (jax.jit(lambda t: t.forward(tokens, positions, None, t.init_cache(1, 16))[0]),):
        np.testing.assert_allclose(t(target), t(alone), atol=1e-5)


@pytest.mark.slow
def test_it_is_planned():
    sizes = {"data": 1, "fsdp": 1, "model": 2}
    figures = planning.traced((RAW, tiny.drafter_config()), sizes, 2, 64, None)
    assert figures["weight_bytes"] > 0
    assert figures["flops"] > 0
    mesh = make_mesh(parse_mesh("model=2", jax.devices()[:2]), jax.devices()[:2])
    compiled = planning.compile_step((RAW, tiny.drafter_config()), mesh, 2, 64)
    assert planning.measured(compiled)["updated_in_place_bytes"] >= figures["cache_bytes"] * 0.9


def test_a_checkpoint_comes_back(directory, toy, tmp_path):
    """Strided, transposed, permuted, scaled and small numbers: loaded, saved, and loaded again, whole and in shards."""
    table = family.tensors(toy.config)
    checkpoint.save(tmp_path, toy.params, table, RAW)
    again = load_target(tmp_path)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), toy.params, again.params)
    stored = checkpoint.Reader(directory / "target")
    small, scale = (stored.read(f"model.layers.1.mix.in.{x}", (slice(None), slice(None))) for x in ("weight", "scale"))
    matrix = small.astype(np.float32) * np.repeat(np.repeat(scale, 8, axis=0), 16, axis=1)
    in_order = np.concatenate([matrix[:, 1::2].T, matrix[:, ::2].T])
    np.testing.assert_allclose(toy.params["layers_1"]["mix"]["in_proj"]["weight"], in_order)
    split = load_target(directory / "target", mesh=make_mesh(parse_mesh("model=2,fsdp=4"))).params["layers_1"]
    for name in ("in_proj", "out_proj"):
        whole = toy.params["layers_1"]["mix"][name]["weight"]
        jax.tree.map(np.testing.assert_array_equal, whole, split["mix"][name]["weight"])


def test_a_slice_that_cannot_be_honoured_raises(directory):
    from dflash_jax.checkpoint import Leaf, Part, Stored
    from dflash_jax.checkpoint.reader import assemble

    source = Stored("x", (4, 6))
    with pytest.raises(ValueError, match="without a step"):
        Leaf((4, 3), (Part(source, (slice(0, 4), slice(0, 6, 2))),))
    with pytest.raises(ValueError, match="fill 12 places"):
        Leaf((4, 6), (Part(source, (slice(0, 4), slice(0, 3)), (slice(None), slice(0, 3))),))
    with pytest.raises(ValueError, match="has no"):
        Leaf((4, 2), (Part(source, (slice(0, 4), slice(0, 2)), (slice(None), (5, 6))),))
    half = Part(source, (slice(0, 4), slice(0, 3)), (slice(None), slice(0, 3)))
    with pytest.raises(ValueError, match="overlap"):
        Leaf((4, 6), (half, half))
    with pytest.raises(ValueError, match="overlap"):
        Leaf((2, 6), (Part(source, (1, slice(0, 6)), (0,)), Part(source, (-1, slice(0, 6)), (1,))))
    whole = Leaf((4, 6), (Part(source, (slice(0, 4), slice(0, 6))),))
    with pytest.raises(ValueError, match="must not have a step"):
        assemble(checkpoint.Reader(directory / "target"), whole, (slice(0, 4, 2), slice(None)), np.float32)


# ------------------------------------------------------------------------------------------------
# Other drafters


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"slots": 2, "prefill_chunk": 4}, marks=pytest.mark.slow),
        pytest.param({"slots": 2, "prefill_chunk": 4, "prefix_chunks": 8}, marks=pytest.mark.slow),
        pytest.param({"slots": 3, "prefill_chunk": 4, "cache_tokens": 128, "forked": True}, marks=pytest.mark.slow),
        pytest.param({"slots": 2, "prefix_chunks": 8, "block_size": "auto", "forked": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_drafter_whose_state_is_no_cache(toy, plain, settings):
    bigrams = BigramDrafter(toy.config.vocab_size, forked=settings.pop("forked", False))
    got, engine = answers(toy, bigrams, **settings)
    assert got == plain
    if settings.get("block_size") == "auto":  # measured times decide here, and may find that no proposal pays: take all
        for chooser in engine.choosers.values():
            turns = itertools.cycle(chooser.candidates)
            chooser.choose = lambda rows, turns=turns: list(rows) and next(turns)
        assert [done.token_ids for done in engine.generate(requests())] == plain
        assert min(engine.steps_by_block_size.values()) > 0
    assert engine.stats.tau > 1  # and at times it is right


@pytest.mark.slow
@pytest.mark.lossless
def test_a_foreign_drafter_on_a_mesh(directory, plain):
    mesh = make_mesh(parse_mesh("data=2,model=2", jax.devices()[:4]), jax.devices()[:4])
    target = load_target(directory / "target", mesh=mesh)
    assert answers(target, BigramDrafter(64, forked=True), slots=2)[0] == plain


def test_its_state_follows_what_was_accepted(toy):
    bigrams = BigramDrafter(toy.config.vocab_size)
    engine = Engine(toy, bigrams, max_length=64, prefill_chunk=4)
    (done,) = engine.generate([tiny.ask([5, 9, 11, 5, 9], 20)])
    sequence = [5, 9, 11, 5, 9, *done.token_ids]
    expected = np.zeros(64, int)
    for token, following in itertools.pairwise(sequence[:-1]):  # the anchor is in no state
        expected[token] = following
    np.testing.assert_array_equal(engine.batch.state.draft.table[0], expected)


# ------------------------------------------------------------------------------------------------
# Trees

WIDTH = 48  # tokens of the truth
SETTINGS = {"greedy": (0.0, 1.0, 0.0), "warm": (0.7, 1.3, 0.3), "hot": (1.2, 1.1, 0.5)}


def started(target, drafter, temperature=0.0, repetition=1.0, presence=0.0):
    state = init_state(target, drafter, len(PROMPTS), 96, 2, 16)
    for row, prompt in enumerate(PROMPTS):
        sampling = Sampling(np.float32(temperature), np.int32(0), np.float32(1), np.float32(0), jax.random.key(row))
        penalties = Penalties(np.float32(repetition), np.float32(presence), np.float32(0), np.int32(0))
        settings = RowSettings(np.int32(WIDTH), np.full(2, -1, np.int32), sampling, penalties, np.bool_(False))
        chunk = np.zeros(16, np.int32)
        chunk[: len(prompt)] = prompt
        one = np.asarray([row]), chunk[None], np.asarray([len(prompt)]), np.asarray([True])
        state, _ = prefill(target, drafter, begin(state, np.int32(row), np.int32(0)), *one, (settings,))
    return state


def rollout(target, drafter, parts, state, steps):
    """Tokens of every row, and how many each step committed."""
    step = partial(speculative_step, parts)
    state, trace = jax.jit(lambda s: run(step, s, jnp.int32(steps), jnp.int32(0), steps))(state)
    tokens, counts = np.asarray(trace.tokens), np.asarray(trace.count)
    rows = [[t for i in range(steps) for t in tokens[i, r, : counts[i, r]].tolist()] for r in range(len(PROMPTS))]
    return rows, counts, state


@pytest.mark.lossless
@pytest.mark.parametrize(
    "which", [pytest.param(each, marks=pytest.mark.slow) for each in ("target", "toy", "latent", "gemma4")]
)
@pytest.mark.parametrize(
    "how", ["warm", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("hot", "greedy"))]
)
def test_random_trees_equal_autoregressive_decoding(request, drafter, which, how):
    target = request.getfixturevalue(which)
    plain, _, _ = rollout(
        target, None, step_functions(target, None, 0), started(target, None, *SETTINGS[how]), WIDTH - 1
    )
    truth, lengths = jnp.asarray(plain), jnp.asarray([len(prompt) for prompt in PROMPTS])
    depth, nodes = 5, 14

    def propose(state, choice):
        done = (state.lengths - lengths)[:, None] + jnp.arange(depth)[None]
        following = jnp.take_along_axis(truth, jnp.minimum(done, WIDTH - 2), axis=1)
        return random_tree(jax.random.fold_in(jax.random.key(3), jnp.sum(state.lengths)), following, nodes, depth, 64)

    parts = step_functions(target, drafter, 8)._replace(propose=propose, choose=make_choose(target, depth))
    got, counts, _ = rollout(target, drafter, parts, started(target, drafter, *SETTINGS[how]), WIDTH - 1)
    assert got == plain
    assert counts.max() > 3
    assert (counts.sum(axis=0) == WIDTH - 1).all()


@pytest.mark.lossless
@pytest.mark.parametrize("which", ["qwen3", pytest.param("toy", marks=pytest.mark.slow)])
def test_a_tree_of_rank_one_equals_the_chain_bit_for_bit(target, toy, drafter, which):
    target = target if which == "qwen3" else toy
    chain = step_functions(target, drafter, 6, "coupled")  # calibrating would be another program

    def propose(state, choice):
        tokens = chain.propose(state, choice).tokens
        parents = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        return Proposal(tokens, parents, tokens.shape[1])

    outcomes = []
    for parts in (chain, chain._replace(propose=propose)):
        outcomes.append(rollout(target, drafter, parts, started(target, drafter, 0.7, 1.3, 0.3), 12))
    (tokens, counts, state), (tree_tokens, tree_counts, tree_state) = outcomes
    assert tokens == tree_tokens
    np.testing.assert_array_equal(counts, tree_counts)
    bits = lambda s: jax.tree.leaves((s.target_cache, s.draft, s.lengths, s.anchor, s.history))
    for a, b in zip(bits(state), bits(tree_state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_proposal_that_is_deeper_than_its_drafter_said_is_refused(target, drafter):
    parts, state = step_functions(target, drafter, 4), started(target, drafter)
    deep = lambda state, choice: Proposal(jnp.zeros((len(PROMPTS), 5), jnp.int32))
    with pytest.raises(ValueError, match="may be 3 nodes deep, .* this one is 5"):
        jax.eval_shape(partial(speculative_step, parts._replace(propose=deep)), state)


@pytest.mark.lossless
def test_a_path_that_is_longer_than_the_tree_was_said_to_be_is_cut(target, drafter):
    chain = step_functions(target, drafter, 6, "coupled")

    def propose(state, choice):
        tokens = chain.propose(state, choice).tokens
        parents = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
        return Proposal(tokens, parents, 2)

    state = lambda: started(target, drafter, 3.0)
    expected, _, _ = rollout(target, None, step_functions(target, None, 0), started(target, None, 3.0), 40)
    got, counts, _ = rollout(target, drafter, chain._replace(propose=propose), state(), 12)
    assert counts.max() == 3
    assert [row[: len(ours)] for row, ours in zip(expected, got, strict=True)] == got


def test_relations_of_a_tree():
    parents = jnp.asarray([[0, 1, 1, 0, 4, 5]])
    tree = make_tree(Proposal(jnp.zeros((1, 6), jnp.int32), parents, 3))
    assert tree.depth[0].tolist() == [0, 1, 2, 2, 1, 2, 3]
    ancestors = [[j for j in range(7) if tree.ancestors[0, i, j]] for i in range(7)]
    assert ancestors == [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 4], [0, 4, 5], [0, 4, 5, 6]]
