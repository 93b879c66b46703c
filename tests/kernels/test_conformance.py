"""Every implementation of the block attention at the shapes of real models, against a dense softmax in float64.

Pallas kernels run in the interpreter; that for GPUs knows no tensor cores, whose two products are replaced here by
plain ones. Slots beyond a row's length are poisoned with NaN.
"""

import itertools
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.cache import KV
from dflash_jax.kernels import tensor_cores
from dflash_jax.kernels.block_attention import attend, expand, mosaic_gpu, pallas_tpu
from dflash_jax.kernels.block_attention.reference import slots_at_once
from dflash_jax.kernels.dispatch import using
from dflash_jax.kernels.pages import in_pages
from dflash_jax.kernels.shapes import SHAPES, Shape

INTERPRETED = {"xla": nullcontext, "tpu": lambda: pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())}
if hasattr(plgpu, "force_gpu_interpret_mode"):  # from jax 0.12 on
    INTERPRETED["gpu"] = plgpu.force_gpu_interpret_mode
SLOTS = 320  # more than one chunk, and no multiple of the TPU's


def small(shape: Shape) -> Shape:
    """The shape with fewer heads and a narrower window, for the interpreter; the group stays."""
    K = min(shape.K, 2)
    window = shape.window and min(shape.window, 100)
    return shape._replace(N=shape.N // shape.K * K, K=K, T=min(shape.T, 40), window=window)


def draw(shape: Shape, lengths, slots, dtype, seed=0, values=None, fresh=None):
    """The arguments of `attend`; the queries are the last of the `fresh` positions."""
    rng = np.random.default_rng(seed)
    fill = lambda *size: rng.standard_normal(size).astype(np.float32)
    B, Hv, F = len(lengths), values or shape.H, fresh or shape.T
    q, k, v = fill(B, shape.T, shape.N, shape.H), fill(B, shape.K, F, shape.H), fill(B, shape.K, F, Hv)
    cache_k, cache_v = fill(B, shape.K, slots, shape.H), fill(B, shape.K, slots, Hv)
    if shape.values is not None:
        v, cache_v = k[..., : shape.values].copy(), cache_k[..., : shape.values].copy()
    for row, length in enumerate(lengths):
        cache_k[row, :, length:] = cache_v[row, :, length:] = np.nan
    arrays = [jnp.asarray(x, dtype) for x in (q, k, v, cache_k, cache_v)]
    positions = jnp.asarray(np.asarray(lengths)[:, None] + np.arange(F - shape.T, F), jnp.int32)
    sinks = jnp.asarray(fill(shape.N), dtype) if shape.sinks else None
    return *arrays, positions, jnp.asarray(lengths, jnp.int32), sinks


def dense(shape: Shape, q, k, v, cache_k, cache_v, positions, lengths, sinks, mask):
    """[B, T, N, Hv] in float64; plain cache, no ring."""
    q, k, v, cache_k, cache_v = (np.nan_to_num(np.asarray(x, np.float64)) for x in (q, k, v, cache_k, cache_v))
    B, S = cache_k.shape[0], cache_k.shape[2]
    group = shape.N // shape.K
    keys = np.concatenate([cache_k, k], axis=2).repeat(group, axis=1)
    values = np.concatenate([cache_v, v], axis=2).repeat(group, axis=1)
    s = np.einsum("btnh,bnsh->bnts", q, keys) * shape.H**-0.5
    if shape.softcap is not None:
        s = shape.softcap * np.tanh(s / shape.softcap)
    at, F = np.asarray(positions), k.shape[2]
    fresh = at[:, -1:] - np.arange(F)[::-1]
    seen = np.broadcast_to(np.arange(S) < np.asarray(lengths)[:, None, None], (B, shape.T, S))
    held = np.broadcast_to(np.arange(S), (B, S))
    seen, held = np.concatenate([seen, mask], axis=2), np.concatenate([held, fresh], axis=1)
    if shape.window is not None:
        seen = seen & (np.abs(at[:, :, None] - held[:, None]) < shape.window)
    s = np.where(seen[:, None], s, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks, np.float64)[None, :, None, None], (*s.shape[:3], 1))
        s, values = np.concatenate([s, sink], axis=3), np.concatenate([values, 0 * values[:, :, :1]], axis=2)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return np.einsum("bnts,bnsh->btnh", p / p.sum(axis=-1, keepdims=True), values)


