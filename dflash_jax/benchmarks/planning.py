"""What a pair needs on a machine, from its configurations alone: `python -m dflash_jax.plan`.

The step is compiled by the real compiler, on any Linux host (`.[tpu]`, `.[cuda-compiler]`): memory and collectives are
the compiler's own. Bytes and operations of a step, and the times they allow, follow from the traced functions and from
what is published of the chip; they say what a step cannot beat.
"""

import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.stages import Compiled

from dflash_jax import models, sharding
from dflash_jax.benchmarks import step_times, topologies
from dflash_jax.benchmarks.arguments import Figures, PlanOptions
from dflash_jax.benchmarks.compiled import launches, measured, memory_bytes, text_of
from dflash_jax.benchmarks.costs import cost
from dflash_jax.benchmarks.planned_prompts import prefill_budget, prompt_shapes
from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.benchmarks.random_weights import Pair, placed, random_pair
from dflash_jax.cache import Pages, Windowed, size_in_bytes
from dflash_jax.checkpoint import read_json, resolve
from dflash_jax.chips import CHIPS, Chip
from dflash_jax.config import Raw, TargetConfig
from dflash_jax.decoding.prompts import Prompts
from dflash_jax.decoding.state import State, init_state
from dflash_jax.decoding.step import Committed, speculative_step, step_functions
from dflash_jax.drafters import drafter_config
from dflash_jax.drafters.base import Drafter
from dflash_jax.drafters.config import DrafterConfig
from dflash_jax.drafters.ngram import named
from dflash_jax.files import reading
from dflash_jax.infer.engine.compiler_options import BLOCK_OPTIONS
from dflash_jax.infer.engine.constraints import room_for
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.graphs import GRAPH_OPTIONS
from dflash_jax.infer.engine.memory import RESERVE, row_bytes
from dflash_jax.infer.engine.params import STOP_WIDTH
from dflash_jax.kernels.dispatch import platform
from dflash_jax.mesh import AXES, HEADS, ROWS, AnyMesh, make_mesh, parse_mesh, parts_of, rows_of
from dflash_jax.overrides import overridden
from dflash_jax.target import Target

LENGTHS = 4096, 8192, 32768  # tokens of a request, prompt and answer, for which the most requests are stated
Room = int | Pages | Windowed  # for the rows of a batch: see `decoding.state.init_state`


def plan(options: PlanOptions) -> Figures:
    """The figures of `plan_table.table`; raises ValueError for what cannot be planned."""
    topology = topologies.full_name(options.topology)
    name, count = topologies.parse_topology(topology)
    chip, tau = CHIPS[name], None if options.training else options.tau
    target, drafter = _configs(options.target, options.drafter)
    quantised = dict(options.quantize) | ({} if options.cache_dtype == "auto" else {"cache": options.cache_dtype})
    raws = overridden(target, options.target_config), overridden(drafter, options.drafter_config), quantised
    compiling = topologies.has_compiler(topology)
    devices = topologies.topology(topology) if compiling else list(range(count))
    if options.mesh != "auto":
        sizes = parse_mesh(options.mesh, devices)
    elif options.training:
        sizes = parse_mesh("fsdp=-1", devices)
    else:
        sizes = sharding.auto_mesh(_parsed(raws), len(devices), len(devices))
    parts = sizes["data"] * sizes["fsdp"]
    if options.batch_size % parts:
        raise ValueError(
            f"--batch-size {options.batch_size} must be a multiple of the {parts} data-parallel parts of the mesh"
        )
    figures: Figures = {"topology": topology, "devices": len(devices), "mesh": sizes}
    figures |= {"quantize": dict(options.quantize)} if options.quantize else {}
    figures |= {"batch": options.batch_size, "max_length": options.max_length, "chip_bytes": chip.memory}
    slots: Room = options.max_length
    if options.cache_tokens is not None:
        slots = Pages.room(options.cache_tokens, options.max_length, parts)
        figures |= {"pages": slots.total - parts, "page": slots.size}
    if options.draft_window is not None:
        slots = Windowed(slots, options.draft_window)
    shape = options.batch_size, slots, options.block_size, options.tree, options.verify_budget
    if options.prefill_budget:
        figures["prefill_budget"] = prefill_budget(options, parts)
    if options.training and options.cache_tokens is not None:
        raise ValueError("--cache-tokens is for decoding; leave it or --training out")
    if options.training and options.parts:
        raise ValueError("--parts is for a decoding step; leave it or --training out")
    if options.training and "drafter" in options.quantize:
        raise ValueError("training keeps the drafter in float32; leave drafter=... out of --quantize")
    for flag in [flag for flag in ("training", "parts") if getattr(options, flag) and not compiling]:
        raise ValueError(f"--{flag} needs the CUDA compiler; install .[cuda-compiler], or choose a TPU topology")
    read = {"prompts": options.prefill_budget}
    if not compiling:
        figures |= traced(raws, sizes, *shape, **read)
    else:
        print(f"compiling the step for {topology}: this takes a minute or more", file=sys.stderr, flush=True)
        mesh = make_mesh(sizes, devices)
        with topologies.compiling_for(topology):
            if options.training:
                from dflash_jax.benchmarks import training_plan  # needs what training needs

                figures |= training_plan.plan(raws, mesh, chip, options)
            else:
                with tempfile.TemporaryDirectory() as dump:
                    compiled = compile_step(raws, mesh, *shape, **read, dtype=topologies.dtype_for(name), dump=dump)
                    figures |= launches(Path(dump)) or {}
                figures |= measured(compiled)
            if options.parts:
                parts = part_bytes(raws, mesh, *shape, dtype=topologies.dtype_for(name))
                figures["part_bytes"] = {"step": figures["memory_bytes"]} | parts
        if not options.training:
            figures |= {"parts": traced(raws, sizes, *shape, **read)}
    if not options.training and options.cache_tokens is None:
        dtype, weights = topologies.dtype_for(name), figures.get("parts", figures)["weight_bytes"]
        figures["requests_by_length"] = requests_by_length(raws, sizes, chip, weights, options.draft_window, dtype)
    if not options.training:
        tables = room_for(_parsed(raws)[0].vocab_size, EngineConfig.constraint_states)
        figures["constraint_bytes"] = size_in_bytes(tables)
    figures["fits"] = figures["peak_bytes"] < chip.memory
    return figures if options.training else figures | least_time(chip, figures, tau, options.batch_size)


