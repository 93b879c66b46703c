"""How many rows a server has if nobody says it."""

import pytest

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.cache import size_in_bytes
from dflash_jax.cli import EngineOptions, GenerationOptions
from dflash_jax.infer.engine.memory import COPIES, MOST_ROWS, ROWS_ON_CPU, rows_that_fit
from dflash_jax.loading import Loaded
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.serve_http import LENGTH as USUAL
from dflash_jax.serve_http import _with_memory, _with_rows
from tests import tiny


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    target = tiny.write_target(tmp_path_factory.mktemp("target"), tiny.target_config())
    return target, tiny.write_drafter(tmp_path_factory.mktemp("drafter"), tiny.drafter_config())


@pytest.fixture(scope="module")
def pair(directories):
    return load_target(directories[0]), load_drafter(directories[1])


LENGTH, CHUNK = 256, 32


def state_bytes(target, drafter, rows):
    engine = Engine(target, drafter, slots=rows, max_length=LENGTH, prefill_chunk=CHUNK, constraints=True)
    return size_in_bytes(engine.batch.state)


def test_as_many_as_the_memory_has_room_for(pair):
    """A row takes what a larger state has more, as much for kept prompts, and some copies of its logits."""
    target, drafter = pair
    row = (state_bytes(target, drafter, 8) - state_bytes(target, drafter, 4)) // 4
    each = 2 * row + COPIES * 4 * 4 * 8 * tiny.VOCAB
    fit = lambda free: rows_that_fit(target, drafter, LENGTH, CHUNK, free)
    assert [fit(rows * each) for rows in (1, 2, 4, 16, 64)] == [1, 2, 4, 16, 64]
    assert (fit(8 * each - 1), fit(15 * each)) == (4, 8)
    assert (fit(-5), fit(10**15)) == (1, MOST_ROWS)
    assert rows_that_fit(target, None, LENGTH, CHUNK, 8 * each) >= fit(8 * each)


def test_on_a_mesh_every_device_has_its_part(directories, pair):
    """Rows are split over four parts, and heads over two."""
    mesh = make_mesh(parse_mesh("data=4,model=2"))
    split = load_target(directories[0], mesh=mesh), load_drafter(directories[1], mesh=mesh)
    free = 12 * 2**20
    one = rows_that_fit(*pair, LENGTH, CHUNK, free)
    many = rows_that_fit(*split, LENGTH, CHUNK, free)
    assert many % 4 == 0
    assert 4 * one <= many <= 8 * one
    assert rows_that_fit(*split, LENGTH, CHUNK, 0) == 4


def test_a_number_that_is_given_stays(pair):
    loaded = Loaded(*pair, None, None)
    rows = lambda engine=None, **given: (
        _with_rows(loaded, GenerationOptions(**given), engine or EngineOptions(max_length=LENGTH)).rows
    )
    assert [rows(batch_size=size) for size in (1, 5)] == [1, 5]
    assert rows() == ROWS_ON_CPU == rows_that_fit(*pair, LENGTH, CHUNK)
    assert rows(EngineOptions(max_length=LENGTH, deterministic=True)) == ROWS_ON_CPU
    assert rows(EngineOptions(max_length=1024, cache_tokens=1024)) == 2
    assert GenerationOptions().rows == 1  # of anything but a server


def test_a_server_shares_memory(directories, pair, monkeypatch):
    """As much as its rows and the prompts kept beside them would have; one row may have it all."""
    loaded = Loaded(*pair, None, None)

    def made(rows=4, **given):
        generation, options = _with_memory(loaded, GenerationOptions(batch_size=rows), EngineOptions(**given))
        return generation.rows, options.cache_tokens, options.max_length

    most = pair[0].config.most_positions
    assert 512 < most < USUAL
    assert made() == (4, 8 * most, most)
    assert made(prefix_chunks=2) == (4, 4 * most + 2 * 256, most)
    assert made(max_length=600) == (4, 4 * 600 + 9 * 256, 600)
    assert made(max_length=512) == (4, None, 512)  # a few pages
    assert made(deterministic=True) == (4, None, most)
    assert made(cache_tokens=1024) == (4, 1024, 1024)
    monkeypatch.setattr("dflash_jax.serve_http.LENGTH", 300)
    assert made() == (4, 4 * 300 + 4 * 256, most)  # more than a row of its own would have
    assert made(1) == (1, 300 + 256, 300 + 256)
    assert made(1, max_length=most) == (1, most, most)
    monkeypatch.setattr("dflash_jax.infer.engine.memory.TABLE", 6)
    assert made(1) == (1, 556, 556)
    assert made(1, prefix_chunks=8) == (1, 300 + 8 * 256, 6 * 128)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma4"])
def test_a_server_takes_no_more_memory(tmp_path, family):
    """For rows and kept prompts together, whether these lie in pages, or have rings and states besides."""
    raw = tiny.target_config(model_type=family, max_position_embeddings=1024) | tiny.FAMILIES.get(family, {})
    target = load_target(tiny.write_target(tmp_path, raw))
    loaded = Loaded(target, None, None, None)
    _, options = _with_memory(loaded, GenerationOptions(batch_size=4), EngineOptions())

    def taken(**given):
        engine = Engine(target, None, slots=4, max_length=1024, prefill_chunk=256, prefix_chunks=16, **given)
        prefixes = engine.batch.prefixes
        return size_in_bytes((engine.batch.state, prefixes._kept, prefixes._kept_states))

    assert options.prefix_chunks == 16
    assert options.cache_tokens > 4 * 1024
    assert taken(cache_tokens=options.cache_tokens) <= 1.03 * taken()


@pytest.mark.parametrize("wrong", [{"max_length": -5}, {"prefix_chunks": -1}, {"cache_tokens": 0}])
def test_what_is_wrong_is_said_first(pair, wrong):
    with pytest.raises(ValueError, match="must be at least"):
        _with_memory(Loaded(*pair, None, None), GenerationOptions(), EngineOptions(**wrong))
    with pytest.raises(ValueError, match="--batch-size must be at least 1"):
        _with_memory(Loaded(*pair, None, None), GenerationOptions(batch_size=-1), EngineOptions())


def test_a_server_that_copies_prompts(directories, pair):
    """As a mesh of parts does: what is kept of them takes memory besides."""
    mesh = make_mesh(parse_mesh("data=4,model=2"))
    split = load_target(directories[0], mesh=mesh), load_drafter(directories[1], mesh=mesh)
    _, options = _with_memory(Loaded(*split, None, None), GenerationOptions(batch_size=8), EngineOptions())
    most = pair[0].config.most_positions
    assert (options.cache_tokens, options.max_length) == (8 * most, most)


def test_a_server_of_layers_without_pages(pair, monkeypatch):
    target = pair[0]
    rows_alone = lambda self, rows, room, *more: init_cache(self, rows, getattr(room, "longest", room), *more)
    init_cache = type(target).init_cache
    monkeypatch.setattr(type(target), "init_cache", rows_alone)
    loaded = Loaded(target, None, None, None)
    generation, options = _with_memory(loaded, GenerationOptions(batch_size=4), EngineOptions())
    assert (generation.rows, options.cache_tokens, options.max_length) == (4, None, target.config.most_positions)
