"""One mesh and one table of rules for both models, inference and training.

Axes: `data` splits rows; `fsdp` splits rows and parameters (training); `model` splits heads, inner widths and the
vocabulary (tensor parallelism). An axis of size 1 does nothing, so the smallest job is the largest with another mesh.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.config import DecoderConfig
from dflash_jax.kernels.dispatch import HEADS, ROWS, current_mesh

AXES = (*ROWS, HEADS)

# Endings of parameter paths (in a pass, a layer does not know which one it is) and the axes of each dimension. The
# weights are [out, in]; a product's output dimension is
# split where its input comes from every device, its input dimension where a device holds only some of the input.
RULES: tuple[tuple[str, P], ...] = (
    (r"(embed_tokens|lm_head)", P("model", "fsdp")),
    (r"(qkv_proj|q_proj|gate_up_proj)/weight", P("model", "fsdp")),
    (r"(qkv_proj|q_proj)/bias", P("model")),
    (r"(o_proj|down_proj|fc)/weight", P("fsdp", "model")),
    (r"o_proj/bias", P()),
    (r"kv_proj", P(None, "model", "fsdp")),  # of all draft layers
    (r"kv_bias", P(None, "model")),
    (r"\w*norm/weight", P()),
    (r"k_norm", P()),  # of all draft layers
)

Config = TypeVar("Config", bound=DecoderConfig)


def parse_mesh(text: str, devices: Sequence[jax.Device] | None = None) -> dict[str, int]:
    """Sizes of the axes named in "data=2,model=4"; one of them may be -1, which is what is left of the devices.

    Raises:
        ValueError: an unknown axis, or sizes whose product is not the number of devices.
    """
    count = len(jax.devices() if devices is None else devices)
    sizes = dict.fromkeys(AXES, 1)
    for item in filter(None, text.split(",")):
        name, _, size = item.partition("=")
        if name.strip() not in AXES or not re.fullmatch(r"-1|[1-9]\d*", size.strip()):
            raise ValueError(f"--mesh must be like data=2,model=4 with axes of {', '.join(AXES)}, got {text!r}")
        sizes[name.strip()] = int(size)
    known = 1
    for size in sizes.values():
        known *= max(size, 1)
    if list(sizes.values()).count(-1) == 1 and count % known == 0:
        sizes = {name: count // known if size == -1 else size for name, size in sizes.items()}
        known = count
    if known != count or -1 in sizes.values():
        raise ValueError(f"--mesh {text}: its sizes multiply to {known}, but there are {count} devices")
    return sizes


def auto_mesh(configs: Sequence[DecoderConfig], devices: int, per_host: int) -> dict[str, int]:
    """Tensor parallelism over as many devices of a host as the heads of all models allow, rows over the rest."""
    fits = (n for n in range(per_host, 0, -1) if devices % n == 0 and all(_divides(c, n) for c in configs))
    model = next(fits)
    return {"data": devices // model, "fsdp": 1, "model": model}


def _divides(config: DecoderConfig, shards: int) -> bool:
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    whole = heads % shards == 0 and config.intermediate_size % shards == 0 and config.vocab_size % shards == 0
    return whole and (keys % shards == 0 or shards % keys == 0)


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of these axis sizes, all axes automatic."""
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes[name] for name in AXES), AXES, axis_types=types, devices=devices)