def _configs(target: str, drafter: str | None) -> tuple[Raw, Raw]:
    def read(source: str, what: str, parse: Callable[[Raw], object]) -> Raw:
        path = Path(source) if Path(source).is_file() else resolve(source, what) / "config.json"
        with reading(path):
            raw = read_json(path)
            parse(raw)  # what is wrong with it names the file
            return raw

    if drafter is None:
        if target not in PAIRS:
            raise ValueError(f"no drafter given: pass --drafter, or a --target of {', '.join(PAIRS)}")
        return PAIRS[target]
    if named(drafter)[0]:
        raise ValueError("--drafter ngram has no weights to plan for; pass the config.json of a drafter")
    first = PAIRS[target][0] if target in PAIRS else read(target, "target", models.target_config)
    depth = models.target_config(first).num_hidden_layers
    return first, read(drafter, "drafter", lambda raw: drafter_config(raw, depth))


def _parsed(raws: Pair) -> tuple[TargetConfig, DrafterConfig]:
    target = models.target_config(raws[0])
    drafter = drafter_config(raws[1], target.num_hidden_layers)
    drafter.check_pair(target)
    return target, drafter


# --------------------------------------------------------------------------------------------------
# By the compiler


def shapes(
    raws: Pair, mesh: AnyMesh | None, batch: int, max_length: Room, dtype: str = "bfloat16"
) -> tuple[Target, Drafter, State]:
    """A pair on a mesh and its decoding state, as shapes; nothing is allocated."""

    quantised = dict(*raws[2:])
    cache_dtype = quantised.pop("cache", None)

    def made() -> tuple[Target, Drafter, State]:
        target, drafter = random_pair(*raws[:2], quantised, dtype=jnp.dtype(dtype), mesh=mesh)
        target = target.replace(cache_dtype=cache_dtype)
        return target, drafter, init_state(target, drafter, batch, max_length, STOP_WIDTH)

    return jax.eval_shape(made)


