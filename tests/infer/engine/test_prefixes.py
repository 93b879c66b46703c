"""Prompts that begin alike: a copied chunk is the one that was computed, bit for bit."""

import jax
import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.infer.engine import prefixes
from dflash_jax.infer.engine.prefixes import PrefixCache, chain, shared_chunks, within
from tests import tiny

HEAD = [(5 * i + 3) % 60 for i in range(24)]


def requests():
    """Prompts that share one, two or three chunks of 8, one that ends on a chunk, and a stranger."""
    tails = [[7, 7], [1, 2, 3], [], [9] * 20, [4]]
    prompts = [HEAD[: 24 - 4 * i] + tail for i, tail in enumerate(tails)] + [[50] * 17, HEAD + HEAD]
    return [tiny.ask(prompt, 14, temperature=0.5 * (i % 2), id=f"r{i}") for i, prompt in enumerate(prompts)]


def outcome(completions):
    return [(done.token_ids, done.acceptance_lengths) for done in completions]


@pytest.mark.parametrize(
    ("entries", "windowed"),
    [(16, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (1, 16))],
)
def test_a_hit_changes_neither_tokens_nor_acceptance(target, drafter, tmp_path, entries, windowed):
    if windowed:  # its ring holds less than a chunk
        raw = tiny.drafter_config(
            layer_types=["sliding_attention", "full_attention"], sliding_window=6, use_sliding_window=True
        )
        drafter = load_drafter(tiny.write_drafter(tmp_path, raw))
    plain = Engine(target, drafter, slots=1, max_length=96, prefill_chunk=8)
    expected = outcome(plain.generate(requests()))
    engine = Engine(target, drafter, slots=3, max_length=96, prefill_chunk=8, prefix_chunks=entries)
    for _ in range(2):
        assert outcome(engine.generate(requests())) == expected
    assert engine.stats.prompt_tokens == 2 * sum(len(request.prompt_token_ids) for request in requests())
    if entries == 16:
        assert engine.stats.prefix_tokens > engine.stats.prompt_tokens / 2
    assert plain.stats.prefix_tokens == 0


@pytest.mark.slow
def test_copied_slots_hold_the_same_bits(target, drafter):
    engine = Engine(target, drafter, slots=2, max_length=64, prefill_chunk=8, prefix_chunks=4)
    for last in (1, 2):
        engine.submit(tiny.ask([*HEAD, last], 1))  # a slot keeps what it holds after its request is done
    while engine.busy or engine.waiting:
        engine.step()
    assert engine.stats.prefix_tokens >= 16
    for cache in (engine.batch.state.target_cache, engine.batch.state.draft):
        for entry in cache.entries:
            for x in (entry.k, entry.v):
                np.testing.assert_array_equal(x[0, :, : len(HEAD)], x[1, :, : len(HEAD)])
    np.testing.assert_array_equal(engine.batch.state.history.tokens[0, :24], engine.batch.state.history.tokens[1, :24])


