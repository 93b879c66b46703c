"""`python -m dflash_jax.plan`: what a pair needs on a machine, from its configurations alone.

The step is compiled by the real compiler, on any Linux host (`dflash-jax[tpu]`, `[cuda-compiler]`): memory and
collectives are the compiler's own, and so are operations, where it tells them. Figures of GPUs without their compiler
and times everywhere follow from shapes and from what is published of the chip; they say what a step cannot beat.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_jax.benchmarks.topologies import CHIPS, GIB, Chip, compiling_for, has_compiler, parse_topology, topology

_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
_BITS = {"pred": 8, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s64": 64, "u64": 64, "f64": 64}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dflash_jax.plan",
        description="Memory, operations, collectives and the least time of a step, per device.",
    )
    parser.add_argument("--target", required=True, metavar="CONFIG", help="name (qwen3-8b), config.json or its folder")
    parser.add_argument("--drafter", metavar="CONFIG", help="likewise (default: that of a target named by name)")
    parser.add_argument(
        "--topology", required=True, help=f"TPU, like v5e:2x2, or GPU and number, like h100:4 ({', '.join(CHIPS)})"
    )
    parser.add_argument("--mesh", default="auto", help="like data=2,model=4 (see serve)")
    parser.add_argument("--batch", type=int, default=8, help="rows; of training, packed rows of a step (default 8)")
    parser.add_argument("--max-length", type=int, default=8192, help="tokens of a row (default 8192)")
    parser.add_argument("--block-size", type=int, help="draft slots (default: the drafter's)")
    parser.add_argument("--tau", type=float, default=6.49, help="tokens a step commits (default 6.49)")
    parser.add_argument("--training", action="store_true", help="the training step of the drafter instead")
    parser.add_argument("--anchors", type=int, default=512, help="of a row, for --training (default 512)")
    parser.add_argument("--json", metavar="FILE", help="write the figures, too")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        figures = plan(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"error: {error}; a TPU topology needs pip install 'dflash-jax[tpu]'", file=sys.stderr)
        return 2
    except RuntimeError as error:  # the compiler's
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"does not fit: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    print(table(figures))
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of `table`; raises ValueError for what cannot be planned."""
    from dflash_jax import sharding
    from dflash_jax.mesh import make_mesh, parse_mesh

    chip, count = parse_topology(args.topology)
    raws = _configs(args.target, args.drafter)
    compiling = has_compiler(args.topology)
    devices = topology(args.topology) if compiling else list(range(count))
    parsed = _parsed(raws)
    if args.mesh != "auto":
        sizes = parse_mesh(args.mesh, devices)
    elif args.training:
        sizes = parse_mesh("fsdp=-1", devices)
    else:
        sizes = sharding.auto_mesh(parsed, len(devices), len(devices))
    parts = sizes["data"] * sizes["fsdp"]
    if args.batch % parts:
        raise ValueError(f"--batch {args.batch} must be a multiple of the {parts} parts the mesh splits rows in")
    figures: dict[str, Any] = {"topology": args.topology, "devices": len(devices), "mesh": sizes}
    figures |= {"batch": args.batch, "max_length": args.max_length, "chip_bytes": CHIPS[chip].memory}
    if not compiling:
        if args.training:
            raise ValueError(
                "--training is planned by a compiler; install dflash-jax[cuda-compiler], or name a TPU topology"
            )
        figures |= analytic(parsed, sizes, args.batch, args.max_length, args.block_size)
    else:
        mesh = make_mesh(sizes, devices)
        with compiling_for(args.topology):
            compiled = (
                compile_training(raws, mesh, args.batch, args.max_length, args.anchors)
                if args.training
                else compile_step(raws, mesh, args.batch, args.max_length, args.block_size)
            )
        figures |= measured(compiled)
        if not args.training:
            figures |= {"parts": analytic(parsed, sizes, args.batch, args.max_length, args.block_size)}
    figures["fits"] = figures["peak_bytes"] < CHIPS[chip].memory
    return figures | least_time(CHIPS[chip], figures, None if args.training else args.tau, args.batch)