def shard_config(config: Config, mesh: Mesh | None) -> Config:
    """The configuration of a model whose heads are split over the mesh; key-value heads that are too few are copied.

    Raises:
        ValueError: the heads, the inner width or the vocabulary cannot be split so.
    """
    shards = 1 if mesh is None else mesh.shape["model"]
    if shards == 1:
        return config
    if not _divides(config, shards):
        raise ValueError(
            f"a model axis of {shards} does not divide {config.num_attention_heads} query heads, "
            f"{config.num_key_value_heads} key-value heads, width {config.intermediate_size} and vocabulary "
            f"{config.vocab_size}; choose a smaller one"
        )
    copies = max(1, shards // config.num_key_value_heads)
    heads = config.num_key_value_heads * copies
    return replace(config, shards=shards, key_value_copies=copies, num_key_value_heads=heads)


def unsharded_config(config: Config) -> Config:
    """The configuration as the checkpoint has it."""
    heads = config.num_key_value_heads // config.key_value_copies
    return replace(config, shards=1, key_value_copies=1, num_key_value_heads=heads)


def spec(path: str) -> P:
    """The axes of a parameter, or of the optimizer's moments of it, by its path.

    Raises:
        ValueError: none or several rules match.
    """
    found = [axes for pattern, axes in RULES if re.search(rf"(^|/){pattern}$", path)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} sharding rules match parameter {path}; exactly one must")
    return found[0]


def placement(mesh: Mesh | None) -> Any:
    """For `checkpoint.load`: the sharding of a parameter by its path and shape."""
    return lambda path, shape: None if mesh is None else NamedSharding(mesh, spec(path))


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The sharding of every leaf of parameters, or of a training state, by its path."""

    def of(path: Any, leaf: Any) -> NamedSharding:
        names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        return NamedSharding(mesh, spec("/".join(names)) if names and leaf.ndim else P())

    return jax.tree_util.tree_map_with_path(of, tree)


def spread(tree: Any, shardings: Any) -> Any:
    """Host values onto a mesh, by their shardings; of several processes each has all values, and keeps its shards."""

    def place(x: Any, sharding: NamedSharding) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree, shardings)


def gather(tree: Any) -> Any:
    """The whole values on the host, in every process; all processes must ask."""

    def whole(x: Any) -> np.ndarray:
        if getattr(x, "is_fully_addressable", True):
            return np.asarray(x)
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(whole, tree)


def constrain(x: jax.Array, axes: P) -> jax.Array:
    """Inside a jitted program: `x` laid out so over the mesh that is set, if one is."""
    return x if current_mesh() is None else jax.lax.with_sharding_constraint(x, axes)


def gathers() -> bool:
    """Inside a jitted program: whether parameters are split over the `fsdp` axis of the mesh that is set."""
    mesh = current_mesh()
    return mesh is not None and mesh.shape["fsdp"] > 1


def whole(weight: jax.Array, path: str) -> jax.Array:
    """Inside a jitted program: a parameter gathered over the `fsdp` axis, right before it is used.

    Left to itself, the compiler at times gathers the rows of all devices instead, and computes them everywhere.
    """
    if not gathers():
        return weight
    return constrain(weight, P(*(None if axis == "fsdp" else axis for axis in spec(path))))


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Inside a jitted program: rows [B, T, D] of an embedding table [V, D].

    Each device looks up its part of the width, of all tokens; the parts change places with those of the other rows. The
    table itself is never gathered.
    """
    if not gathers():
        return table[tokens]
    found = table[constrain(tokens, P(None, None))]
    return on_every_device(constrain(found, P(None, None, "fsdp")))


def on_every_device(x: jax.Array) -> jax.Array:
    """Inside a jitted program: hidden states [B, T, D] with their whole width on every device that holds the row. One
    sum after attention and one after the MLP, where the compiler may else split the width and sum in every norm."""
    return constrain(x, P(P.UNCONSTRAINED, None, None))


def row_parts() -> int:
    """Inside a jitted program: in how many parts the mesh that is set splits rows."""
    return rows_of(current_mesh())


def pin(state: Any) -> Any:
    """Inside a jitted program: a decoding state laid out over the mesh that is set, so that every program finds it as
    the last one left it. Rows are split, and the heads of the caches."""

    return jax.tree_util.tree_map_with_path(lambda path, leaf: constrain(leaf, _state_spec(path)), state)


def pin_chunks(chunks: Any) -> Any:
    """Inside a jitted program: kept parts of caches [E, K, ...], their heads split as those of the caches."""
    return jax.tree.map(lambda x: constrain(x, P(None, HEADS)), chunks)


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """The layout that `pin` gives a state."""
    return jax.tree_util.tree_map_with_path(lambda path, _: NamedSharding(mesh, _state_spec(path)), state)


def _state_spec(path: Any) -> P:
    in_cache = any(getattr(key, "name", None) == "entries" for key in path)
    return P(ROWS, HEADS) if in_cache else P(ROWS)


def rows_of(mesh: Any) -> int:
    """In how many parts rows are split; the rows of a batch must be a multiple."""
    return 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays are sharded over, or None."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.size > 1), None)


def join(group: str) -> None:
    """Makes this one of several processes of one program, by JAX's distributed runtime.

    Args:
        group: "HOST:PORT,I/N", process I of N with the first at HOST:PORT; empty for what the environment says.

    Raises:
        ValueError: it is neither.
    """
    silence = 60  # seconds after which a process counts as lost, and the others stop
    if not group:
        jax.distributed.initialize(heartbeat_timeout_seconds=silence)
        return
    found = re.fullmatch(r"(\S+:\d+),(\d+)/(\d+)", group)
    if not found or int(found[2]) >= int(found[3]):
        raise ValueError(f"--distributed must be HOST:PORT,I/N with I from 0 to N - 1, got {group}")
    jax.distributed.initialize(found[1], int(found[3]), int(found[2]), heartbeat_timeout_seconds=silence)