def check(implementation, shape, lengths, *, dtype=None, mask=None, seed=0, values=None, fresh=None, loud=1, page=None):
    dtype = dtype or exact(implementation)
    T, F = shape.T, fresh or shape.T
    *arrays, positions, count, sinks = draw(shape, lengths, SLOTS, dtype, seed, values, F)
    arrays[0] = arrays[0] * loud
    q, k, v, cache_k, cache_v = arrays
    own = mask if mask is not None else np.tril(np.ones((T, F), bool), F - T) if shape.causal else np.ones((T, F), bool)
    expected = dense(shape, *arrays, positions, count, sinks, np.broadcast_to(own, (len(lengths), T, F)))
    visible = ("causal" if shape.causal else "full") if mask is None else jnp.asarray(mask)
    how = {"visible": visible, "window": shape.window, "softcap": shape.softcap, "implementation": implementation}
    key_positions = None if fresh is None else count[:, None] + jnp.arange(fresh)[None]
    call = lambda *block, **arrays: attend(*block, **arrays, **how)
    cache, pages = KV(cache_k, cache_v if shape.values is None else None), None
    if page is not None:
        cache, pages = in_pages(cache, page, jax.random.key(seed))
    where = {"key_positions": key_positions, "pages": pages}
    run = partial(jax.jit(call), q, positions, k, v, cache, count, sinks=sinks, **where)
    for joined in [None, mosaic_gpu.join(q, k, v)] if implementation == "gpu" else [None]:  # apart, and in one array
        with INTERPRETED[implementation]():
            got = run(joined=joined)
        assert got.dtype == q.dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance(got))


def exact(implementation):
    """The widest type it serves."""
    return jnp.bfloat16 if implementation == "gpu" else jnp.float32


def tolerance(x):
    return 0.02 if x.dtype == jnp.bfloat16 else 3e-6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "STEP_BYTES", 1)  # 128 slots, the least
    monkeypatch.setattr(pallas_tpu, "ROWS", 96)  # more than one tile of queries for a prompt
    monkeypatch.setattr(mosaic_gpu, "BLOCKS", 16)  # some cases in one stretch, some in two
    monkeypatch.setattr(mosaic_gpu, "LEAST", 2)
    plain = lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32)
    monkeypatch.setattr(tensor_cores, "product", lambda a, b: plain(a[...], b[...].T))
    monkeypatch.setattr(tensor_cores, "add_product", lambda acc, a, b: acc + plain(a, b[...]))


# Of each kind of attention one shape is tried every day by the kernel that takes longest to interpret.
DAILY = "qwen3-8b decode", "qwen3-8b draft", "gpt-oss verify, sliding", "gemma-2-9b decode", "kimi-k2.5 verify"
SLOW = [name for name in SHAPES if name not in DAILY]


def slow_on_tpu(cases, slow):
    """Each implementation with each case; some are slow for the kernel of TPUs."""
    return [
        pytest.param(implementation, case, marks=pytest.mark.slow if implementation == "tpu" and case in slow else ())
        for implementation, case in itertools.product(INTERPRETED, cases)
    ]


@pytest.mark.parametrize(("implementation", "name"), slow_on_tpu(SHAPES, SLOW))
def test_real_shapes(implementation, name):
    shape = small(SHAPES[name])
    if implementation == "gpu" and shape.values is not None:
        with pytest.raises(ValueError, match="does not support this case: values that are a part of the keys"):
            check(implementation, shape, [5])
        return
    if implementation != "xla" and shape.H > 256 and shape.values is None:
        with pytest.raises(ValueError, match="does not support this case: head dim 512; it supports 64, 128, 256"):
            check(implementation, shape, [5])
        return
    rng = np.random.default_rng(sorted(SHAPES).index(name))
    check(implementation, shape, [0, int(rng.integers(1, SLOTS)), SLOTS])


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_blocks_of_any_width(implementation):
    for T in (3, 8, 33, 64, 100):
        check(implementation, Shape(T, 4, 2, 64), [0, 201], seed=T)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_bfloat16(implementation):
    check(implementation, small(SHAPES["qwen3-8b verify"]), [200, 129], dtype=jnp.bfloat16)


