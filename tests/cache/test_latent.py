"""Latent caches: on every mesh what they are on one device, and what engines make of them."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from dflash_jax import Engine, checkpoint, load_drafter, load_target, models
from dflash_jax.cache import Fresh
from dflash_jax.cache.latent import Latent
from dflash_jax.decoding.state import init_state
from dflash_jax.kernels.cache_update import append
from dflash_jax.mesh import Layout, make_mesh, owned_rows, parse_mesh
from dflash_jax.sharding import pin, state_shardings
from tests import tiny

R, S, T, N, C, ROTATED, PLAIN, VALUES = 4, 160, 6, 4, 16, 8, 10, 12


def mesh(axes):
    count = int(np.prod([int(part.split("=")[1]) for part in axes.split(",")]))
    return make_mesh(parse_mesh(axes, range(count)), jax.devices()[:count])


def drawn(*sizes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(size), jnp.float32) for size in sizes]


def used(entry, fresh, wide, q, up, rows):
    """What an entry gives and becomes; with `rows`, by a block of these."""
    B = fresh.k.shape[0]
    lengths = jnp.asarray([150, 3, 77, 0])[jnp.arange(R) if rows is None else rows]
    where = lengths[:, None] + jnp.arange(T)[None], fresh, lengths
    options = {"visible": "causal", "rows": rows, "starts": None, "up": up, "scale": 0.3}
    absorbed = entry.attend(wide, *where, expanded=False, **options)
    expanded = entry.attend(q, *where, expanded=True, **options)
    path = jnp.broadcast_to(jnp.asarray([0, 2, 1, 3]), (B, 4))
    kept = jnp.asarray([4, 0, 3, 1])[:B]
    after = entry.commit(fresh, lengths, kept, path=path, rows=rows)
    copied = after.restore(after.snapshot(jnp.int32(2), jnp.int32(60), 20), jnp.int32(1), jnp.int32(25))
    return absorbed, expanded, after, copied


# Rows split over all axes; rows split as those of other caches, with more devices than rows; one part of several.
@pytest.mark.parametrize("axes", ["data=2,model=2", "model=8", "expert=2,model=2", "data=2", "data=4,expert=2"])
@pytest.mark.parametrize("rows", [[3, 0], *(pytest.param(rows, marks=pytest.mark.slow) for rows in (None, [2]))])
def test_a_mesh_changes_nothing(axes, rows):
    B = R if rows is None else len(rows)
    if "data" in axes and rows is not None:
        rows = [0, 3] if B == 2 else rows  # each part has one of its own
    vectors = C + ROTATED
    latents, k, wide, q, up = drawn(
        (R, 1, S, vectors), (B, 1, T, vectors), (B, T, 2 * N, vectors), (B, T, 2 * N, PLAIN + ROTATED), (8, 22, C)
    )
    rows = None if rows is None else jnp.asarray(rows)
    arguments = Latent(latents, None), Fresh(k, None), wide, q, up, rows
    expected = jax.jit(used)(*arguments)
    with jax.set_mesh(mesh(axes)):
        got = jax.jit(lambda *x: used(pin(x[0]), *x[1:]))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), expected, got)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("tpu", marks=pytest.mark.slow)])
def test_devices_write_their_own_rows_alone(implementation, monkeypatch):
    """Rows of a block that other devices hold must not stand where a device's own are: a kernel would write these back
    as it had read them."""
    cache, block = drawn((4, 1, 128, C + ROTATED), (3, 1, T, C + ROTATED))
    lengths, kept, rows = (jnp.asarray(x) for x in ([9, 9, 9], [T, 2, 4], [2, 0, 3]))
    expected = np.array(cache)
    for b in range(3):
        expected[rows[b], 0, 9 : 9 + kept[b]] = block[b, 0, : kept[b]]
    # The interpreter knows no places of arrays.
    monkeypatch.setattr(pltpu, "with_memory_space_constraint", lambda x, place: x)
    with jax.set_mesh(mesh("model=2")), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = append(cache, block, lengths, kept, rows, implementation=implementation)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_of_a_writer_are_all_different(count):
    clipped, owned = jnp.asarray([0, 0, 0, 0]), jnp.asarray([False, True, False, False])
    at, rows, here = owned_rows(clipped, owned, count)
    assert at[0] == 1
    assert here.tolist() == [True] + [False] * (len(here) - 1)
    assert rows[0] == 0
    assert len(set(rows.tolist())) == len(rows) == min(4, count)


def test_packed_documents_without_a_cache(pair):
    """Rows as training takes them: each document as if it stood alone."""
    target = load_target(pair / "target")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 60, (1, 60)))
    starts = jnp.asarray([[0] * 25 + [25] * 35])
    at = jnp.arange(60)[None]
    packed, *_ = target.forward(tokens, at, None, target.init_cache(1, 0), starts=starts)
    for first, last in ((0, 25), (25, 60)):  # absorbed, and expanded as the whole row
        alone, *_ = target.forward(tokens[:, first:last], at[:, : last - first], None, target.init_cache(1, 0))
        np.testing.assert_allclose(packed[:, first:last], alone, atol=1e-5)


def test_what_is_committed_is_the_path():
    latents, k = drawn((2, 1, 32, C + ROTATED), (2, 1, T, C + ROTATED))
    entry = Latent(latents, None)
    after = entry.commit(Fresh(k, None), jnp.asarray([5, 9]), jnp.asarray([3, 0]), path=jnp.asarray([[0, 3, 4]] * 2))
    expected = np.array(latents)
    expected[0, 0, 5:8] = k[0, 0, [0, 3, 4]]
    np.testing.assert_array_equal(after.k, expected)
    assert after.v is None


@pytest.mark.parametrize(
    ("axes", "slots", "held"),
    [("data=2,model=2", 4, 1), ("model=4", 4, 1), ("model=4", 8, 2), ("model=4", 2, 2), ("data=2,model=4", 4, 2)],
)
def test_rows_are_split_over_all_axes_that_divide_them(pair, axes, slots, held):
    """One latent head cannot be split; where rows are fewer than devices, those of an axis of heads hold the same."""
    on = mesh(axes)
    target = load_target(pair / "target", mesh=on)
    state = jax.eval_shape(lambda: init_state(target, None, slots, 64, 2))
    entry = state.target_cache.entries[0]
    sharding = state_shardings(state, on).target_cache.entries[0].k
    assert sharding.shard_shape(entry.k.shape) == (held, 1, 64, 16 + 8)
    assert len(jax.tree.leaves(entry)) == 1  # values are no array of their own


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    directory = tmp_path_factory.mktemp("latent")
    raw = tiny.target_config(model_type="deepseek_v3", **tiny.FAMILIES["deepseek_v3"])
    tiny.write_target(directory / "target", raw)
    tiny.write_drafter(directory / "drafter", tiny.drafter_config())
    return directory


def test_very_many_tensors_are_opened_fast(tmp_path):
    """Kimi's experts are 69,120 weights of three tensors each; of two layers with as many experts, on eight devices."""
    changes = {"n_routed_experts": 384, "num_hidden_layers": 3, "moe_intermediate_size": 256, "num_attention_heads": 8}
    changes |= {"num_key_value_heads": 8, "tie_word_embeddings": False, "intermediate_size": 256}
    raw = tiny.target_config(model_type="kimi_k25", **tiny.FAMILIES["kimi_k25"] | changes)
    config = models.target_config(raw)
    begin = time.process_time()
    table = models.family("kimi_k25").tensors(config, Layout(8))
    assert sum(len(leaf.parts) for _, leaf in checkpoint.leaves(table)) > 2 * 384 * 2 * (16 + 1)
    assert time.process_time() - begin < 2  # where each part was checked it took five
    tensors = {}
    for _, leaf in checkpoint.leaves(models.family("kimi_k25").tensors(config)):
        for part in leaf.parts:
            for name, how in part.source.stored.items():
                tensors[name] = np.zeros(how.shape, checkpoint.sources.DTYPES[how.dtypes[0]])
    tiny.write(tmp_path, raw, tensors)
    load_target(tmp_path)  # imports and programs
    begin = time.process_time()
    load_target(tmp_path)
    assert time.process_time() - begin < 5e-4 * len(tensors)