def test_penalties_see_a_copied_prompt(target):
    given = {"repetition_penalty": 1.5, "max_new_tokens": 10}
    ask = [tiny.ask([*HEAD, 1], **given), tiny.ask([*HEAD, 1, 2], **given)]
    expected = outcome(Engine(target, None, max_length=64, prefill_chunk=8).generate(ask))
    assert outcome(Engine(target, None, max_length=64, prefill_chunk=8, prefix_chunks=4).generate(ask)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kept", [4, 0])
def test_nothing_is_compiled_after_the_start(target, drafter, kept):
    given = {"prefill_chunk": 8, "prefix_chunks": kept, "block_size": "auto", "tree": 0}
    engine = Engine(target, drafter, slots=2, max_length=96 + kept, **given)  # no program is that of another case
    compiled = []
    listen = lambda event, _, fun_name="", **__: compiled.append(fun_name) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    engine.warm_up()
    # Chunks of one prompt and of two, three block sizes, a row's beginning and end; copies to and fro.
    expected = {"prefill": 2, "decode": 3, "begin": 1, "release": 1} | ({"keep": 1, "restore": 1} if kept else {})
    assert {name: compiled.count(f"jit({name})") for name in expected} == expected
    assert engine.programs() == sum(expected.values())
    compiled.clear()
    engine.generate(requests())
    assert not compiled
    jax.jit(lambda x: x + len(HEAD))(1.0)
    assert compiled


def test_the_chunk_unused_for_longest_makes_room(target):
    state = Engine(target, None, slots=1, max_length=32, prefill_chunk=4).batch.state
    cache = PrefixCache(state, 2, 4)
    a, b, c = (chain([token] * 4, 4) for token in (1, 2, 3))
    for keys in (a, b, a, c):
        cache.keep(state, cache.index.keep(0, 4, keys))
    assert [cache.index.chunks.find(keys[0]) is not None for keys in (a, b, c)] == [True, False, True]


def test_states_take_no_more_memory_than_the_chunks_would():
    assert within(100, 16, 0, 256) == (100, 0)
    chunks, states = within(256, 16, 144, 256)
    assert (chunks, states) == (121, 15)
    assert 121 * 16 + 15 * 144 <= 256 * 16
    assert within(3, 16, 144, 256) == (0, 0)  # not even one


def test_keys_are_of_a_chunk_and_all_before_it():
    assert chain(HEAD, 8)[:2] == chain(HEAD[:20], 8)
    assert chain([0, *HEAD[1:]], 8)[2] != chain(HEAD, 8)[2]
    assert shared_chunks([HEAD, HEAD, [50] * 17], 8) == 2
    assert shared_chunks([[*HEAD, 1], [*HEAD, 2], HEAD[:9]], 8) == 3


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A target of which half of the layers have recurrent states, and a drafter."""
    directory, raw = tmp_path_factory.mktemp("hybrid"), tiny.target_config(model_type="qwen3_5")
    target = load_target(tiny.write_target(directory / "target", raw | tiny.FAMILIES["qwen3_5"]))
    return target, load_drafter(tiny.write_drafter(directory / "drafter", tiny.drafter_config()))


@pytest.mark.slow
@pytest.mark.lossless
def test_prompts_of_a_recurrent_target_that_begin_alike(hybrid, monkeypatch):
    monkeypatch.setattr(prefixes, "STATE_EVERY", 16)
    plain = Engine(*hybrid, slots=1, max_length=96, prefill_chunk=8)
    expected = outcome(plain.generate(requests()))
    engine = Engine(*hybrid, slots=3, max_length=96, prefill_chunk=8, prefix_chunks=64)
    for _ in range(2):
        assert outcome(engine.generate(requests())) == expected
    assert engine.stats.prefix_tokens > engine.stats.prompt_tokens / 3


def test_states_are_kept_where_prompts_end_and_part(hybrid, monkeypatch):
    monkeypatch.setattr(prefixes, "STATE_EVERY", 16)
    engine = Engine(*hybrid, slots=1, max_length=96, prefill_chunk=8, prefix_chunks=64)

    def copied(prompt):
        before = engine.stats.prefix_tokens
        engine.generate([tiny.ask(prompt, 1)])
        return engine.stats.prefix_tokens - before

    assert copied([*HEAD, 1]) == 0
    assert copied([*HEAD, 1]) == 24  # where that prompt's whole chunks end
    assert copied([*HEAD[:8], *range(9), 1]) == 0  # parts from it where no state was kept,
    assert copied([*HEAD[:8], *range(30, 39)]) == 8  # and now one is
    assert copied([*HEAD[:16], *range(9)]) == 16  # one is kept every 16 tokens
    together = Engine(*hybrid, slots=3, max_length=96, prefill_chunk=8, prefix_chunks=64)
    together.generate([tiny.ask([*HEAD[:8], *[token] * 20], 1) for token in range(3)])
    assert together.stats.prefix_tokens == 16  # two wait for what the third reads