@pytest.mark.skipif("gpu" not in INTERPRETED, reason="this jax cannot interpret kernels of Hopper")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("T", "group"), [(1, 4), (16, 4), (10, 8), (20, 4), (33, 2), (5, 1), (7, 3)])
def test_caches_that_are_not_split_are_finished_by_the_kernel(T, group, sinks, monkeypatch):
    """Where positions of a tile are whole. Tiles are full, in part or not at all the block's."""
    kernel, wrote = mosaic_gpu._kernel, set()

    def watched(*refs, **given):
        wrote.add("out_smem" in given)
        return kernel(*refs, **given)

    monkeypatch.setattr(mosaic_gpu, "_kernel", watched)
    monkeypatch.setattr(mosaic_gpu, "BLOCKS", 1)
    check("gpu", Shape(T, 2 * group, 2, 64, sinks=sinks), [0, 201, 320], seed=T)
    assert wrote == {group != 3}


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_scores_are_scaled_in_float32(implementation):
    """Scaled in bfloat16, queries this loud would give scores that are wrong by tenths."""
    check(implementation, small(SHAPES["qwen3-8b verify"]), [200, 129], dtype=jnp.bfloat16, loud=20)


TREE = np.tril(np.random.default_rng(3).random((2, 10, 10)) < 0.4) | np.eye(10, dtype=bool)


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_a_tree_for_each_row(implementation):
    check(implementation, small(SHAPES["llama-3.1-8b verify"]), [150, 3], mask=TREE)


@pytest.mark.parametrize(("implementation", "sizes"), slow_on_tpu([(1, 4), (3, 7), (1, 70)], [(1, 4), (1, 70)]))
def test_fewer_queries_than_fresh_keys(implementation, sizes):
    """The queries are the last of the fresh positions: those of a later pass of a drafter."""
    T, F = sizes
    check(implementation, Shape(T, 4, 2, 64), [0, 201], fresh=F)
    check(implementation, Shape(T, 4, 2, 128, causal=False, sinks=True), [150, 3], fresh=F)


# Narrower than the fresh keys, and wider.
@pytest.mark.parametrize(("implementation", "window"), slow_on_tpu([3, 6, 100], [3, 100]))
def test_fewer_queries_than_fresh_keys_under_a_window(implementation, window):
    check(implementation, Shape(1, 4, 2, 64, window=window), [0, 201], fresh=4)
    check(implementation, Shape(3, 4, 2, 64, window=window), [0, 201], fresh=7)


BRANCHES = np.random.default_rng(5).random((2, 3, 7)) < 0.4
BRANCHES[:, :, 2] |= ~BRANCHES.any(axis=2)  # each query sees some fresh key, not always its own


@pytest.mark.parametrize(("implementation", "window"), slow_on_tpu([None, 6], [6]))
def test_fewer_queries_than_fresh_keys_with_visibility_for_each_row(implementation, window):
    assert not BRANCHES[:, [0, 1, 2], [4, 5, 6]].all()
    check(implementation, Shape(3, 4, 2, 64, window=window), [150, 3], mask=BRANCHES, fresh=7)
    check(implementation, Shape(3, 4, 2, 64, window=window), [150, 3], mask=BRANCHES[0], fresh=7)


def test_positions_of_fresh_keys_are_asked_for():
    q, k, v, cache_k, cache_v, positions, lengths, _ = draw(Shape(2, 4, 2, 64), [3], SLOTS, jnp.float32, fresh=4)
    few = q, positions, k, v, KV(cache_k, cache_v), lengths
    for asking in ({"window": 5}, {"starts": jnp.zeros((1, 2), jnp.int32)}):
        with pytest.raises(ValueError, match="a window and `starts` need `key_positions`"):
            attend(*few, visible="causal", **asking)
    with pytest.raises(ValueError, match="at least as many fresh keys as queries, got 1 for 2"):
        attend(q, positions, k[:, :, :1], v[:, :, :1], *few[4:], visible="causal")


