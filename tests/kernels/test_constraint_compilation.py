"""What constraints add to a decoding step on a GPU, as its compiler has it."""

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.benchmarks import planning
from dflash_jax.benchmarks.compiled import launches
from dflash_jax.decoding.automata import Automata, Walk
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.compiler_options import BLOCK_OPTIONS
from dflash_jax.infer.engine.constraints import CELLS
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.graphs import GRAPH_OPTIONS
from dflash_jax.infer.engine.programs import decode_call
from dflash_jax.mesh import make_mesh, parse_mesh
from tests.chips import topology
from tests.kernels.test_gpu_compilation import PAIRS, compiling_for, cut

VERIFY, DEPTH, WALK = 5, 4, 6  # most kernels more: in every step; where a row has one, at each depth, and in all
STATES = 2**14


def tables(size, sharding):
    """Shapes of an engine's tables."""
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)
    of_states = (shape(jnp.int32, STATES) for _ in range(3))
    masks, cells = shape(jnp.uint32, STATES // 8, -(-size // 32)), shape(jnp.int16, CELLS * STATES)
    return Automata(masks, *of_states, cells, shape(jnp.int16, 64, size))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [0, 16])
def test_they_add_few_kernels(block_size, tmp_path):
    """All in the one CUDA graph of the step, and those of proposals only where a row is constrained."""
    target, drafter = PAIRS["qwen3-8b"]
    taps = {"dflash_config": drafter["dflash_config"] | {"target_layer_ids": [0]}}
    pair = cut(target, 2), cut(drafter | taps, 1) | {"num_target_layers": 2}
    devices = topology("h100")
    mesh = make_mesh(parse_mesh("data=1", devices), devices)
    options, kernels = BLOCK_OPTIONS["gpu"] | GRAPH_OPTIONS, {}
    memory = dict[bool, int]()
    with compiling_for("h100"), jax.set_mesh(mesh):
        for constrained in (False, True):
            dump = tmp_path / str(constrained)
            made = options | {"xla_dump_to": str(dump)}
            *models, state = planning.placed_shapes(pair, mesh, 1, 1024)
            automata, row = None, state.remaining
            if constrained:
                replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
                automata, state = tables(target["vocab_size"], replicated), state.replace(walk=Walk(row, row))
            how = 16, 0, Draft(block_size), EngineConfig(constraints=constrained)
            call, given = decode_call(*models, state, *how, options=made, automata=automata)
            compiled = call.lower(*given).compile()
            kernels[constrained] = launches(dump)
            memory[constrained] = compiled.memory_analysis().temp_size_in_bytes
    without, found = kernels[False], kernels[True]
    assert (found["graphs"], found["host_decisions"]) == (without["graphs"], without["host_decisions"])
    depth = max(block_size - 1, 0)
    assert found["kernels"] <= without["kernels"] + VERIFY
    assert found["conditional_kernels"] <= without["conditional_kernels"] + DEPTH * depth + WALK
    wide = 4 * (depth + 1) * target["vocab_size"]  # bytes of an array of logits; there is not one more
    assert memory[True] < memory[False] + wide / 2
