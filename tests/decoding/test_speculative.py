"""The step: lossless for any drafter, block size and batch; caches hold what they should."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, generate, load_drafter, spec_generate
from dflash_jax.cache import commit
from dflash_jax.decoding.penalties import Penalties
from dflash_jax.decoding.proposal import Proposal, accept, make_block
from dflash_jax.decoding.sampling import Sampling, select
from dflash_jax.decoding.state import Query, RowSettings, init_state
from dflash_jax.decoding.step import speculative_step, step_functions
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.programs import begin, decode_call, prefill
from tests import tiny

PROMPTS = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [40], [7, 7, 30, 31, 2, 19, 50]]
UNPENALISED = Penalties(np.float32(1), np.float32(0), np.float32(0), np.int32(0)), np.bool_(False)
SETTINGS = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02}]


def decode(*arguments, block_size, capacity):
    program, arguments = decode_call(*arguments, Draft(block_size), EngineConfig(steps_per_visit=capacity))
    return program(*arguments)


@partial(jax.jit, static_argnames="block_size")
def one_step(target, drafter, state, block_size):
    return speculative_step(step_functions(target, drafter, block_size), state)


def start(target, drafter, prompts, max_new_tokens=100, slots=64, **settings):
    """A prefilled state, and the first tokens."""
    state, firsts = init_state(target, drafter, len(prompts), slots, 2), []
    for row, prompt in enumerate(prompts):
        chunk = np.zeros(16, np.int32)
        chunk[: len(prompt)] = prompt
        asked = RowSettings(
            np.int32(max_new_tokens),
            np.full(2, -1, np.int32),
            Sampling(
                np.float32(settings.get("temperature", 0)),
                np.int32(settings.get("top_k", 0)),
                np.float32(settings.get("top_p", 1)),
                np.float32(settings.get("min_p", 0)),
                jax.random.key(row),
            ),
            *UNPENALISED,
        )
        one = np.asarray([row]), chunk[None], np.asarray([len(prompt)]), np.asarray([True])
        state, first = prefill(target, drafter, begin(state, np.int32(row), np.int32(0)), *one, (asked,))
        firsts.append(int(first.tokens[0, 0]))
    return state, firsts


@pytest.mark.lossless
@pytest.mark.parametrize("settings", SETTINGS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("block_size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 5)), 8])
def test_speculative_equals_autoregressive(target, drafter, settings, block_size):
    plain = generate(target, PROMPTS, max_new_tokens=30, seed=4, stop_token_ids=[], **settings)
    ours = spec_generate(
        target,
        drafter,
        PROMPTS,
        max_new_tokens=30,
        seed=4,
        stop_token_ids=[],
        block_size=block_size,
        **settings,
    )
    assert ours.tokens == plain.tokens
    assert all(len(row) == 30 for row in ours.tokens)
    if block_size > 1:
        assert [1 + sum(row) for row in ours.acceptance_lengths] == [30] * len(PROMPTS)


@pytest.mark.lossless
@pytest.mark.parametrize(
    "proposals", ["coupled", *(pytest.param(x, marks=pytest.mark.slow) for x in ("argmax", "independent"))]
)
def test_proposals_never_change_the_sample(target, drafter, proposals):
    plain = generate(target, PROMPTS, max_new_tokens=24, temperature=1.0, seed=1)
    ours = spec_generate(target, drafter, PROMPTS, max_new_tokens=24, temperature=1.0, seed=1, proposals=proposals)
    assert ours.tokens == plain.tokens


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 8), pytest.param((3,), marks=pytest.mark.slow)])
def test_anchor_that_predicts_proposes_one_more(target, sizes, tmp_path):
    raw = tiny.drafter_config(sample_from_anchor=True)
    drafter = load_drafter(tiny.write_drafter(tmp_path, raw))
    assert drafter.config.proposals(8) == 8
    engine = Engine(target, drafter, max_length=64)
    assert engine.width == 9
    plain = generate(target, PROMPTS, max_new_tokens=25)
    for block_size in sizes:
        assert spec_generate(target, drafter, PROMPTS, max_new_tokens=25, block_size=block_size).tokens == plain.tokens


@pytest.mark.lossless
@pytest.mark.parametrize("block_size", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_stop_token_anywhere_in_a_block(target, drafter, block_size):
    prompt = PROMPTS[1]
    free = generate(target, prompt, max_new_tokens=20, stop_token_ids=[]).tokens[0]
    for stop in dict.fromkeys(free):
        expected = free[: free.index(stop) + 1]
        ours = spec_generate(target, drafter, prompt, max_new_tokens=20, stop_token_ids=[stop], block_size=block_size)
        assert ours.tokens == [expected]
        assert ours.finish_reasons == ["stop"]
        if block_size > 1:
            assert 1 + sum(ours.acceptance_lengths[0]) == len(expected)


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 8, 9])
def test_budget_that_ends_inside_a_block(target, drafter, budget):
    plain = generate(target, PROMPTS, max_new_tokens=budget, stop_token_ids=[])
    ours = spec_generate(target, drafter, PROMPTS, max_new_tokens=budget, stop_token_ids=[])
    assert ours.tokens == plain.tokens
    assert ours.finish_reasons == ["length"] * len(PROMPTS)


@pytest.mark.slow
def test_full_cache(target, drafter):
    """A row may fill its last slot; a longer budget is cut there, and neighbors are untouched."""
    reference = generate(target, PROMPTS, max_new_tokens=64, stop_token_ids=[], max_length=128)
    ours = spec_generate(target, drafter, PROMPTS, max_new_tokens=64, stop_token_ids=[], max_length=33)
    for prompt, row, longer in zip(PROMPTS, ours.tokens, reference.tokens, strict=True):
        assert row == longer[: 33 - len(prompt)]


def test_finished_rows_ask_for_nothing(target, drafter):
    """Noise, penalties and log-probabilities are worked out if any row asks for them; a finished one does not."""
    state, _ = start(target, drafter, PROMPTS, max_new_tokens=3, temperature=1.0)
    penalties = Penalties(*(jnp.full(4, value) for value in (1.5, 0.5, 0.5)), jnp.full(4, 2))
    state = state.replace(penalties=penalties, scored=jnp.ones(4, bool), remaining=jnp.asarray([0, 2, 0, 2], jnp.int32))
    state, _ = one_step(target, drafter, state, 4)
    assert state.sampling.temperature.tolist() == [0, 1, 0, 1]
    assert [x.tolist() for x in jax.tree.leaves(state.penalties)] == [
        [1, 1.5] * 2,
        [0, 0.5] * 2,
        [0, 0.5] * 2,
        [0, 2] * 2,
    ]
    assert state.scored.tolist() == [False, True] * 2


@pytest.mark.parametrize(
    "settings",
    [*SETTINGS[:1], *(pytest.param(more, marks=pytest.mark.slow) for more in SETTINGS[1:])],
    ids=["greedy", "sampled", "filtered"],
)
def test_gold_drafts_are_accepted_whole_and_garbage_drafts_change_nothing(target, drafter, settings):
    width = 6
    free = start(target, None, PROMPTS, **settings)[0]
    _, trace = decode(target, None, free, 30, 0, block_size=0, capacity=30)
    truth = np.asarray(trace.tokens)[:, :, 0].T  # [B, 30]
    lengths = np.array([len(prompt) for prompt in PROMPTS])

    def gold(state, choice):
        done = state.lengths - lengths
        return Proposal(jnp.take_along_axis(jnp.asarray(truth), done[:, None] + jnp.arange(width - 1)[None], axis=1))

    def garbage(state, choice):
        return Proposal((gold(state, choice).tokens + 1) % tiny.VOCAB)

    for propose, expected in ((gold, width), (garbage, 1)):
        state = start(target, drafter, PROMPTS, **settings)[0]
        step = jax.jit(partial(speculative_step, step_functions(target, drafter, width)._replace(propose=propose)))
        got = [[] for _ in PROMPTS]
        for _ in range(4):
            state, committed = step(state)
            assert committed.count.tolist() == [expected] * len(PROMPTS)
            for row, tokens in enumerate(committed.tokens.tolist()):
                got[row] += tokens[:expected]
        assert got == [row[: 4 * expected].tolist() for row in truth]


@pytest.mark.slow
def test_caches_hold_exactly_the_positions_before_the_anchor(target, drafter):
    """After any number of rounds both caches equal those of a from-scratch pass over the same tokens."""
    state, firsts = start(target, drafter, PROMPTS)
    sequences = [[*prompt, first] for prompt, first in zip(PROMPTS, firsts, strict=True)]
    for _ in range(5):
        state, committed = one_step(target, drafter, state, 8)
        for row in range(len(PROMPTS)):
            sequences[row] += committed.tokens[row, : int(committed.count[row])].tolist()
            assert int(state.lengths[row]) == len(sequences[row]) - 1
            assert int(state.anchor[row]) == sequences[row][-1]
    state = jax.tree.map(np.asarray, state.replace(sampling=None))
    for row, sequence in enumerate(sequences):
        tokens = jnp.asarray([sequence[:-1]])
        positions = jnp.arange(tokens.shape[1])[None]
        cache = target.init_cache(1, 64)
        taps = drafter.config.target_layer_ids
        forward = jax.jit(partial(target.forward, visible=None, taps=taps))
        _, features, blocks = forward(tokens, positions, cache=cache, lengths=jnp.zeros(1, jnp.int32))
        for entries, expected in (
            (state.target_cache.entries, blocks),
            (state.draft.entries, drafter.context(features, positions)),
        ):
            for entry, block in zip(entries, expected, strict=True):
                n = tokens.shape[1]
                np.testing.assert_allclose(entry.k[row, :, :n], np.asarray(block.k)[0], atol=1e-5)
                np.testing.assert_allclose(entry.v[row, :, :n], np.asarray(block.v)[0], atol=1e-5)
                assert not np.any(entry.k[row, :, n:])  # nothing after the anchor, ever


def test_draft_reads_context_strictly_before_the_anchor(target, drafter):
    state, _ = start(target, drafter, PROMPTS[1:2])
    a = int(state.lengths[0])
    base = drafter.logits(target, state.draft, Query(state.anchor, state.lengths, 8))

    def logits_with(position):
        entries = [
            e.replace(k=e.k.at[:, :, position].add(3.0), v=e.v.at[:, :, position].add(3.0)) for e in state.draft.entries
        ]
        return drafter.logits(
            target, state.draft.replace(entries=tuple(entries)), Query(state.anchor, state.lengths, 8)
        )

    np.testing.assert_array_equal(logits_with(a), base)
    assert np.abs(np.asarray(logits_with(a - 1) - base)).max() > 1e-3


def test_slot_zero_carries_the_anchor(target, drafter):
    state, _ = start(target, drafter, PROMPTS[:1])
    base = drafter.logits(target, state.draft, Query(state.anchor, state.lengths, 8))
    other = drafter.logits(target, state.draft, Query((state.anchor + 1) % 60, state.lengths, 8))
    assert base.shape == (1, 7, tiny.VOCAB)
    assert np.abs(np.asarray(base - other)).max() > 1e-3


def test_wrong_taps_change_the_draft(target, drafter):
    """Negative control: features shifted by one layer are not the same features."""
    prompt = jnp.asarray(PROMPTS[1:2])
    positions = jnp.arange(prompt.shape[1])[None]

    def context(taps):
        nothing = jnp.zeros(1, jnp.int32)
        features = target.forward(prompt, positions, None, target.init_cache(1, 32), nothing, taps=taps)[1]
        return np.asarray(drafter.context(features, positions)[0].v)

    assert np.abs(context((0, 2)) - context((1, 3))).max() > 1e-2


@pytest.mark.parametrize(
    "change", [{"final_logit_softcapping": 2.0}, {"output_multiplier": 0.3}, {"input_embedding_scale": 4.0}]
)
def test_scalings_of_the_config_are_applied(target, drafter, change, tmp_path):
    scaled = load_drafter(tiny.write_drafter(tmp_path, tiny.drafter_config(dflash_config=change)))
    state, _ = start(target, drafter, PROMPTS[:1])
    base = np.asarray(drafter.logits(target, state.draft, Query(state.anchor, state.lengths, 8)))
    ours = np.asarray(scaled.logits(target, state.draft, Query(state.anchor, state.lengths, 8)))
    if "final_logit_softcapping" in change:
        np.testing.assert_allclose(ours, 2 * np.tanh(base / 2), atol=1e-5)
    elif "output_multiplier" in change:
        np.testing.assert_allclose(ours, 0.3 * base, atol=1e-5)
    else:
        assert np.abs(ours - base).max() > 1e-3


def test_own_embedding_and_head_are_used(target, drafter, tmp_path):
    raw = tiny.drafter_config()
    tiny.write_drafter(tmp_path, raw)
    import dataclasses

    from dflash_jax.drafters import drafter_config
    from dflash_jax.drafters.dflash import DFlash

    config = dataclasses.replace(drafter_config(raw), own_embedding=True, own_head=True)
    extra = tiny.random_tensors(DFlash().tensors(config), seed=1)
    extra["embed_tokens.weight"] = np.asarray(target.params["embed_tokens"])
    extra["lm_head.weight"] = np.asarray(target.params["embed_tokens"]) * 2
    own = load_drafter(tiny.write(tmp_path, raw, extra))
    assert own.config.own_embedding
    assert own.config.own_head
    shared = {k: v for k, v in own.params.items() if k not in ("embed_tokens", "lm_head")}
    state, _ = start(target, drafter, PROMPTS[:1])
    ours = own.logits(target, state.draft, Query(state.anchor, state.lengths, 8))
    base = drafter.replace(params=shared).logits(target, state.draft, Query(state.anchor, state.lengths, 8))
    np.testing.assert_allclose(ours, 2 * base, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_whole_vocabulary_may_have_a_map(target, drafter, tmp_path):
    """SpecForge writes zeros for it; any other order is followed."""
    from safetensors.numpy import load_file

    directory, V = tiny.write_drafter(tmp_path, tiny.drafter_config(), own=True), target.config.vocab_size
    tensors = load_file(directory / "model.safetensors")
    plain = load_drafter(directory)
    load = lambda d2t: load_drafter(
        tiny.write(tmp_path, tiny.drafter_config(), tensors | {"d2t": d2t.astype(np.int64)})
    )
    unmoved = load(np.zeros(V))
    assert "d2t" not in unmoved.params
    assert unmoved.config == plain.config
    order = np.random.default_rng(0).permutation(V)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    moved = load(order - np.arange(V))
    assert moved.vocabulary.tolist() == order.tolist()
    first, second = (spec_generate(target, one, PROMPTS, max_new_tokens=20) for one in (plain, moved))
    assert first.tokens == second.tokens
    assert first.acceptance_lengths == second.acceptance_lengths
    state, _ = start(target, drafter, PROMPTS[:1])
    proposals = [one.logits(target, state.draft, Query(state.anchor, state.lengths, 8)) for one in (plain, moved)]
    np.testing.assert_allclose(proposals[0][..., order], proposals[1], rtol=1e-5, atol=1e-5)


def test_accept_counts():
    tokens = jnp.asarray([[1, 2, 3, 4]] * 5)
    proposals = Proposal(jnp.asarray([[1, 2, 3], [9, 2, 3], [1, 9, 3], [1, 2, 3], [1, 2, 3]]))
    block = make_block(jnp.zeros(5, jnp.int32), proposals)
    remaining = jnp.asarray([10, 10, 10, 2, 0])
    stops = jnp.asarray([[-1], [-1], [-1], [-1], [1]])
    accepted, left = accept(tokens, block, remaining, stops)
    assert accepted.count.tolist() == [4, 1, 2, 2, 0]
    assert left.tolist() == [6, 9, 8, 0, 0]
    accepted, left = accept(tokens, block, jnp.asarray([10] * 5), jnp.asarray([[4], [1], [3], [2], [7]]))
    assert accepted.count.tolist() == [4, 1, 2, 2, 4]
    assert left.tolist() == [0, 0, 8, 0, 6]


def test_idle_rows_commit_nothing(target, drafter):
    after, committed = one_step(target, drafter, init_state(target, drafter, 4, 64, 2), 4)
    assert committed.count.tolist() == [0, 0, 0, 0]
    assert after.lengths.tolist() == [0, 0, 0, 0]
    assert all(np.isfinite(entry.k).all() for entry in after.target_cache.entries)
    assert not any(np.any(entry.k) for entry in after.draft.entries)


def test_finished_rows_do_not_keep_attending(target, drafter):
    """A step sees no length of an idle row, so its cache may hold anything; the length stays for the next chunk."""
    state, _ = start(target, drafter, PROMPTS)
    state = state.replace(remaining=state.remaining.at[1].set(0))
    spoilt = lambda x: x.at[1].set(jnp.nan) if x.ndim == 4 else x
    state = state.replace(
        target_cache=jax.tree.map(spoilt, state.target_cache), draft=jax.tree.map(spoilt, state.draft)
    )
    after, committed = one_step(target, drafter, state, 4)
    assert after.lengths[1] == len(PROMPTS[1])
    assert committed.count[1] == 0
    assert (np.asarray(committed.count)[[0, 2, 3]] > 0).all()


def test_device_loop_leaves_when_asked(target, drafter):
    state, _ = start(target, drafter, PROMPTS, max_new_tokens=40)
    state = state.replace(remaining=jnp.asarray([3, 30, 30, 30], jnp.int32))
    state, trace = decode(target, drafter, state, 30, 4, block_size=2, capacity=30)
    steps = int((np.asarray(trace.count) > 0).any(axis=1).sum())
    assert state.remaining[0] == 0
    assert steps <= 3
    state, trace = decode(target, drafter, state, 2, 4, block_size=2, capacity=30)
    assert not np.any(trace.count)  # a row has gone already
    state, trace = decode(target, drafter, state, 2, 0, block_size=2, capacity=30)
    assert (np.asarray(trace.count) > 0).any(axis=1).sum() == 2
    state, trace = decode(target, drafter, state, 30, 0, block_size=2, capacity=30)
    assert state.remaining.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("rows", [pytest.param([1], marks=pytest.mark.slow), [3, 0]])
def test_prefill_updates_its_state_in_place(target, drafter, rows):
    """The caches of all rows lie still while some rows' prompts are read."""
    state = jax.eval_shape(lambda: init_state(target, drafter, 4, 4096, 2))
    sampling = Sampling(np.float32(0), np.int32(0), np.float32(1), np.float32(0), jax.random.key(0))
    asked = RowSettings(np.int32(9), np.full(2, -1, np.int32), sampling, *UNPENALISED)
    count = len(rows)
    given = np.asarray(rows), np.zeros((count, 16), np.int32), np.full(count, 16), np.ones(count, bool)
    memory = prefill.lower(target, drafter, state, *given, (asked,) * count).compile().memory_analysis()
    assert memory.temp_size_in_bytes < int(np.prod(state.target_cache.entries[0].k.shape)) * 4


