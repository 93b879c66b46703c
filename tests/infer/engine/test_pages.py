"""Rows in pages: answers are those of rows that have room of their own, whatever is given back and read again."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.cache import Pages, pages, size_in_bytes
from dflash_jax.constraints.constraint import regex
from dflash_jax.decoding import copying
from dflash_jax.drafters.ngram import Mixture
from dflash_jax.infer.engine.memory import tokens_worth_sharing
from dflash_jax.infer.engine.pages import PageTable
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny
from tests.fakes import vocabulary

PAGE = 16
LENGTH = 6 * PAGE
SETTINGS = {"slots": 4, "max_length": LENGTH, "steps_per_visit": 4, "prefill_chunk": 32}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(pages, "PAGE", PAGE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vocabulary.write_models(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


def requests(count=12, **given):
    """Prompts and answers of many lengths, greedy and sampled, some with penalties, some with a constraint."""
    rng, asked = random.Random(0), []
    for i in range(count):
        prompt = [rng.randrange(1, 60) for _ in range(rng.choice([3, PAGE - 1, PAGE, 40]))]
        more = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "min_tokens": 6} if i % 3 == 2 else {}
        more["eos_token_ids"] = (vocabulary.END,)
        if i % 4 == 1:
            more["constraint"] = regex("([a-f]{3}-){6,9}x")
        new = rng.choice([6, 30, LENGTH - 41])
        asked.append(tiny.ask(prompt, new, 1.3 * (i % 2), id=str(i), **more, **given))
    return asked


def outcome(done):
    return [(one.token_ids, one.finish_reason) for one in done]


@pytest.fixture(scope="module")
def plain(target):
    return outcome(Engine(target, None, constraints=True, **SETTINGS).generate(requests()))


def check(engine):
    """Each page is free, or has as many users as rows and the index say; none that is shared can be written to."""
    table, users = engine.batch.pages, Counter[int]()
    for row, held in enumerate(table._held):
        users.update(table.table[row, :held].tolist())
    users.update(page for pages in engine.batch.prefixes._pages.values() for page in pages)
    free = [page for of_part in table._free for page in of_part]
    assert len(free) == len({*free})
    assert {page: count for page, count in enumerate(table._users.tolist()) if count} == users
    assert not users.keys() & {*free}
    for slot, row in engine._admission.taken:
        written = row.filled + len(row.completion.token_ids) - row.read
        following = table.table[slot, written // PAGE : table._held[slot]].tolist()
        assert all(users[page] == 1 for page in following)


def generated(engine, asked):
    """Completions; what must hold does after every step."""
    tickets, done = [engine.submit(request) for request in asked], {}
    while engine.busy or engine.waiting:
        done |= dict(engine.step())
        if engine.batch.pages is not None:
            check(engine)
    found = [done[ticket] for ticket in tickets]
    assert all(one.cached_tokens <= one.prompt_tokens for one in found)
    return found


def all_free(engine, tokens):
    table = engine.batch.pages
    assert table.available == table.tokens == tokens
    check(engine)
    assert not any(table._held)


@pytest.mark.lossless
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("dflash", {"tree": 9}),
        pytest.param("dflash", {}, marks=pytest.mark.slow),
        pytest.param("dflash", {"prefix_chunks": 6}, marks=pytest.mark.slow),
        pytest.param("dflash", {"block_size": "auto"}, marks=pytest.mark.slow),
        pytest.param("dflash", {"slots": 16, "cache_tokens": 2 * LENGTH}, marks=pytest.mark.slow),  # narrower programs
        *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in tiny.kinds() if kind != "dflash"),
    ],
    ids=str,
)
def test_answers_are_those_of_plain_decoding(kind, given, directory, target, plain):
    """With memory for less than half of what all rows may need."""
    drafter = load_drafter(directory / kind, num_target_layers=4)
    settings = {"constraints": True, "cache_tokens": LENGTH + PAGE} | SETTINGS | given
    engine = Engine(target, drafter, **settings)
    assert outcome(generated(engine, requests())) == plain
    assert engine.stats.preempted > 0
    all_free(engine, settings["cache_tokens"])


@pytest.mark.lossless
@pytest.mark.slow
@pytest.mark.parametrize("axes", ["data=2", "data=2,model=2"])
def test_a_mesh_splits_pages_as_it_splits_rows(axes, directory, plain):
    devices = jax.devices()[: 2 if axes == "data=2" else 4]
    mesh = make_mesh(parse_mesh(axes, devices), devices)
    target = load_target(directory / "target", mesh=mesh)
    drafter = load_drafter(directory / "dflash", mesh=mesh, num_target_layers=4)
    engine = Engine(target, drafter, constraints=True, cache_tokens=2 * LENGTH, prefix_chunks=4, **SETTINGS)
    tickets, done, most = [engine.submit(request) for request in requests()], {}, [0, 0]
    while engine.busy or engine.waiting:
        done |= dict(engine.step())
        busy = [slot for slot, _ in engine._admission.taken]
        most = [max(most[0], sum(slot < 2 for slot in busy)), max(most[1], sum(slot >= 2 for slot in busy))]
    assert outcome([done[ticket] for ticket in tickets]) == plain
    assert engine.stats.preempted > 0
    table = engine.batch.pages
    assert table.free == 2 * LENGTH
    assert most == [2, 2]  # rows of each part
    assert table.table.tolist() == [[part * table.pages.total // 2] * 6 for part in (0, 0, 1, 1)]
    cache = engine.batch.state.target_cache
    assert cache.entries[0].k.sharding.shard_shape(cache.entries[0].k.shape)[0] == table.pages.total // 2


@pytest.mark.lossless
def test_every_time_pages_are_asked_for_they_may_be_missing(directory, target, plain, monkeypatch):
    """A fault whenever there was none the time before: rows wait, are read again, and answer the same."""
    hold, calls = PageTable.hold, [0]

    def missing(self, row, tokens, **given):
        if -(-tokens // self.pages.size) > self._held[row]:
            calls[0] += 1
            if calls[0] % 2:
                return False
        return hold(self, row, tokens, **given)

    monkeypatch.setattr(PageTable, "hold", missing)
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    engine = Engine(target, drafter, constraints=True, cache_tokens=3 * LENGTH, tree=9, **SETTINGS)
    assert outcome(engine.generate(requests())) == plain
    assert engine.stats.preempted > 1
    assert calls[0] > 2 * len(plain)
    all_free(engine, 3 * LENGTH)


@pytest.mark.slow
def test_a_request_that_has_left_gives_its_pages_back(directory, target):
    """Canceled while it waits, is read and decodes."""
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    engine, rng = Engine(target, drafter, cache_tokens=LENGTH + PAGE, tree=9, **SETTINGS), random.Random(1)
    asked = [request for request in requests(40) if request.params.constraint is None]
    tickets = [engine.submit(request) for request in asked]
    streamed = dict.fromkeys(tickets, 0)
    while engine.busy or engine.waiting:
        for ticket, completion in engine.step():
            assert len(completion.token_ids) >= streamed[ticket]
            streamed[ticket] = len(completion.token_ids)
        if rng.random() < 0.3:
            engine.cancel(rng.choice(tickets))
    all_free(engine, LENGTH + PAGE)


def test_memory_follows_the_tokens(target):
    """And not the longest row."""
    caches = [
        size_in_bytes(engine.batch.state.target_cache.entries)
        for engine in (
            Engine(target, None, slots=4, max_length=LENGTH),
            Engine(target, None, slots=4, max_length=LENGTH, cache_tokens=LENGTH),
            Engine(target, None, slots=4, max_length=LENGTH, cache_tokens=4 * LENGTH),
        )
    ]
    of_page = caches[1] // (LENGTH // PAGE + 1)
    assert caches[2] - caches[1] == 3 * LENGTH // PAGE * of_page
    assert caches[1] < caches[0] / 3
    with pytest.raises(ValueError, match="cache_tokens must be at least 96, for the longest request; got 95"):
        Engine(target, None, max_length=LENGTH, cache_tokens=LENGTH - 1)


def test_no_array_is_as_long_as_a_row(target, directory, monkeypatch):
    """In no program: nothing is gathered, nor are there histories of that length, nor is all of one searched at once
    for what an n-gram is."""
    monkeypatch.setattr(copying, "PIECE", 8 * PAGE)
    drafter = Mixture(load_drafter(directory / "dflash", num_target_layers=4))
    for shared in (True, False):
        length = 97 * PAGE
        engine = Engine(target, drafter, **(SETTINGS | {"max_length": length}), cache_tokens=length if shared else None)
        calls = [engine.batch.calls.empty(name, engine.batch.state) for name in engine.batch.calls.names]
        texts = [call.program.lower(*call.arguments).as_text() for call in calls]
        assert any(f"x{length}x" in text for text in texts) is not shared


def test_memory_for_a_file_of_requests(target, monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 128)
    worth = partial(tokens_worth_sharing, target)
    short, long = [(500, 500)] * 95, [(16000, 500)] * 5
    tokens = 128 * -(-(64 * 1775 + 64 * 128) // 128)  # rows of the mean length, where all generate as much
    assert worth(short + long, 64, 16640) == tokens
    assert worth(short[:38] + long[:2], 40, 16640) == 128 * -(-(38000 + 33000 + 40 * 128) // 128)
    assert worth(short, 64, 1024) is None
    assert worth([(100, 100 + i) for i in range(1000)], 64, 1280) is None  # saves less than a quarter
    assert worth(short + long, 1, 16640) is None
    assert worth([(500, 500), (16000, 64000)], 8, 80128) is not None  # never more than the two have


def test_the_table():
    table = PageTable(Pages(10, 3, 16), 4, parts=2)
    assert table.tokens == table.free == 8 * 16
    assert table.table.tolist() == [[0] * 3] * 2 + [[5] * 3] * 2
    assert table.hold(0, 17)
    assert table.hold(0, 5)  # has them
    assert table.table[0].tolist() == [1, 2, 0]
    assert table.hold(1, 32)
    assert not table.hold(0, 33)  # of this part
    assert table.table[0].tolist() == [1, 2, 0]
    assert table.hold(2, 999)  # no row has more than so many
    assert table.table[2].tolist() == [6, 7, 8]
    assert table.free == 16
    table.drop(0)
    assert table.table[0].tolist() == [0, 0, 0]
    assert table.hold(1, 48)
    assert table.table[1].tolist() == [3, 4, 1]
    for row in range(4):
        table.drop(row)
    assert table.free == table.tokens == 8 * 16


@pytest.mark.slow
@pytest.mark.parametrize("count", [8])
def test_samples_of_one_prompt_have_its_pages_once(count, directory, target):
    """And a prompt that begins as they do, later; where memory is short they begin one after the other."""
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    prompt = [(7 * i) % 50 + 3 for i in range(4 * PAGE + 5)]
    asked = [tiny.ask(prompt, 12, 1.0, sample=i, id="0") for i in range(count)]
    asked += [tiny.ask([*prompt[: 2 * PAGE], i, 5], 9, 0.7, id=str(i)) for i in range(1, 4)]
    settings = {"slots": 8, "max_length": LENGTH, "steps_per_visit": 4, "prefill_chunk": 32}
    expected = outcome(Engine(target, None, **settings).generate(asked))
    for tokens, most in ((8 * LENGTH, 4 + count * 2 + 4), (LENGTH + 2 * PAGE, 8)):
        engine = Engine(target, drafter, cache_tokens=tokens, prefix_chunks=4, tree=9, **settings)
        used, got = [0], {}
        tickets = [engine.submit(request) for request in asked]
        while engine.busy or engine.waiting:
            got |= dict(engine.step())
            if all(row is None or not row.left for row in engine._admission.rows):  # all prompts are read
                used.append(int(np.sum(engine.batch.pages._users > 0)))
        assert [(got[ticket].token_ids, got[ticket].finish_reason) for ticket in tickets] == expected
        assert max(used) <= most
        assert sum(one.cached_tokens for one in got.values()) >= 3 * 2 * PAGE
        kept = 2 * PAGE * len(engine.batch.prefixes._pages)
        assert engine.batch.pages.free == tokens - kept
        assert kept <= 4 * 2 * PAGE
        assert kept or tokens < 8 * LENGTH  # or what was kept has been given up for others


@pytest.mark.slow
@pytest.mark.lossless
@pytest.mark.parametrize("given", [{}, pytest.param({"deterministic": True}, marks=pytest.mark.slow)], ids=str)
def test_what_else_requests_ask_for(given, directory, target):
    """Log-probabilities, ends that the host finds, steps without speculation, and bits that nobody else decides."""
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    stop = lambda tokens, new: next((i + 1 for i in range(len(tokens) - new, len(tokens)) if tokens[i] % 11 == 5), None)
    asked = [
        replace(request, find_stop=stop if i % 2 else None, max_block_size=1 if not given and i % 5 == 4 else None)
        for i, request in enumerate(requests(12, logprobs=2))
    ]
    asked = [request for request in asked if request.params.constraint is None]
    settings = SETTINGS | {"logprobs": 2, "plain": not given, "tree": 9 if not given else 0, **given}
    expected = Engine(target, drafter, **settings).generate(asked)
    engine = Engine(target, drafter, cache_tokens=LENGTH + 2 * PAGE, prefix_chunks=3, **settings)
    got = generated(engine, asked)
    assert outcome(got) == outcome(expected)
    assert bool(engine.stats.preempted) == (not given)
    for ours, theirs in zip(got, expected, strict=True):
        assert len(ours.logprobs) == len(ours.top_logprobs) == len(ours.token_ids)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=0 if given else 1e-4)


def test_warm_up_forgets_what_was_kept_and_compiles_everything(directory, target):
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    settings = SETTINGS | {"max_length": LENGTH + PAGE}  # programs that nobody else has
    engine = Engine(target, drafter, cache_tokens=3 * LENGTH, prefix_chunks=2, **settings)
    alike, other = ([tiny.ask([n + i % 7 for i in range(4 * PAGE + 3)], 10, id="0")] for n in (4, 20))
    engine.warm_up()
    compiled = []
    listen = lambda event, _, fun_name="", **__: compiled.append(fun_name) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        expected = outcome(engine.generate(alike))
        engine.warm_up()
        assert outcome(generated(engine, other)) != expected
        assert outcome(generated(engine, alike)) == expected
        assert outcome(generated(engine, alike)) == expected
        assert compiled == []
        jax.jit(lambda x: x + LENGTH)(1.0)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert engine.stats.prefix_tokens > 0


def test_who_only_waits_takes_nothing_away(directory, target):
    """A request that does not fit leaves the chunks that are kept, and those in use free nothing."""
    engine = Engine(target, None, cache_tokens=LENGTH + PAGE, prefix_chunks=4, **SETTINGS)
    alike = [9 + i % 7 for i in range(2 * PAGE)]
    first = engine.submit(tiny.ask([*alike, 5], 40, id="0"))
    while not (kept := dict(engine.batch.prefixes._pages)):
        engine.step()
    last = engine.submit(tiny.ask([3] * (4 * PAGE), 20, id="1"))
    done = {}
    while engine.waiting:
        assert engine.batch.prefixes._pages == kept
        done |= dict(engine.step())
        check(engine)
    while engine.busy:
        done |= dict(engine.step())
    assert [len(done[ticket].token_ids) for ticket in (first, last)] == [40, 20]
    assert engine.stats.preempted == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [{}, {"prefill_budget": 8}], ids=str)
def test_no_page_leaks_in_ten_thousand_requests(given, directory, target):
    """Prompts that begin alike, canceled requests, too little memory for all rows."""
    rng, drafter = random.Random(0), load_drafter(directory / "dflash", num_target_layers=4)
    settings = SETTINGS | {"slots": 8, "cache_tokens": 3 * LENGTH, "prefix_chunks": 6} | given
    engine, left, done, live = Engine(target, drafter, **settings), 10_000, 0, set[int]()
    heads = [[rng.randrange(1, 60) for _ in range(40)] for _ in range(5)]
    cancelled = 0
    while left or live:
        while left and engine.waiting < 8:
            prompt = [*rng.choice(heads)[: rng.choice([0, 20, 40])], *(rng.randrange(1, 60) for _ in range(3))]
            new = rng.choice([1, 2, 5, 12, LENGTH])
            live.add(engine.submit(tiny.ask(prompt, new, 0.7 * (left % 2), id=str(left))))
            left -= 1
        if rng.random() < 0.1:
            gone = rng.choice([*live])
            engine.cancel(gone)
            live.discard(gone)
            cancelled += 1
        for ticket, completion in engine.step():
            if completion.finish_reason and ticket in live:
                live.discard(ticket)
                done += 1
        if done % 100 == 0:
            check(engine)
    assert done + cancelled == 10_000
    assert cancelled > 100
    assert engine.stats.preempted > 100
    all_free(engine, 3 * LENGTH)