def requests():
    head = [(7 * i + 3) % 60 for i in range(40)]
    prompts = [[5, 9, 11], [*head, 1], [*head[:36], 2, 3], [40], [*head, *head[:9]], [7, 7, 30, 31]]
    given = {"repetition_penalty": 1.2, "presence_penalty": 0.4}
    return [tiny.ask(p, 16, 0.5 * (i % 3), id=str(i), **(given if i % 2 else {})) for i, p in enumerate(prompts)]


def answers(pair, *, axes=None, drafter=True, **settings):
    on = None if axes is None else mesh(axes)
    both = load_target(pair / "target", mesh=on), load_drafter(pair / "drafter", mesh=on) if drafter else None
    engine = Engine(*both, max_length=96, **settings)
    return [done.token_ids for done in engine.generate(requests())], engine


@pytest.fixture(scope="module")
def plain(pair):
    return answers(pair, drafter=False)[0]


FAST = {"slots": 3, "prefill_chunk": 8, "prefix_chunks": 16}  # prompts attend absorbed
SLOW = [
    {"slots": 4, "axes": "data=2,model=2", "prefill_chunk": 32},  # and expanded
    {"slots": 3, "prefill_chunk": 8, "cache_tokens": 128},
    {"slots": 3, "prefill_chunk": 32},
    {"slots": 16, "block_size": 3},  # narrow programs
    {"slots": 4, "axes": "expert=2,model=2", "prefix_chunks": 16, "prefill_chunk": 8},
    {"slots": 2, "axes": "model=4", "prefix_chunks": 16, "prefill_chunk": 8},
    {"slots": 16, "axes": "model=4", "prefill_chunk": 16, "cache_tokens": 512},
]

MORE = [pytest.param(each, marks=pytest.mark.exhaustive) for each in SLOW[1:]]


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings", [*(pytest.param(each, marks=pytest.mark.slow) for each in (FAST, SLOW[0])), *MORE], ids=str
)
def test_speculation_chunks_slots_prefixes_and_meshes_change_nothing(pair, plain, settings):
    got, engine = answers(pair, **settings)
    assert got == plain
    if settings.get("prefix_chunks"):
        assert engine.stats.prefix_tokens > 0