def _configs(target: str, drafter: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    from dflash_jax.benchmarks.presets import PAIRS
    from dflash_jax.checkpoint import read_json, resolve

    def read(source: str, what: str) -> dict[str, Any]:
        path = Path(source)
        return read_json(path) if path.is_file() else read_json(resolve(source, what) / "config.json")

    if target in PAIRS:
        own = PAIRS[target]
        return dict(own[0]), dict(own[1]) if drafter is None else read(drafter, "drafter")
    if drafter is None:
        raise ValueError(f"--drafter is needed, unless --target is one of {', '.join(PAIRS)}")
    return read(target, "target"), read(drafter, "drafter")


def _parsed(raws: tuple[dict[str, Any], dict[str, Any]]) -> tuple[Any, Any]:
    from dflash_jax import models
    from dflash_jax.drafters.config import drafter_config

    pair = models.target_config(raws[0]), drafter_config(raws[1])
    pair[1].check_pair(pair[0])
    return pair


# --------------------------------------------------------------------------------------------------
# By the compiler


def compile_step(raws: tuple[Any, Any], mesh: Any, batch: int, max_length: int, block_size: int | None = None) -> Any:
    """The speculative step as compiled for the mesh's devices, its state donated; nothing is allocated."""
    import jax

    from dflash_jax import sharding
    from dflash_jax.benchmarks.presets import random_pair
    from dflash_jax.decoding.state import init_state
    from dflash_jax.decoding.step import make_round, speculative_step
    from dflash_jax.infer.programs import BLOCK_OPTIONS
    from dflash_jax.kernels.dispatch import platform

    def shapes() -> tuple[Any, Any, Any]:
        target, drafter = random_pair(*raws, mesh=mesh)
        return target, drafter, init_state(target, drafter, batch, max_length, 8)

    target, drafter, state = jax.eval_shape(shapes)
    target, drafter = (_placed(x, sharding.shardings(x, mesh)) for x in (target, drafter))
    state = _placed(state, sharding.state_shardings(state, mesh))

    def step(target: Any, drafter: Any, state: Any) -> Any:
        parts = make_round(target, drafter, block_size or drafter.config.block_size)
        state, committed = speculative_step(parts, state)
        return sharding.pin(state), committed

    with jax.set_mesh(mesh):
        lowered = jax.jit(step, donate_argnums=2).lower(target, drafter, state)
        return lowered.compile(compiler_options=BLOCK_OPTIONS.get(platform()))


def compile_training(raws: tuple[Any, Any], mesh: Any, rows: int, length: int, anchors: int) -> Any:
    """The drafter's training step as compiled for the mesh's devices, its state donated; nothing is allocated."""
    from functools import partial

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from dflash_jax import sharding
    from dflash_jax.benchmarks.presets import random_pair
    from dflash_jax.mesh import ROWS
    from dflash_jax.train.config import TrainConfig
    from dflash_jax.train.step import Batch, init_state, train_step

    config = TrainConfig(
        length=length, anchors=anchors, row_anchors=anchors, batch_size=rows, block_size=raws[1]["block_size"]
    )
    target, _ = jax.eval_shape(lambda: random_pair(*raws, mesh=mesh))
    _, drafter = jax.eval_shape(lambda: random_pair(*raws, dtype=jnp.float32))
    state = jax.eval_shape(lambda drafter: init_state(drafter, config, 1000), drafter)
    target, drafter, state = (_placed(x, sharding.shardings(x, mesh)) for x in (target, drafter, state))
    zeros = partial(jnp.zeros, (rows, length))
    batch = jax.eval_shape(lambda: Batch(zeros(jnp.int32), zeros(jnp.int32), zeros(bool)))
    batch = _placed(batch, jax.tree.map(lambda _: NamedSharding(mesh, sharding.P(ROWS)), batch))
    program = jax.jit(
        partial(train_step, config, 1000), donate_argnums=2, out_shardings=(sharding.shardings(state, mesh), None)
    )
    with jax.set_mesh(mesh):
        return program.lower(target, drafter, state, batch).compile()


def _placed(tree: Any, shardings: Any) -> Any:
    import jax

    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def measured(compiled: Any) -> dict[str, Any]:
    """Per device, what the compiler says of a program."""
    import jax

    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}  # CUDA's tells none
    try:
        found = collectives(compiled.as_text())
    except jax.errors.JaxRuntimeError:  # some programs of v5p, with jax 0.10
        found = None
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "updated_in_place_bytes": memory.alias_size_in_bytes,
        "peak_bytes": peak,
        "collectives": found,
    } | {name.replace(" ", "_"): cost[name] for name in ("flops", "bytes accessed") if name in cost}


