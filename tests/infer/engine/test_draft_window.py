"""A drafter that sees the first page and the last positions: its cache stops growing, and no answer changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import Engine, load_drafter, load_target
from dflash_jax.cache import KV, Fresh, Recent, commit, init_cache, pages, size_in_bytes
from dflash_jax.config import AttentionConfig
from dflash_jax.kernels.block_attention import attend
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny

PAGE = 16
KINDS = [pytest.param(kind, marks=() if kind == "dflash" else pytest.mark.slow) for kind in tiny.kinds()]


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(pages, "PAGE", PAGE)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("window")
    tiny.write_target(directory / "target", tiny.target_config())
    for kind, raw in tiny.kinds().items():
        tiny.write_drafter(directory / kind, raw)
    return directory


def requests():
    head = [(7 * i + 3) % 60 for i in range(64)]
    prompts = [[5, 9, 11], [*head, 1], [*head, 2, 3], head[:30], [*head, *head[:20]], [40] * 7]
    return [tiny.ask(prompt, 60, 0.6 * (i % 3), id=str(i), stop_token_ids=()) for i, prompt in enumerate(prompts)]


def outcome(engine):
    done = engine.generate(requests())
    return [one.token_ids for one in done], [one.acceptance_lengths for one in done]


SETTINGS = {"max_length": 160, "slots": 3, "steps_per_visit": 4, "prefill_chunk": 32}


@pytest.fixture(scope="module")
def target(directory):
    return load_target(directory / "target")


@pytest.fixture(scope="module")
def plain(target):
    return outcome(Engine(target, None, **SETTINGS))[0]


@pytest.mark.lossless
@pytest.mark.parametrize(
    "settings",
    [
        {"draft_window": 20, "prefix_chunks": 8},
        pytest.param({"draft_window": 20, "prefix_chunks": 8, "cache_tokens": 320}, marks=pytest.mark.slow),
        pytest.param({"draft_window": 1, "tree": 6}, marks=pytest.mark.slow),
        pytest.param({"draft_window": 40, "deterministic": True, "max_length": 512}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_answer_changes(kind, settings, directory, target, plain):
    drafter = load_drafter(directory / kind, num_target_layers=4)
    engine = Engine(target, drafter, **(SETTINGS | settings))
    assert outcome(engine)[0] == plain
    if settings.get("prefix_chunks"):
        assert engine.stats.prefix_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny.kinds())
def test_a_window_as_long_as_the_rows_changes_no_proposal(kind, directory, target):
    drafter = load_drafter(directory / kind, num_target_layers=4)
    whole, windowed = (Engine(target, drafter, **SETTINGS, draft_window=window) for window in (None, 160))
    assert outcome(whole) == outcome(windowed)


@pytest.mark.lossless
@pytest.mark.slow
def test_on_a_mesh(directory, plain):
    devices = jax.devices()[:4]
    on = make_mesh(parse_mesh("data=2,model=2", devices), devices)
    pair = load_target(directory / "target", mesh=on), load_drafter(directory / "dflash", num_target_layers=4, mesh=on)
    assert outcome(Engine(*pair, **(SETTINGS | {"slots": 4}), draft_window=20))[0] == plain


def test_the_cache_stops_growing(directory, target):
    drafter = load_drafter(directory / "dflash", num_target_layers=4)
    sizes = {}
    for length in (160, 1600):
        for window in (None, 20):
            given = SETTINGS | {"max_length": length}
            engine = Engine(target, drafter, **given, draft_window=window)
            sizes[length, window] = size_in_bytes(engine.batch.state.draft.entries)
    assert sizes[160, 20] == sizes[1600, 20] < sizes[160, None] < sizes[1600, None]
    with pytest.raises(ValueError, match="draft_window must be at least 1"):
        Engine(target, drafter, draft_window=0)


@pytest.mark.slow
def test_what_is_seen():
    """Attention through the window against attention to the first page and the last positions alone."""
    mixer, rng, window = AttentionConfig(4, 2, 8, None), np.random.default_rng(0), 20
    made = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    rows, length = 3, 96
    keys, values = (made(rows, 2, length, 8) for _ in range(2))
    cache = init_cache([mixer], rows, Recent(length, window), jnp.float32, widest=8)
    lengths = np.asarray([7, 41, 96])
    done = np.zeros(rows, np.int32)
    while np.any(done < lengths):
        kept = np.minimum(8, lengths - done)
        at = np.minimum(done[:, None] + np.arange(8)[None], length - 1)
        block = Fresh(*(jnp.take_along_axis(x, at[:, None, :, None], axis=2) for x in (keys, values)))
        cache = commit(cache, (block,), jnp.asarray(done), jnp.asarray(kept, jnp.int32))
        done += kept.astype(np.int32)
    q, fresh = made(rows, 5, 4, 8), Fresh(made(rows, 2, 5, 8), made(rows, 2, 5, 8))
    positions = jnp.asarray(lengths)[:, None] + jnp.arange(5)[None]
    given = {"visible": "full", "rows": None}
    out = cache.entry(0).attend(q, positions, fresh, jnp.asarray(lengths), **given)
    for row in range(rows):
        # Whole pages of the last ones, and at least the window.
        first = max(PAGE, ((lengths[row] - 1) // PAGE - -(-(window - 1) // PAGE)) * PAGE)
        seen = [p for p in range(lengths[row]) if p < PAGE or p >= first]
        assert lengths[row] <= PAGE or len([p for p in seen if p >= lengths[row] - window]) == min(window, lengths[row])
        one = KV(keys[row : row + 1, :, seen], values[row : row + 1, :, seen])
        part = jax.tree.map(lambda x, row=row: x[row : row + 1], (q, positions, fresh))
        expected = attend(
            part[0], part[1], part[2].k, part[2].v, one, jnp.asarray([len(seen)]), visible="full", implementation="xla"
        )
        np.testing.assert_allclose(out[row : row + 1], expected, atol=1e-5)