def compile_step(
    raws: Pair,
    mesh: Mesh,
    batch: int,
    max_length: Room,
    block_size: int | None = None,
    nodes: int = 0,
    budget: int = 0,
    *,
    prompts: int = 0,
    dtype: str = "bfloat16",
    dump: str | None = None,
) -> Compiled:
    """The speculative step as compiled for the mesh's devices, its state donated; nothing is allocated.

    Args:
        block_size: 0 is a plain step, without the drafter; None is the drafter's own.
        prompts: tokens of prompts that it also reads.
        dump: a folder for what XLA writes of a program for GPUs, for `launches`.
    """

    def step(target: Target, drafter: Drafter, state: State, read: Prompts | None = None) -> tuple[State, Committed]:
        size = drafter.config.block_size if block_size is None else block_size
        after = None if read is None else read.after(state)
        parts = step_functions(target, drafter if size else None, size, nodes=nodes, budget=budget, prompts=after)
        state, committed = speculative_step(parts, state)
        return sharding.pin(state), committed

    return _compiled(step, raws, mesh, batch, max_length, dtype, dump, prompt_shapes(prompts, batch, rows_of(mesh)))


def part_bytes(
    raws: Pair,
    mesh: Mesh,
    batch: int,
    max_length: Room,
    block_size: int | None,
    nodes: int,
    budget: int = 0,
    *,
    dtype: str,
    names: Sequence[str] | None = None,
) -> dict[str, int | None]:
    """Bytes that each part of a step moves to and from a device's memory, each compiled alone; see `memory_bytes`.

    A program for a GPU does not say what it updates in place, so a cache counts whole there: compare a tree's parts
    with a chain's, not parts with the step. None stands for a program that cannot be written down. All parts are
    compiled, unless `names` says which.
    """
    how = {"block_size": block_size or _parsed(raws)[1].block_size, "nodes": nodes, "budget": budget}
    parts = {
        "draft": partial(step_times.draft, **how),
        "verify": partial(step_times.verify, **how),
        "verify of one token": lambda target, drafter, state: step_times.verify(target, None, state, block_size=0),
        "accept": partial(step_times.choose, **how),
        "commit": partial(step_times.commit, **how),
    }
    found = {}
    for name in names or parts:
        part = parts[name]
        pinned = lambda *pair, part=part: sharding.pin(part(*pair))
        text = text_of(_compiled(pinned, raws, mesh, batch, max_length, dtype))
        found[name] = None if text is None else memory_bytes(text)
    return found


def _compiled(
    step: Callable,
    raws: Pair,
    mesh: Mesh,
    batch: int,
    max_length: Room,
    dtype: str,
    dump: str | None = None,
    read: Prompts | None = None,
) -> Compiled:
    given = () if read is None else (read,)
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, donate_argnums=2).lower(*placed_shapes(raws, mesh, batch, max_length, dtype), *given)
        options = dict(BLOCK_OPTIONS.get(platform(), {}))
        if platform() == "gpu":
            options |= (GRAPH_OPTIONS if mesh.size == 1 else {}) | ({"xla_dump_to": dump} if dump else {})
        return lowered.compile(compiler_options=options)


def placed_shapes(
    raws: Pair, mesh: Mesh, batch: int, max_length: Room, dtype: str = "bfloat16"
) -> tuple[Target, Drafter, State]:
    """`shapes` with where each lies on the mesh."""
    target, drafter, state = shapes(raws, mesh, batch, max_length, dtype)
    target, drafter = (placed(x, sharding.shardings(x, mesh)) for x in (target, drafter))
    return target, drafter, placed(state, sharding.state_shardings(state, mesh))


# --------------------------------------------------------------------------------------------------
# From the trace