def collectives(text: str) -> list[dict[str, Any]]:
    """Collectives of a compiled program: kind, shape, bytes, and how often it stands there, largest first.

    One that runs beside other work stands in the fusions that begin it, go on with it and end it; its channel tells.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    begun = set()
    for result, kind, rest in re.findall(rf"= (\S.*?) ({_COLLECTIVES})(?:-start)?\((.*)", text):
        channel = re.search(r"channel_id=\d+", rest)
        plain = re.sub(r"\{[^}]*\}", "", result)
        if channel:
            if (kind, plain, channel[0]) in begun:
                continue
            begun.add((kind, plain, channel[0]))
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", plain)
        if "(" in result and len(shapes) % 2 == 0 and f"{kind}-start(" in text:
            shapes = shapes[len(shapes) // 2 :]  # operands, then results
        size = sum(
            math.prod(map(int, filter(None, dims.split(",")))) * _BITS.get(kind_, 32) // 8 for kind_, dims in shapes
        )
        shape = " ".join(f"{kind_}[{dims}]" for kind_, dims in shapes)
        entry = found.setdefault((kind, shape), {"kind": kind, "shape": shape, "bytes": size, "count": 0})
        entry["count"] += 1
    return sorted(found.values(), key=lambda c: -c["bytes"])


# --------------------------------------------------------------------------------------------------
# By arithmetic


def analytic(
    pair: tuple[Any, Any], sizes: dict[str, int], batch: int, length: int, block: int | None
) -> dict[str, Any]:
    """Per device and step, in bfloat16: bytes of weights and caches, all read once, and operations of the products."""
    from dflash_jax import models
    from dflash_jax.drafters.dflash import tensors

    target, drafter = pair
    split, rows = sizes["model"], batch // (sizes["data"] * sizes["fsdp"])
    width = drafter.proposals(block or drafter.block_size) + 1
    count = lambda table: sum(math.prod(leaf.shape) for leaf in table.values())
    weights = count(models.family(target.model_type).tensors(target)) + count(tensors(drafter))
    head = target.vocab_size * target.hidden_size
    # The embedding is looked up, not multiplied; the head multiplies twice, for draft and target.
    multiplied = weights + head * (1 if target.tie_word_embeddings else 0)
    keys = lambda c: 2 * max(1, c.num_key_value_heads // split) * c.head_dim * len(c.layers)
    cache = rows * length * (keys(target) + keys(drafter)) * 2
    scores = lambda c: 4 * c.num_attention_heads // split * c.head_dim * len(c.layers) * length * width * rows
    reduced = (
        2 * rows * width * (2 * len(target.layers) * target.hidden_size + 2 * len(drafter.layers) * drafter.hidden_size)
    )
    return {
        "weight_bytes": 2 * weights // split,
        "cache_bytes": cache,
        "peak_bytes": 2 * weights // split + cache + 4 * rows * width * target.vocab_size // split * 3,
        "flops": 2 * multiplied // split * width * rows + scores(target) + scores(drafter),
        "bytes_accessed": 2 * multiplied // split + cache,
        "collectives": []
        if split == 1
        else [{"kind": "all-reduce", "shape": "hidden states of all layers", "bytes": reduced, "count": 1}],
    }


def least_time(chip: Chip, figures: dict[str, Any], tau: float | None, batch: int) -> dict[str, Any]:
    """What memory, arithmetic and links allow, one after the other for the links."""
    moved = sum(c["bytes"] * c["count"] for c in figures["collectives"] or [])
    source = figures.get("parts", figures)  # a compiler counts a kernel's reads of the whole cache, or none
    if "flops" not in source:
        return {"collective_bytes": moved}
    seconds = max(source["bytes_accessed"] / chip.bandwidth, source["flops"] / chip.flops) + 2 * moved / chip.link
    out = {"collective_bytes": moved, "least_step_seconds": seconds}
    return out | ({"tau": tau, "most_tokens_per_second": tau * batch / seconds} if tau else {})


def table(figures: dict[str, Any]) -> str:
    """The figures as text."""
    size = lambda n: f"{n / GIB:.2f} GiB" if n > GIB / 100 else f"{n / 2**20:.2f} MiB"
    axes = ", ".join(f"{name} {n}" for name, n in figures["mesh"].items() if n > 1) or "one device"
    source = "as compiled" if "argument_bytes" in figures else "by arithmetic (for more: dflash-jax[cuda-compiler])"
    lines = [f"{figures['topology']}   {figures['devices']} devices   {axes}", "", f"per device, {source}"]
    shown = figures.get("parts", {}) | figures
    for key in ("weight_bytes", "cache_bytes", "argument_bytes", "temporary_bytes", "updated_in_place_bytes"):
        if key in shown:
            lines.append(f"  {key.removesuffix('_bytes').replace('_', ' '):20} {size(shown[key])}")
    verdict = "fits" if figures["fits"] else "DOES NOT FIT"
    lines.append(f"  {'peak':20} {size(figures['peak_bytes'])} of {size(figures['chip_bytes'])}: {verdict}")
    if "flops" in shown:
        accessed = size(shown["bytes_accessed"])
        lines.append(f"  {'operations a step':20} {shown['flops'] / 1e9:.1f} GFLOP, {accessed} accessed")
    lines.append("")
    none = "   none" if figures["collectives"] is not None else "   the compiler cannot write this program down"
    lines.append("collectives a step" + ("" if figures["collectives"] else none))
    for c in figures["collectives"] or []:
        lines.append(f"  {c['count']:4} x {c['kind']:20} {size(c['bytes']):>12}   {c['shape']}")
    if "least_step_seconds" in figures:
        milliseconds = 1e3 * figures["least_step_seconds"]
        lines += ["", f"least time of a step {milliseconds:.2f} ms (published bandwidth and FLOP rates)"]
    if "tau" in figures:
        lines.append(f"at tau {figures['tau']}: at most {figures['most_tokens_per_second']:.0f} tokens/s, all rows")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