def test_a_decode_program_updates_its_state_in_place(target, drafter):
    """The donated caches are aliased, and no temporary is as large as one of them."""
    slots = 4096
    state = jax.eval_shape(lambda: init_state(target, drafter, 2, slots, 2))
    run = jax.jit(
        lambda t, d, s: jax.lax.fori_loop(0, 3, lambda _, x: speculative_step(step_functions(t, d, 8), x)[0], s),
        donate_argnums=2,
    )
    memory = run.lower(target, drafter, state).compile().memory_analysis()
    entry = state.target_cache.entries[0].k
    one = int(np.prod(entry.shape)) * 4
    caches = 2 * one * (len(state.target_cache.entries) + len(state.draft.entries))
    assert memory.alias_size_in_bytes >= caches
    assert memory.temp_size_in_bytes < one


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads a CPU program")
def test_rotary_tables_are_evaluated_once_a_pass(target):
    cache = target.init_cache(1, 64)
    tokens = jnp.zeros((1, 4), jnp.int32)
    text = (
        jax.jit(lambda t, c, n: t.forward(tokens, n[:, None] + jnp.arange(4)[None], None, c, n))
        .lower(target, cache, jnp.zeros(1, jnp.int32))
        .compile()
        .as_text()
    )
    assert text.count(" cosine(") == text.count(" sine(") == 1


