"""Targets of every family in an engine, with everything at once that an engine does to a row's state: prompts in
chunks, in copies of other prompts' chunks and in several samples, slots that are canceled and used again, memory that
rows share, trees, a verification budget."""

import pytest

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.cache import pages
from dflash_jax.infer.engine import prefixes
from tests import tiny

ALIASES = [name for name in tiny.FAMILIES if name.endswith("_text")]
DAILY = {"qwen3_5"}  # it has states beside caches of positions
SLOW = {"gemma4", "gpt_oss", "kimi_k25", "qwen3_moe", "qwen3_next"}
FAMILIES = [
    pytest.param(name, marks=() if name in DAILY else pytest.mark.slow if name in SLOW else pytest.mark.exhaustive)
    for name in tiny.FAMILIES
    if name not in ALIASES
]
HEAD = [(5 * i + 3) % 60 for i in range(24)]


def pair(directory, family):
    raw = tiny.target_config(model_type=family) | tiny.FAMILIES[family]
    raw.pop("quantization_config", None)
    target = load_target(tiny.write_target(directory / "target", raw))
    return target, load_drafter(tiny.write_drafter(directory / "drafter", tiny.drafter_config()))


def requests(count):
    """Two samples each of prompts of which most begin alike."""
    asked = []
    for i in range(count):
        prompt = [*HEAD[: 24 - 4 * (i % 4)], i, 7] if i % 5 != 4 else [50 - i] * (3 + i)
        given = {"temperature": 0.6 * (i % 3), "repetition_penalty": 1.0 + 0.2 * (i % 2), "stop_token_ids": ()}
        asked += [tiny.ask(prompt, 8 + 5 * (i % 4), sample=n, id=f"{i}", **given) for n in range(2)]
    return asked


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"tree": 12}, marks=pytest.mark.slow),
        {"tree": 12, "cache_tokens": 96, "verify_budget": 3, "prefill_budget": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_answers_are_those_of_one_row_alone(family, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(prefixes, "STATE_EVERY", 16)
    monkeypatch.setattr(pages, "PAGE", 16)
    target, drafter = pair(tmp_path, family)
    alone = Engine(target, None, slots=1, max_length=64, prefill_chunk=32)
    expected = [done.token_ids for done in alone.generate(requests(7))]
    engine = Engine(
        target, drafter, slots=3, max_length=64, prefill_chunk=8, prefix_chunks=64, steps_per_visit=1, **settings
    )
    for stopped in (3, 1):
        tickets = [engine.submit(request) for request in requests(7)]
        done, left = {}, set(tickets[::stopped]) if stopped > 1 else set()
        while engine.busy or engine.waiting:
            done |= dict(engine.step())
            for ticket in [t for t in left if t in done and not done[t].finish_reason]:  # on its way
                engine.cancel(ticket)
                left.discard(ticket)
        for ticket, tokens in zip(tickets, expected, strict=True):
            got = done[ticket]
            assert got.token_ids == (tokens if got.finish_reason == "length" else tokens[: len(got.token_ids)])
        cut = sum(done[ticket].finish_reason != "length" for ticket in tickets)
        assert 1 < cut <= 5 if stopped > 1 else not cut
    assert engine.stats.prefix_tokens > 0
    assert engine.stats.tau > 1
    assert (engine.stats.beside_tokens > 0) == ("prefill_budget" in settings)
    if "cache_tokens" in settings:
        assert engine.stats.preempted > 0
        assert engine.batch.pages.free == engine.batch.pages.tokens == 96
