"""One mesh and one table of rules for both models, inference and training.

Axes: `data` splits rows; `fsdp` splits rows and parameters (training); `model` splits heads, inner widths and the
vocabulary (tensor parallelism). An axis of size 1 does nothing, so the smallest job is the largest with another mesh.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.config import DecoderConfig
from dflash_jax.mesh import HEADS, ROWS, constrain, current_mesh, on_every_device

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


def auto_mesh(configs: Sequence[DecoderConfig], devices: int, per_host: int) -> dict[str, int]:
    """Tensor parallelism over as many devices of a host as the heads of all models allow, rows over the rest."""
    fits = (n for n in range(per_host, 0, -1) if devices % n == 0 and all(_divides(c, n) for c in configs))
    model = next(fits)
    return {"data": devices // model, "fsdp": 1, "model": model}


def _divides(config: DecoderConfig, shards: int) -> bool:
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    whole = heads % shards == 0 and config.intermediate_size % shards == 0 and config.vocab_size % shards == 0
    return whole and (keys % shards == 0 or shards % keys == 0)


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