def traced(
    raws: Pair,
    sizes: dict[str, int],
    batch: int,
    length: Room,
    block_size: int | None,
    nodes: int = 0,
    budget: int = 0,
    *,
    prompts: int = 0,
) -> Figures:
    """Per device and step, at 16 bits a number: bytes of weights, of caches, what products read of them; operations.

    `draft_bytes` is what drafting reads, over all devices.
    `draft_upkeep` is what a step without speculation reads more because it keeps the drafter's state up to date, as a
    share of what it reads without a drafter. `node_flops` is what one more node of a tree costs. `prompts` is how many
    tokens of prompts the step also reads.
    """
    mesh = _abstract(sizes)
    target, drafter, state = shapes(raws, mesh, batch, length)
    weights = (_bytes_on_device(x, sharding.shardings(x, mesh)) for x in (target, drafter))
    held = state.target_cache, state.draft
    caches = _bytes_on_device(held, sharding.state_shardings(held, mesh))
    heads, rows = parts_of(mesh, HEADS), parts_of(mesh, ROWS)
    own = length.slots if isinstance(length, Windowed) else length
    if isinstance(own, Pages):  # all full: as long as they can be on average
        own = (own.total - rows) * own.size // batch
    length = Windowed(own, length.window) if isinstance(length, Windowed) else own
    pair = shapes(raws, None, batch, length)

    block_size = block_size or pair[1].config.block_size
    step = partial(step_times.fused, block_size=block_size, budget=budget)
    read = prompt_shapes(prompts, batch, 1)
    reading = lambda *pair, nodes: step(*pair[:3], nodes=nodes, prompts=pair[3] and pair[3].after(pair[2]))
    whole = cost(partial(reading, nodes=nodes), *pair, read)
    wider = cost(partial(reading, nodes=2 * nodes), *pair, read) if nodes else whole
    kept = cost(partial(step, block_size=0), *pair)
    plain = lambda target, state: step(target, None, state, block_size=0)
    alone = cost(plain, pair[0], pair[2].replace(draft=None))
    moved = (whole.bytes_read[0] + whole.bytes_read[1]) / heads + whole.bytes_read[2] / (heads * rows)
    width = budget or 1 + (nodes or pair[1].depth(block_size))
    block = jax.ShapeDtypeStruct((batch, width, pair[0].config.hidden_size), jnp.bfloat16)
    logits = size_in_bytes(jax.eval_shape(lambda target, hidden: target.unembed(hidden), pair[0], block))
    weight_bytes = sum(weights)
    return {
        "weight_bytes": weight_bytes,
        "cache_bytes": caches,
        # Beside weights and caches, the logits of target and drafter, and noise.
        "peak_bytes": weight_bytes + caches + 3 * logits // (heads * rows),
        "flops": whole.flops / (heads * rows),
        "nodes": nodes,
        "node_flops": (wider.flops - whole.flops) / (heads * rows) / max(nodes, 1),
        "bytes_accessed": moved,
        "draft_bytes": sum(whole.bytes_read) - sum(kept.bytes_read),
        "draft_upkeep": sum(kept.bytes_read) / sum(alone.bytes_read) - 1,
        "collectives": None,
    }


def _abstract(sizes: dict[str, int]) -> AbstractMesh:
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(sizes.get(name, 1) for name in AXES), AXES, axis_types=types)


def requests_by_length(
    raws: Pair, sizes: dict[str, int], chip: Chip, weights: int, window: int | None = None, dtype: str = "bfloat16"
) -> dict[int, int]:
    """How many requests can decode at the same time, by their length in tokens, with what a server leaves to programs
    and no cached prompts; no more than the target's own longest.

    Args:
        weights: bytes of a device.
        window: positions that the drafter sees; None is all.
    """
    mesh, target = _abstract(sizes), _parsed(raws)[0]
    target_shapes, drafter, _ = shapes(raws, mesh, rows_of(mesh), 1, dtype)
    free = (1 - RESERVE) * chip.memory - weights
    found = {}
    for length in LENGTHS:
        if length <= (target.most_positions or length):
            room = length if window is None else Windowed(length, window)
            row = sum(row_bytes(target_shapes, drafter, room))
            found[length] = max(0, int(free // row)) * rows_of(mesh)
    return found


def _bytes_on_device(tree: Any, shardings: Any) -> int:
    part = lambda x, s: jax.ShapeDtypeStruct(s.shard_shape(x.shape), x.dtype)
    keyless = lambda x: not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True)
    return size_in_bytes([part(x, s) for x, s in pairs if keyless(x)])


def least_time(chip: Chip, figures: Figures, tau: float | None, batch: int) -> Figures:
    """What memory, arithmetic and links allow, one after the other for the links."""
    moved = sum(c["bytes"] * c["count"] for c in figures["collectives"] or [])
    source = figures.get("parts", figures)  # a compiler counts a kernel's reads of the whole cache, or none
    if "flops" not in source:
        return {"collective_bytes": moved}
    seconds = max(source["bytes_accessed"] / chip.bandwidth, source["flops"] / chip.flops) + 2 * moved / chip.link
    out: Figures = {"collective_bytes": moved, "least_step_seconds": seconds}
    if source.get("nodes"):  # of a decoding step
        spare = source["bytes_accessed"] / chip.bandwidth * chip.flops - source["flops"]
        out["free_nodes"] = max(0, source["nodes"] + math.floor(spare / source["node_flops"]))
    return out | ({"tau": tau, "most_tokens_per_second": tau * batch / seconds} if tau else {})