def test_documents_of_fresh_keys():
    """`starts` hides fresh keys by their own positions."""
    shape = Shape(2, 4, 2, 64)
    q, k, v, cache_k, cache_v, positions, lengths, _ = draw(shape, [0], SLOTS, jnp.float32, fresh=5)
    call = {"visible": "causal", "starts": jnp.asarray([[2, 4]]), "key_positions": jnp.arange(5)[None]}
    got = attend(q, positions, k, v, KV(cache_k, cache_v), lengths, **call)
    own = np.asarray([[[0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]], bool)
    expected = dense(shape, q, k, v, cache_k, cache_v, positions, lengths, None, own)
    np.testing.assert_allclose(got, expected, atol=tolerance(got))


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_values_of_another_width(implementation):
    check(implementation, Shape(4, 4, 1, 128), [130, 40], values=64)


LATENT = SHAPES["kimi-k2.5 verify"]


def test_latents_for_a_tree_and_in_bfloat16():
    check("xla", LATENT._replace(T=10, N=8), [150, 3], mask=TREE)
    check("xla", LATENT._replace(N=8), [200, 129], dtype=jnp.bfloat16)


def test_values_of_latents_are_not_copied():
    """Nothing as large as the values of a cache is made, and the whole cache is read in more than tiny pieces."""
    T, N, S, spec = 8, 64, 65536, jax.ShapeDtypeStruct
    call = lambda q, at, k, cache, lengths: attend(
        q, at, k, k[..., :512], KV(cache, None), lengths, visible="causal", implementation="xla"
    )
    small = spec((1, T, N, 576), jnp.float32), spec((1, T), jnp.int32), spec((1, 1, T, 576), jnp.float32)
    program = jax.jit(call).lower(*small, spec((1, 1, S, 576), jnp.float32), spec((1,), jnp.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < S * 512 * 4 / 4
    for platform in ("gpu", "tpu"):  # bytes of a slot of one row, and queries
        with using(None, platform):
            assert slots_at_once(576 * 2, N * T) >= 2048
            assert slots_at_once(8 * 576 * 2, 8 * N * T) >= (2048 if platform == "gpu" else 256)


@pytest.mark.parametrize("lengths", [[0, 150], [320, 129]])
def test_expanded_latents_are_keys_and_values(lengths):
    """What `up` makes of a cache's latents chunk by chunk, against keys and values made at once."""
    N, T, C, R, plain, Hv = 3, 20, 24, 8, 12, 10
    rng = np.random.default_rng(0)
    fill = lambda *size: jnp.asarray(rng.standard_normal(size), jnp.float32)
    q, latents, cached = fill(2, T, N, plain + R), fill(2, 1, T, C + R), fill(2, 1, SLOTS, C + R)
    up, count = fill(N, plain + Hv, C) * C**-0.5, jnp.asarray(lengths, jnp.int32)
    expanded = jax.jit(expand, static_argnums=2)
    k, v = expanded(latents, up, plain + R)
    keys, values = expanded(cached, up, plain + R)
    shape, positions = Shape(T, N, N, plain + R), count[:, None] + jnp.arange(T)[None]
    own = np.tril(np.ones((2, T, T), bool))
    expected = dense(shape, q, k, v, keys, values, positions, count, None, own)
    held = jnp.arange(SLOTS)[None, None, :, None] < count[:, None, None, None]
    cache = KV(jnp.where(held, cached, jnp.nan), None)
    attended = jax.jit(partial(attend, visible="causal"), static_argnames="scale")
    got = attended(q, positions, k, v, cache, count, up=up)
    np.testing.assert_allclose(got, expected, atol=tolerance(got))
    one = attended(q[1:], positions[1:], k[1:], v[1:], cache, count[1:], up=up, rows=jnp.asarray([1]))
    np.testing.assert_allclose(one, expected[1:], atol=tolerance(got))
    absorbed = jnp.concatenate([jnp.einsum("btnh,nhc->btnc", q[..., :plain], up[:, :plain]), q[..., plain:]], axis=-1)
    short = attended(absorbed, positions, latents, latents[..., :C], cache, count, scale=(plain + R) ** -0.5)
    np.testing.assert_allclose(jnp.einsum("btnc,nvc->btnv", short, up[:, plain:]), expected, atol=tolerance(got))


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize(("length", "slots"), [(300, 128), (500, 192)])
def test_a_ring_reads_what_a_plain_cache_holds(implementation, length, slots):
    shape = Shape(4, 4, 2, 64, window=slots - 10)
    q, k, v, cache_k, cache_v, positions, lengths, _ = draw(shape, [length, 3], length, exact(implementation))
    at = np.arange(length - slots, length)
    ring = KV(
        *(
            jnp.full((2, 2, slots, 64), jnp.nan, x.dtype).at[:, :, at % slots].set(x[:, :, at])
            for x in (cache_k, cache_v)
        )
    )
    few = [r.at[1].set(jnp.nan).at[1, :, :3].set(x[1, :, :3]) for r, x in ((ring.k, cache_k), (ring.v, cache_v))]
    expected = dense(shape, q, k, v, cache_k, cache_v, positions, lengths, None, np.tril(np.ones((2, 4, 4), bool)))
    call = partial(attend, visible="causal", window=shape.window, implementation=implementation)
    with INTERPRETED[implementation]():
        got = jax.jit(call)(q, positions, k, v, KV(*few, ring=True), lengths)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=tolerance(got))


@pytest.mark.parametrize("implementation", INTERPRETED)
def test_rows_and_documents(implementation):
    """The block belongs to the second row of the cache, and a query sees nothing before its document."""
    shape = Shape(4, 4, 2, 64)
    q, k, v, cache_k, cache_v, positions, lengths, _ = draw(shape, [200, 250], SLOTS, exact(implementation))
    starts = jnp.asarray([[140, 140, 252, 252]])
    call = partial(attend, visible="causal", implementation=implementation)
    block = q[1:], positions[1:], k[1:], v[1:], KV(cache_k, cache_v), lengths[1:]
    with INTERPRETED[implementation]():
        got = jax.jit(call)(*block, rows=jnp.asarray([1]), starts=starts)
    arrays = [np.asarray(x)[1:] for x in (q, k, v, cache_k, cache_v)]
    arrays[3], arrays[4] = arrays[3][:, :, 140:], arrays[4][:, :, 140:]
    own = np.tril(np.ones((1, 4, 4), bool))
    first = dense(shape, *arrays, positions[1:] - 140, lengths[1:] - 140, None, own)
    got, atol = np.asarray(got, np.float64), tolerance(got)
    np.testing.assert_allclose(got[:, :2], first[:, :2], atol=atol)
    own = own & (np.arange(4) >= 2)[None, None]
    second = dense(shape, *arrays, positions[1:], 0 * lengths[1:], None, own | np.eye(4, dtype=bool))
    np.testing.assert_allclose(got[:, 2:], second[:, 2:], atol=atol)


PACKED = [
    Shape(256, 4, 2, 128),
    Shape(128, 2, 1, 256, softcap=20.0),
    Shape(256, 4, 1, 128, window=50),
    Shape(128, 4, 2, 128, sinks=True),
]


@pytest.mark.parametrize("implementation", INTERPRETED)
@pytest.mark.parametrize("shape", [*PACKED[:2], *(pytest.param(shape, marks=pytest.mark.slow) for shape in PACKED[2:])])
def test_packed_rows_without_a_cache(implementation, shape):
    call, arguments, expected = packed_rows(shape, exact(implementation))
    if implementation == "gpu" and shape.softcap is not None:
        with pytest.raises(ValueError, match="0 slots; it supports multiples of 64"):
            call("gpu", *arguments)
        return
    with INTERPRETED[implementation]():
        got = jax.jit(call, static_argnums=0)(implementation, *arguments)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=max(1e-5, tolerance(got)))


ALONE = [name for name in INTERPRETED if name != "xla"]


@pytest.mark.parametrize("implementation", ALONE)
@pytest.mark.parametrize("shape", [PACKED[3], *(pytest.param(shape, marks=pytest.mark.slow) for shape in PACKED[1:3])])
def test_gradients_of_packed_rows(implementation, shape):
    if implementation == "gpu" and shape.softcap is not None:
        pytest.skip("it declines a softcap, as the test above shows")
    call, arguments, _ = packed_rows(shape, exact(implementation))
    loss = lambda name: lambda *x: jnp.sum(jnp.sin(call(name, *x).astype(jnp.float32)))
    gradient = lambda name: jax.grad(loss(name), argnums=(0, 1, 2, 4) if shape.sinks else (0, 1, 2))
    of = lambda name, arguments: jax.jit(gradient(name))(*arguments)
    with INTERPRETED[implementation]():
        mine = of(implementation, arguments)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arguments)
    for one, other in zip(mine, of("xla", wide), strict=True):
        atol = 1e-4 if one.dtype == jnp.float32 else 0.01 * max(1, float(jnp.max(jnp.abs(other))))
        np.testing.assert_allclose(np.asarray(one, np.float64), other, atol=atol)


