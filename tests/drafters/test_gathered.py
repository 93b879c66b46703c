"""Parameters of drafters that are split over `fsdp` are gathered where they are used, as those of targets are: the
alternative, which a compiler may prefer, is to compute all rows, or sums over their logits, on every device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.benchmarks.compiled import collectives
from dflash_jax.drafters import KINDS, drafter_config, kind_of
from dflash_jax.mesh import ROWS, make_mesh, parse_mesh
from dflash_jax.sharding import shardings
from tests import tiny

V, D, R = 1024, 64, 8


def drafter_on(mesh):
    """A DSpark drafter with a head of its own, of which there are shapes alone."""
    raw = tiny.drafter_config(architectures=["DSparkDraftModel"], markov_rank=R, draft_vocab_size=V)
    kind, config = KINDS[kind_of(raw)], drafter_config(raw | {"vocab_size": 2 * V, "hidden_size": D})
    config = replace(config, own_head=True)
    params = jax.eval_shape(lambda: {"lm_head": jnp.zeros((V, D)), "markov_head": {"markov_w2": jnp.zeros((V, R))}})
    spec = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    return kind.drafter(jax.tree.map(spec, params, shardings(params, mesh)), config, mesh=mesh)


def compiled(mesh, call, *arguments):
    with jax.set_mesh(mesh):
        return collectives(jax.jit(call).lower(*arguments).compile().as_text())


def unembed(drafter, hidden, latent):
    return drafter.unembed(None, hidden)


def bias(drafter, hidden, latent):
    return drafter.bias(latent)


def score(drafter, hidden, latent):
    return drafter.score(None, drafter.heads(), (hidden[0], latent[0]))


@pytest.mark.parametrize(("call", "most"), [(unembed, V * D), (bias, V * R), (score, V * D)])
@pytest.mark.parametrize("axes", ["fsdp=4", "fsdp=2,model=2"])
def test_a_weight_is_gathered_and_no_sums_over_it(axes, call, most):
    """For rows of which nothing is known, as inside a loop over them."""
    mesh = make_mesh(parse_mesh(axes, jax.devices()[:4]), jax.devices()[:4])
    given = jnp.zeros((1, 8, D)), jnp.zeros((1, 8, R))
    found = compiled(mesh, call, drafter_on(mesh), *jax.eval_shape(lambda: given))
    assert {c["kind"] for c in found} == {"all-gather"}
    assert max(c["bytes"] for c in found) == 4 * most // mesh.shape["model"]


@pytest.mark.parametrize("axes", ["fsdp=4", "fsdp=2,model=2"])
def test_rows_are_looked_up_in_a_table_that_stays_where_it_is(axes):
    mesh = make_mesh(parse_mesh(axes, jax.devices()[:4]), jax.devices()[:4])
    rows = NamedSharding(mesh, P(ROWS))
    latent = jax.ShapeDtypeStruct((8, 3, R), jnp.float32, sharding=rows)
    ids = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=rows)
    found = compiled(mesh, lambda drafter, *given: drafter.bias_of(*given), drafter_on(mesh), latent, ids)
    assert found
    assert max(c["bytes"] for c in found) <= 4 * 8 * 16 * R  # the rows that are asked for
    assert "collective-permute" not in {c["kind"] for c in found}
