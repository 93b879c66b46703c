"""Every implementation of the cache update against a loop over positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from dflash_jax.kernels.cache_update import Part, append, pallas_gpu, pallas_tpu, room, rows_tpu
from dflash_jax.kernels.cache_update.trial import Trial
from dflash_jax.kernels.pages import in_pages, in_rows
from tests.chips import topology


def called(implementation, *arguments, **options):
    """`append` with this implementation, the Pallas kernels among them by the interpreter."""
    call = partial(append, *arguments, implementation=implementation, **options)
    if implementation != "gpu":
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            return call()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
        return call()


def expected(cache, block, lengths, kept, rows, ring):
    cache, S = np.array(cache), cache.shape[2]
    for b, (length, count) in enumerate(zip(lengths, kept, strict=True)):
        for t in range(count):
            if ring or length + t < S:
                cache[rows[b], :, (length + t) % S] = block[b, :, t]
    return cache


@pytest.mark.parametrize("implementation", ["xla", "tpu", "gpu"])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(
    ("widths", "S", "T", "lengths", "kept"),
    [
        ((128, 128), 64, 5, [0, 14, 60], [5, 3, 5]),  # empty; over a border; over the end
        ((128, 128), 32, 16, [16, 31, 3], [16, 1, 0]),
        ((64, 64), 256, 6, [125, 250, 0], [6, 6, 0]),
        ((128, 64), 128, 20, [120, 127, 10], [20, 2, 7]),
        ((64, 64), 1152, 256, [0, 1000, 896], [256, 256, 3]),  # several windows, narrower than the block
        ((64, 24), 48, 60, [0, 14, 60], [60, 3, 50]),  # longer than the ring; a width that is no power of two
    ],
)
def test_equals_a_loop(implementation, ring, widths, S, T, lengths, kept):
    if implementation == "tpu" and S == 48:
        pytest.skip("it declines these")
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    R, B, K, rows = 5, 3, 2, [3, 1, 4]
    caches, blocks = [draw(R, K, S, w) for w in widths], [draw(B, K, T, w) for w in widths]
    wanted = [expected(c, x, lengths, kept, rows, ring) for c, x in zip(caches, blocks, strict=True)]
    for b, count in enumerate(kept):  # what is not kept may be anything
        for x in blocks:
            x[b, :, count:] = np.inf
    arguments = *(list(map(jnp.asarray, x)) for x in (caches, blocks)), jnp.asarray(lengths), jnp.asarray(kept)
    got = called(implementation, *arguments, jnp.asarray(rows), ring=ring)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("widths", "page"),
    [((128, 128, 128), None), pytest.param((64, 64), None, marks=pytest.mark.slow), ((128, 256), 128)],
)
@pytest.mark.parametrize("ring", [False, True])
def test_many_rows_on_their_way_at_once(monkeypatch, capsys, widths, page, ring):
    """More than fit into a TPU core's memory together; the interpreter looks for races."""
    monkeypatch.setattr(rows_tpu, "BYTES", 1 << 19)
    rng, B, K, T, S = np.random.default_rng(0), 11, 2, 5, 256
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(np.float32))
    lengths = jnp.asarray(rng.integers(0, S, B), jnp.int32).at[3].set(S - 2)
    kept = jnp.asarray(rng.integers(0, T + 1, B), jnp.int32).at[5].set(0)
    caches, blocks = [draw(B, K, S, w) for w in widths], [draw(B, K, T, w) for w in widths]
    wanted = [
        expected(c, x, lengths.tolist(), kept.tolist(), range(B), ring) for c, x in zip(caches, blocks, strict=True)
    ]
    pages = None
    if page is not None:
        caches, pages = in_pages(caches, page, jax.random.key(0))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        got = append(caches, blocks, lengths, kept, pages=pages, ring=ring, implementation="tpu")
    for a, b in zip(got if pages is None else in_rows(got, pages), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize("implementation", ["xla", "tpu", "gpu"])
@pytest.mark.parametrize(("widths", "page", "T"), [((128, 128), 32, 5), ((128,), 32, 70), ((64, 24), 128, 140)])
@pytest.mark.parametrize("J", [None, 3])
def test_rows_in_pages(implementation, widths, page, T, J):
    """A block over the border of a page, over several pages, at the end of the last one; and a row that keeps nothing.
    Pages that a row does not have yet are page 0, and nobody's."""
    if implementation == "tpu" and 24 in widths:
        widths = (64, 64)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(np.float32))
    S, K, B = 4 * page, 2, 4
    lengths, kept = [page - 3, 2 * page + 1, S - 4, 7], [min(T, 2 * page), min(T, page), T, 0]
    caches, blocks = [draw(5, K, S, w) for w in widths], [draw(B, K, T, w) for w in widths]
    path = None if J is None else np.tile(np.asarray([0, 2, 3], np.int32), (B, 1))
    kept = kept if J is None else [min(J, count) for count in kept]
    rows = [3, 1, 4, 2]  # the first is nobody's
    ordered = blocks if path is None else [x[:, :, path[0]] for x in blocks]
    wanted = [expected(c, x, lengths, kept, rows, False) for c, x in zip(caches, ordered, strict=True)]
    paged, pages = in_pages(caches, page, jax.random.key(1))
    swap = int(pages[0, 0])  # page 0 becomes one of the first row's
    pages = jnp.where(pages == 0, -1, pages)
    pages = jnp.where(pages == swap, 0, pages)
    pages = jnp.where(pages == -1, swap, pages)
    paged = [x.at[jnp.asarray([0, swap])].set(x[jnp.asarray([swap, 0])]) for x in paged]
    of_rows = np.asarray(pages)[rows]
    for b, (length, count) in enumerate(zip(lengths, kept, strict=True)):
        of_rows[b, -(-(length + count) // page) :] = 0
    more = {} if path is None else {"path": jnp.asarray(path)}
    given = blocks, jnp.asarray(lengths), jnp.asarray(kept)
    got = in_rows(called(implementation, paged, *given, pages=jnp.asarray(of_rows), **more), pages)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a[1:], b[1:])


@pytest.mark.parametrize("implementation", ["xla", "tpu", "gpu"])
def test_a_cache_without_values(implementation):
    """Of latents: one head, as wide as no other."""
    rng = np.random.default_rng(0)
    cache, block = (rng.standard_normal((2, 1, n, 576)).astype(np.float32) for n in (128, 8))
    lengths, kept = [30, 9], [8, 3]
    after = expected(cache, block, lengths, kept, [1, 0], False)
    arguments = (jnp.asarray(cache), None), (jnp.asarray(block), None), jnp.asarray(lengths), jnp.asarray(kept)
    got, values = called(implementation, *arguments, jnp.asarray([1, 0]))
    np.testing.assert_array_equal(got, after)
    assert values is None
    trial = Trial.of([jnp.zeros((2, 1, 64, 576))], [jnp.zeros((2, 1, 8, 576))], False)
    assert jax.tree.map(jnp.shape, trial.run(partial(append, implementation="xla"))) == [(3, 1, 64, 576)]


@pytest.mark.parametrize("implementation", ["xla", "tpu", "gpu"])
@pytest.mark.parametrize(("J", "inside"), [(None, True), (3, False), (6, True)])
def test_blocks_in_an_order_of_their_own_and_inside_other_arrays(implementation, J, inside):
    """As of a tree, and of keys beside queries, for two layers at once."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    caches, blocks = [draw(3, 2, 64, 128) for _ in range(4)], [draw(2, 2, 6, 128) for _ in range(4)]
    lengths, kept, rows = [5, 30], [3, 2], [2, 0]
    path = None if J is None else rng.permuted(np.tile(np.arange(6), (2, 1)), axis=1)[:, :J]
    ordered = blocks if path is None else [np.take_along_axis(x, path[:, None, :, None], axis=2) for x in blocks]
    wanted = [expected(c, x, lengths, kept, rows, False) for c, x in zip(caches, ordered, strict=True)]
    given = list(map(jnp.asarray, blocks))
    if inside:
        source = [jnp.pad(x, ((0, 0), (0, 0), (0, 2), (0, 0))).reshape(2, -1, 128) for x in given]
        given = [Part(x, jnp.pad(y, ((0, 0), (3, 0), (0, 0))), 3, 8) for x, y in zip(given, source, strict=True)]
    counts = (jnp.asarray(x) for x in (lengths, kept, rows))
    more = {} if path is None else {"path": jnp.asarray(path)}
    got = called(implementation, list(map(jnp.asarray, caches)), given, *counts, **more)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("implementation", ["xla", "gpu"])
@pytest.mark.parametrize("J", [None, 3])
def test_no_more_is_kept_than_there_is(implementation, J):
    """A block of five, or three of it, whoever asks for seven."""
    cache, block, rows = jnp.zeros((2, 2, 64, 64)), jnp.ones((2, 2, 5, 64)), jnp.asarray([1, 0])
    more = {} if J is None else {"path": jnp.asarray([[0, 2, 4]] * 2)}
    got = called(implementation, cache, block, jnp.asarray([8, 3]), jnp.asarray([7, 7]), rows, **more)
    assert float(jnp.sum(got)) == 2 * 2 * 64 * (J or 5)


@pytest.mark.parametrize("implementation", ["xla", "tpu", "gpu"])
@pytest.mark.parametrize(("page", "T", "J"), [(None, 5, None), (None, 140, None), (32, 5, 3), (64, 70, None)])
def test_codes_and_their_scales(implementation, page, T, J):
    """Arrays of two types at once; every code is written as it is."""
    rng, S, lengths = np.random.default_rng(0), 256, [30, 130]
    widths, kept = (128, 64, 2), [min(T, 126), 2] if J is None else [J, 2]
    cached = lambda width: rng.standard_normal((2, 2, S, width)).astype(np.float32)
    caches = [*(rng.integers(-127, 128, (2, 2, S, w)).astype(np.int8) for w in widths[:2]), cached(2)]
    blocks = [*(rng.integers(-127, 128, (2, 2, T, w)).astype(np.int8) for w in widths[:2]), cached(2)[:, :, :T]]
    path = None if J is None else np.tile(np.asarray([4, 0, 2], np.int32), (2, 1))
    ordered = blocks if path is None else [x[:, :, path[0]] for x in blocks]
    wanted = [expected(c, x, lengths, kept, [0, 1], False) for c, x in zip(caches, ordered, strict=True)]
    arrays, given = ([jnp.asarray(x) for x in some] for some in (caches, blocks))
    pages, more = None, {} if path is None else {"path": jnp.asarray(path)}
    if page is not None:  # a TPU's tiles of scales have 128 slots
        arrays, pages = in_pages(arrays, 128 if implementation == "tpu" else page, jax.random.key(0))
    got = called(implementation, arrays, given, jnp.asarray(lengths), jnp.asarray(kept), pages=pages, **more)
    for a, b in zip(got if pages is None else in_rows(got, pages), wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


CODES = (64, 64, 2), ("int8", "int8", "float32")


@pytest.mark.parametrize("arrays", [((64, 64), ("float32", "float32")), CODES], ids=["numbers", "codes"])
@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("path", [None, 3])
def test_trials_read_what_they_should(path, page, arrays):
    """Of blocks inside other arrays, in the order of a path; NaN lies around them."""
    trial = Trial(2, 5, 2, arrays[0], 128, arrays[1], False, path, True, page)
    first = trial.run(partial(append, implementation="xla"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
        second = trial.run(partial(append, implementation="gpu"))
    for one, other in zip(first, second, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


def test_declines_by_name():
    cache, block = jnp.zeros((1, 1, 40, 128)), jnp.zeros((1, 1, 4, 128))
    one = jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match="'tpu' does not support this case: 40 slots; it supports multiples of 16"):
        append([cache] * 2, [block] * 2, one, one, implementation="tpu")
    for name in ("tpu", "gpu"):
        with pytest.raises(ValueError, match="block in float32, cache in bfloat16"):
            append([cache.astype(jnp.bfloat16)] * 2, [block] * 2, one, one, implementation=name)
        with pytest.raises(ValueError, match="block in float32, cache in int8"):
            append([cache.astype(jnp.int8)] * 2, [block] * 2, one, one, implementation=name)
    less = "a cache of 2147483648 numbers, whose places Pallas would count in 32 bits"
    for S, dtype, why in ((32767, jnp.bfloat16, "None"), (32768, jnp.float8_e4m3fn, less)):
        found, large = [], jax.ShapeDtypeStruct((64, 8, S, 128), dtype)
        jax.eval_shape(lambda x, found=found: found.append(pallas_gpu.declines([x], [x])), large)
        assert why in str(found[0])


@pytest.mark.parametrize("H", [64, 128, 256, 576])
@pytest.mark.parametrize("widest", [1, 8, 16, 40, 64, 128, 200, 256, 512, 1024])
def test_there_is_room_for_every_block(H, widest):
    """In a cache of any size that was rounded up, by less than a chunk or a tile."""
    told, spec = [], lambda *size: jax.ShapeDtypeStruct((1, 1, *size), jnp.bfloat16)
    chunk = max(128, 2 ** int(np.ceil(np.log2(widest))))
    for slots in [65, 100, 128, 129, 500, 1000, 1024, 1152, 1153, 4096, 40_960, 131_071]:
        rounded = room(slots, widest)
        assert slots <= rounded < slots + chunk
        assert room(rounded, widest) == rounded
        for T in {min(T, widest) for T in (1, 3, 16, 17, 33, 100, 130, widest)}:
            ask = lambda *arrays: told.append(pallas_tpu.declines(*arrays))
            jax.eval_shape(ask, [spec(rounded, H)], [spec(T, H)])
    assert set(told) == {None}


def test_small_caches_stay_as_they_are():
    assert [room(slots, 256) for slots in (1, 40, 64)] == [1, 40, 64]


def test_what_is_not_rounded_is_declined():
    """1160 slots are not whole tiles."""
    cache, block, one = jnp.zeros((1, 1, 1160, 64)), jnp.zeros((1, 1, 256, 64)), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match="1160 slots; it supports multiples of 128"):
        append([cache] * 2, [block] * 2, one, one, implementation="tpu")


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("T", [1, 16, 256])
def test_compiles_for_tpu_in_place(H, T):
    place = SingleDeviceSharding(topology("v5e:2x2")[0])
    spec = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype, sharding=place)
    cache, block, ints = spec(8, 8, 4096, H), spec(8, 8, T, H), spec(8, dtype=jnp.int32)
    call = lambda *arguments: append(*arguments, implementation="tpu")
    program = jax.jit(call, donate_argnums=0).lower([cache] * 2, [block] * 2, ints, ints).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * 8 * 8 * 4096 * H * 2
    assert memory.temp_size_in_bytes < 8 * 8 * 4096 * H * 2


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("T", [1, 16, 256])
def test_codes_compile_for_tpu_in_place(H, T):
    place = SingleDeviceSharding(topology("v5e:2x2")[0])
    spec = lambda *size, dtype: jax.ShapeDtypeStruct(size, dtype, sharding=place)
    arrays = lambda S: (*[spec(8, 8, S, H, dtype=jnp.int8)] * 2, spec(8, 8, S, 2, dtype=jnp.float32))
    counts = [spec(8, dtype=jnp.int32)] * 2
    call = lambda *arguments: append(*arguments, implementation="tpu")
    memory = jax.jit(call, donate_argnums=0).lower(arrays(4096), arrays(T), *counts).compile().memory_analysis()
    size = 8 * 8 * 4096 * (2 * H + 2 * 4)
    assert size <= memory.alias_size_in_bytes < 1.01 * size  # two scales are not filled up to 128
    assert memory.temp_size_in_bytes < size / 4


def test_compiles_for_tpu_in_place_without_values():
    place = SingleDeviceSharding(topology("v5e:2x2")[0])
    spec = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype, sharding=place)
    cache, block, ints = spec(8, 1, 4096, 576), spec(8, 1, 8, 576), spec(8, dtype=jnp.int32)
    call = lambda cache, block, *counts: append((cache, None), (block, None), *counts, implementation="tpu")
    memory = jax.jit(call, donate_argnums=0).lower(cache, block, ints, ints).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 8 * 4096 * 576 * 2
    assert memory.temp_size_in_bytes < 8 * 4096 * 576 * 2 / 8