def test_packed_rows_that_splash_declines():
    call, arguments, expected = packed_rows(PACKED[0]._replace(T=100))
    with INTERPRETED["tpu"]():
        with pytest.raises(ValueError, match="100 positions; it supports multiples of 128"):
            call("tpu", *arguments)
        with using("tpu"):
            np.testing.assert_allclose(call(None, *arguments), expected, atol=1e-5)


def packed_rows(shape, dtype=jnp.float32):
    """A call of `attend` by an implementation's name, its arguments, and what it must give."""
    T = shape.T
    q, k, v, *_, sinks = draw(shape, [0, 0], 1, dtype)
    starts = np.zeros((2, T), np.int32)
    starts[0, 40:], starts[0, 90:], starts[1, T - 3 :] = 40, 90, np.arange(T - 3, T)
    positions, lengths = jnp.broadcast_to(jnp.arange(T), (2, T)), jnp.zeros(2, jnp.int32)
    own = np.tril(np.ones((T, T), bool)) & (np.arange(T)[None, None] >= starts[:, :, None])
    empty = jnp.zeros((2, shape.K, 0, shape.H), dtype)
    expected = dense(shape, q, k, v, empty, empty, positions, lengths, sinks, own)

    def call(implementation, q, k, v, starts, sinks):
        options = {"window": shape.window, "softcap": shape.softcap, "sinks": sinks, "starts": starts}
        none = empty.astype(k.dtype)
        block = q, positions, k, v, KV(none, none), lengths
        return attend(*block, visible="causal", **options, implementation=implementation)

    return call, (q, k, v, jnp.asarray(starts), sinks), expected


