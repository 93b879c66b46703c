"""Keys and values as codes of 8 bits: each position is one and the same, read from the block or from the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.cache import Fresh, commit, pages, size_in_bytes
from dflash_jax.cache.int8 import Codes, Int8KV
from dflash_jax.kernels.block_attention import reference
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny

FAMILIES = [
    pytest.param(name, marks=() if name == "qwen3" else pytest.mark.slow)
    for name in ("qwen3", "gemma4", "gpt_oss", "qwen3_next", "minimax_m2")
    if name in tiny.FAMILIES or name == "qwen3"
]


def pair(directory, family="qwen3", mesh=None):
    raw = tiny.target_config(model_type=family) | tiny.FAMILIES.get(family, {})
    raw.pop("quantization_config", None)
    tiny.write_target(directory / "target", raw)
    tiny.write_drafter(directory / "drafter", tiny.drafter_config())
    return load_target(directory / "target", mesh=mesh), load_drafter(directory / "drafter", mesh=mesh)


def requests():
    head, asked = [(5 * i + 3) % 60 for i in range(24)], []
    for i, prompt in enumerate(([1, 2, 3], [*head, 7], [*head, 8, 9], head[:11], [5])):
        given = {"temperature": 0.6 * (i % 3), "repetition_penalty": 1.0 + 0.2 * (i % 2), "stop_token_ids": ()}
        asked += [tiny.ask(prompt, 12 + 5 * (i % 3), id=f"{i}", **given)]
    return asked


def answers(engine):
    return [done.token_ids for done in engine.generate(requests())]


SETTINGS = {"max_length": 64, "prefill_chunk": 8, "cache_dtype": "int8"}


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 3, "prefix_chunks": 8},
        {"slots": 3, "cache_tokens": 128, "tree": 9, "verify_budget": 4},
        pytest.param({"slots": 16, "steps_per_visit": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_plain_decoding_with_such_a_cache(family, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 16)
    target, drafter = pair(tmp_path, family)
    plain = answers(Engine(target, None, slots=1, **(SETTINGS | {"prefill_chunk": 32})))
    engine = Engine(target, drafter, **(SETTINGS | settings))
    assert answers(engine) == plain
    assert any(isinstance(entry, Int8KV) for entry in engine.batch.state.target_cache.entries)


@pytest.mark.lossless
@pytest.mark.slow
def test_on_a_mesh(tmp_path):
    devices = jax.devices()[:4]
    on = make_mesh(parse_mesh("data=2,model=2", devices), devices)
    alone = answers(Engine(pair(tmp_path)[0], None, slots=1, **SETTINGS))
    assert answers(Engine(*pair(tmp_path, mesh=on), slots=4, **SETTINGS, prefix_chunks=8)) == alone


def difference(target):
    """Between the last states of four tokens, read at once and one after the other."""
    target, states, tokens = target.replace(cache_dtype="int8"), [], jnp.asarray([[3, 1, 4, 1]])
    for width in (4, 1):
        cache, lengths = target.init_cache(1, 32), jnp.zeros(1, jnp.int32)
        for at in range(0, 4, width):
            positions = at + jnp.arange(width)[None]
            out, _, fresh = target.forward(tokens[:, at : at + width], positions, None, cache, lengths)
            cache = commit(cache, fresh, lengths, jnp.full(1, width))
            lengths = lengths + width
        states.append(np.asarray(out[0, -1]))
    return np.max(np.abs(states[0] - states[1]))


def test_a_block_attends_to_what_the_cache_will_hold(tmp_path, monkeypatch):
    target, _ = pair(tmp_path)
    assert difference(target) < 1e-5
    exact, widened = [], reference.widened

    def stored(_, fresh):
        exact.append((fresh.k, fresh.v))
        return Codes.of(fresh)

    def unquantized(k, v, scales, dtype):
        return exact[-1] if k.shape == exact[-1][0].shape else widened(k, v, scales, dtype)

    monkeypatch.setattr(Int8KV, "stored", stored)
    monkeypatch.setattr(reference, "widened", unquantized)
    jax.clear_caches()
    assert difference(target) > 1e-4


def test_codes():
    rng = np.random.default_rng(0)
    fresh = Fresh(*(jnp.asarray(rng.normal(size=(2, 3, 5, 8)), jnp.float32) for _ in range(2)))
    fresh = fresh.replace(k=fresh.k.at[0, 0, 0].set(0.0))
    codes = Codes.of(fresh)
    wide = Fresh(*reference.widened(codes.k, codes.v, codes.scales, jnp.float32))
    again = Codes.of(wide)
    for one, other in zip(jax.tree.leaves(codes), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    for x, y in zip(jax.tree.leaves(fresh), jax.tree.leaves(wide), strict=True):
        np.testing.assert_allclose(x, y, atol=0.5 / 127 * float(jnp.max(jnp.abs(x))) + 1e-6)


def test_memory(tmp_path):
    target, _ = pair(tmp_path)
    sizes = [
        size_in_bytes(Engine(target, None, max_length=64, cache_dtype=dtype).batch.state.target_cache.entries)
        for dtype in (None, "int8")
    ]
    head = target.config.layers[0].attention.head_dim
    assert sizes[1] / sizes[0] == pytest.approx((2 * head + 8) / (2 * head * 4))  # of float32
    with pytest.raises(ValueError, match='cache_dtype must be "int8" or None'):
        Engine(target, None, cache_dtype="int4")
