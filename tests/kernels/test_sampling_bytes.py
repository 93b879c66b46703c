"""What top-k, top-p and min-p add to the bytes a sampled step moves, as compiled for a TPU from configurations alone.

A compiler counts a loop's body once, so that the search's passes are written out here, every one.
"""

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.benchmarks.compiled import collectives, memory_bytes
from dflash_jax.benchmarks.planning import compile_step, traced
from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.benchmarks.topologies import compiling_for
from dflash_jax.decoding import sampling
from dflash_jax.mesh import AXES, make_mesh, parse_mesh
from dflash_jax.sharding import P
from tests.chips import topology

CHIPS, ROWS, SLOTS, WIDTH, VOCABULARY = "v5e:2x2", 8, 512, 16, 151936
SCORES = 4 * ROWS * WIDTH * VOCABULARY  # bytes
LAYERS = 6  # of a cut target: the least that has five to tap

pytestmark = pytest.mark.slow


def unrolled(start, stop, body, carry):
    for i in range(start, stop):
        carry = body(i, carry)
    return carry


@pytest.fixture
def certain(monkeypatch):
    """Says whether filters are certain to be taken, or certain not to be; sampling itself is."""
    filter_scores, if_any = sampling.filter_scores, lambda rows, then, otherwise: then()

    def choose(filters):
        def filtering(scores, settings):
            with monkeypatch.context() as inner:
                inner.setattr(sampling, "if_any", if_any if filters else lambda rows, then, otherwise: otherwise())
                inner.setattr(jax.lax, "fori_loop", unrolled)
                return filter_scores(scores, settings)

        monkeypatch.setattr(sampling, "if_any", if_any)
        monkeypatch.setattr(sampling, "filter_scores", filtering)

    return choose


def one_axis(devices):
    chips = topology(CHIPS)[:devices]
    return make_mesh(parse_mesh(f"model={devices}", chips), chips)


def compile_choice(devices=1):
    """`select` with the vocabulary split over `devices`."""
    mesh = one_axis(devices)
    place = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
    settings = jax.tree.map(lambda x: place(x, P()), jax.eval_shape(lambda: sampling.greedy_rows(ROWS)))
    logits = place(jax.ShapeDtypeStruct((ROWS, WIDTH, VOCABULARY), jnp.float32), P(None, None, "model"))
    with compiling_for(CHIPS), jax.set_mesh(mesh):
        return jax.jit(lambda *given: sampling.select(*given)).lower(logits, logits, settings).compile()


def compile_pair(name, layers):
    """A step of the pair with its target cut to `layers`, for one chip."""
    target, drafter = PAIRS[name]
    target = target | {"num_hidden_layers": layers}
    taps = drafter["dflash_config"] | {"target_layer_ids": [0, 1, 2, 3, 4]}
    drafter = drafter | {"num_target_layers": layers, "dflash_config": taps}
    with compiling_for(CHIPS):
        return compile_step((target, drafter), one_axis(1), ROWS, SLOTS, WIDTH)


def bytes_accessed(program):
    return program.cost_analysis()["bytes accessed"]


def test_a_filtered_choice_reads_the_scores_fourteen_times_more(certain):
    """Six passes for top-k, six for top-p, and a sum of masses, each a little more than the scores."""
    certain(False)
    plain = bytes_accessed(compile_choice())
    certain(True)
    filtered = bytes_accessed(compile_choice())
    print(f"{plain / 1e9:.3f} GB of a plain choice, {filtered / 1e9:.3f} GB of a filtered one")
    assert 12 * SCORES < filtered - plain < 14 * SCORES


def test_split_vocabularies_exchange_counts_alone(certain):
    """All of a pass at once, eight passes for top-k and eight for top-p; and maxima, a sum of masses, the choice."""
    certain(True)
    found = collectives(compile_choice(devices=4).as_text())
    assert {c["kind"] for c in found} == {"all-reduce"}
    assert max(c["bytes"] for c in found) <= 15 * 4 * ROWS * WIDTH
    assert sum(c["count"] for c in found) <= 2 * 8 + 5


def scores_bytes(program):
    """What arrays over the vocabulary read from and write to the chip's own memory; without conditions (penalties)."""
    return memory_bytes(program.as_text(), lambda kind, size: kind in ("f32", "s32", "u32") and size >= 4 * VOCABULARY)


@pytest.mark.exhaustive
def test_filters_add_less_than_15_percent_to_a_step(certain):
    """By the compiler's count, of filters and of the step; and what they move to and from the chip's own memory, of the
    least that a step can read: all weights and caches once."""
    name = "qwen3-8b"
    certain(False)
    program = compile_pair(name, LAYERS)
    plain, deeper, moved = (
        bytes_accessed(program),
        bytes_accessed(compile_pair(name, LAYERS + 2)),
        scores_bytes(program),
    )
    certain(True)
    program = compile_pair(name, LAYERS)
    added, moved = bytes_accessed(program) - plain, scores_bytes(program) - moved
    # Every layer of the target moves the same.
    step = plain + (deeper - plain) / 2 * (PAIRS[name][0]["num_hidden_layers"] - LAYERS)
    least = traced(PAIRS[name], dict.fromkeys(AXES, 1), ROWS, SLOTS, WIDTH)["bytes_accessed"]
    print(
        f"{name}: {added / 1e9:.2f} GB of filters by the compiler's count, {moved / 1e9:.2f} GB from the chip's own "
        f"memory; a plain step {step / 1e9:.2f} GB, at least {least / 1e9:.2f} GB"
    )
    assert added > 2 * 12 * SCORES * (WIDTH - 1) / WIDTH  # of target and drafter: nothing has hidden a pass
    assert least < step
    assert 1 + added / step <= 1.15
    assert moved > SCORES
    assert 1 + moved / least <= 1.15