def specifications(rows, T, N, K, H):
    """Of queries, positions, keys and values of a block, its cache and lengths."""
    spec = lambda *size, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(size, dtype)
    block, keys, ints = spec(rows, K, T, H), spec(rows, K, 4096, H), spec(rows, dtype=jnp.int32)
    return spec(rows, T, N, H), spec(rows, T, dtype=jnp.int32), block, block, KV(keys, keys), ints


@pytest.mark.parametrize("rows", [2, 133])
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.H <= 256])
def test_lowers_for_cuda(name, rows, monkeypatch):
    """As far as this goes without a GPU: layouts are inferred and the kernel is handed to the CUDA plugin. Caches of
    many rows are not split."""
    monkeypatch.undo()
    how = {"softcap": SHAPES[name].softcap, "window": SHAPES[name].window, "implementation": "gpu"}
    call = lambda *arguments: attend(*arguments, visible="causal", **how)
    lowered = jax.jit(call).trace(*specifications(rows, *SHAPES[name][:4])).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_layers_alike_are_lowered_once(monkeypatch):
    monkeypatch.undo()
    kernel, traced = mosaic_gpu._kernel, []
    monkeypatch.setattr(mosaic_gpu, "_kernel", lambda *refs, **sizes: (traced.append(1), kernel(*refs, **sizes))[1])

    def layers(x, *block):
        for _ in range(3):
            x = attend(x, *block, visible="causal", implementation="gpu")
        return x

    block = specifications(3, *SHAPES["qwen3-8b verify"][:4])
    lowered = jax.jit(layers).trace(*block).lower(lowering_platforms=("cuda",)).as_text()
    assert (lowered.count("@mosaic_gpu_v2"), len(traced)) == (3, 1)