def test_nothing_compiles_once_warm(target, drafter):
    engine = Engine(target, drafter, slots=2, max_length=96, prefill_chunk=32)
    engine.warm_up()
    compiled = []
    listener = lambda event, duration, **_: compiled.append(event)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        engine.generate([tiny.ask(p, 20 + 3 * i, temperature=i * 0.3, top_k=i) for i, p in enumerate(PROMPTS)])
        engine.generate([tiny.ask(list(range(1, 60)), 9, stop_token_ids=(3, 4), find_stop=lambda tokens, new: None)])
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert [event for event in compiled if "compile" in event or "trac" in event] == []


def test_committing_a_path_gathers_it(target):
    """A tree's accepted path lands in order."""
    cache = target.init_cache(2, 16)
    tokens = jnp.asarray([[1, 2, 3, 4], [5, 6, 7, 8]])
    positions = jnp.broadcast_to(jnp.arange(4)[None], (2, 4))
    lengths = jnp.zeros(2, jnp.int32)
    blocks = target.forward(tokens, positions, None, cache, lengths)[2]
    path = jnp.asarray([[0, 2, 3], [0, 1, 1]])
    after = commit(cache, blocks, lengths, jnp.asarray([3, 2]), path=path)
    np.testing.assert_array_equal(after.entries[1].k[0, :, :3], blocks[1].k[0][:, np.array([0, 2, 3])])
    np.testing.assert_array_equal(after.entries[1].v[1, :, :2], blocks[1].v[1][:, :2])
    assert not np.any(after.entries[1].k[1, :, 2:])


def test_select_is_deterministic_per_position():
    """The choice depends on key, position and logits, not on the row or slot they stand in."""
    from dflash_jax.decoding.sampling import gumbel_noise

    logits = jax.random.normal(jax.random.key(0), (2, 3, 50))
    keys = jax.random.split(jax.random.key(1), 2)
    sampling = Sampling(jnp.full(2, 0.9), jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2), keys)
    positions = jnp.asarray([[4, 5, 6], [9, 10, 11]])
    both = select(logits, gumbel_noise(sampling, positions, 50), sampling)
    alone = jax.tree.map(lambda x: x[1:], sampling)
    last = select(logits[1:, 2:], gumbel_noise(alone, positions[1:, 2:], 50), alone)
    assert both[1, 2] == last[0, 0]
