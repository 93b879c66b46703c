"""How parameters and decoding states lie on a mesh: one table of rules for targets and drafters alike."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.config import DecoderConfig
from dflash_jax.mesh import (
    AXES,
    HEADS,
    ROWS,
    WHOLE,
    AnyMesh,
    Layout,
    constrain,
    current_mesh,
    entered,
    on_every_device,
    parts_of,
)
from dflash_jax.quantised import Quantised

Tree = TypeVar("Tree")

TILE = 128  # of a product on TPU and GPU


class Rule(NamedTuple):
    """Mesh axes of the parameters whose path ends so and that have so many dimensions."""

    ending: str
    rank: int
    axes: P


# A layer inside a pass does not know which one it is, so rules are of endings. Weights are [out, in]: the output
# dimension is split where the input is complete on every device, the input dimension where a device holds some of it.
RULES: list[Rule] = [
    Rule(r"(embed_tokens|lm_head)", 2, P(HEADS, "fsdp")),
    Rule(r"(qkv_proj|q_proj|kv_proj|gate_up_proj)/weight", 2, P(HEADS, "fsdp")),
    Rule(r"(qkv_proj|q_proj|kv_proj|gate_up_proj)/bias", 1, P(HEADS)),
    Rule(r"(o_proj|down_proj|fc)/weight", 2, P("fsdp", HEADS)),
    Rule(r"(o_proj|down_proj)/bias", 1, P()),
    Rule(r"sinks", 1, P(HEADS)),
    Rule(r"experts/router", 2, P()),
    Rule(r"experts/(router_bias|correction_bias|per_expert_scale)", 1, P()),
    Rule(r"experts/gate_up_bias", 2, P("expert", "model")),
    Rule(r"experts/down_bias", 2, P()),
    Rule(r"experts/gate_up_proj", 3, P("expert", "model", "fsdp")),
    Rule(r"experts/down_proj", 3, P("expert", "fsdp", "model")),
    Rule(r"\w*norm(s_\d+)?/weight", 1, P()),
]


def add_rules(rules: Iterable[Rule]) -> None:
    """Rules for the parameters of a family or drafter that has some of its own."""
    RULES.extend(rule for rule in rules if rule not in RULES)


def spec(path: str, rank: int) -> P:
    """The mesh axes of a parameter, or of the optimizer's moments of it, by its path and number of dimensions.

    The arrays of a quantized weight follow the weight's rule; a scale has its first dimensions, or all of them.

    Raises:
        ValueError: none or several rules match.
    """
    weight = re.sub(r"/(values|scale|zero|offset|gain|order)$", "", path)
    scale, ordered = path.endswith(("/scale", "/zero", "/offset", "/gain")), path.endswith("/order")
    found = [r for r in RULES if re.search(rf"(^|/){r.ending}$", weight) and (scale or ordered or r.rank == rank)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} sharding rules match parameter {path} of {rank} dimensions; exactly one must")
    axes = found[0].axes
    if ordered:  # the inputs of a matrix, or of each of several, in another order
        return P(*axes[: rank - 1])
    return P(*axes[:rank]) if scale else axes


def auto_mesh(configs: Sequence[DecoderConfig], devices: int, per_host: int) -> dict[str, int]:
    """Tensor parallelism over as many devices of a host as the heads of all models allow, rows over the rest.

    Experts are split in parts of their inner width, which keeps all devices equally busy, where the parts fill the
    tiles of a product; else whole ones are dealt out.
    """
    experts = [layer for config in configs for layer in config.layers if layer.experts]
    for n in range(per_host, 0, -1):
        narrow = any(layer.inner % (n * TILE) for layer in experts)
        for layout in (Layout(n, n), Layout(n)) if narrow else (Layout(n),):
            if devices % n == 0 and not any(config.indivisible(layout) for config in configs):
                sizes = {"data": devices // n, "expert": layout.experts, "model": layout.inner}
                return dict.fromkeys(AXES, 1) | sizes
    raise AssertionError("a single device divides everything")


def check_layout(config: DecoderConfig, mesh: AnyMesh | None) -> Layout:
    """The layout of a model on a mesh.

    Raises:
        ValueError: its heads, experts, an inner width or the vocabulary cannot be split so.
    """
    layout = WHOLE if mesh is None else Layout(parts_of(mesh, HEADS), mesh.shape["expert"])
    if why := config.indivisible(layout):
        axes = f"a model axis of {layout.inner}"
        if layout.experts > 1:
            axes = f"an expert axis of {layout.experts} with {axes}"
        raise ValueError(f"{axes} does not divide {why}; choose a smaller one")
    return layout


def placement(mesh: AnyMesh | None) -> Callable[[str, tuple[int, ...]], NamedSharding | None]:
    """For `checkpoint.load`: the sharding of a parameter by its path and shape."""
    return lambda path, shape: None if mesh is None else NamedSharding(mesh, spec(path, len(shape)))


def shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The sharding of every array of parameters, or of a training state, by its path."""

    def of(path: Any, leaf: Any) -> NamedSharding:
        names = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
        if names and isinstance(path[-1], jax.tree_util.GetAttrKey):  # of a quantized weight
            names.append(path[-1].name)
        return NamedSharding(mesh, spec("/".join(names), leaf.ndim) if names and leaf.ndim else P())

    return jax.tree_util.tree_map_with_path(of, tree)


# --------------------------------------------------------------------------------------------------
# Inside a program


def gathers() -> bool:
    """Whether parameters are split over the `fsdp` axis of the mesh that is entered."""
    mesh = current_mesh()
    return mesh is not None and mesh.shape["fsdp"] > 1


def gathered(weight: Any, path: str) -> Any:
    """A parameter gathered over the `fsdp` axis, right before it is used; a quantized one then says how it is split.

    Left to itself, the compiler at times gathers the rows of all devices instead, and computes them everywhere.
    """
    if isinstance(weight, Quantised) and weight.ndim == 2 and current_mesh() is not None:
        rule = *spec(f"{path}/values", 2), None, None
        weight = weight.replace(axes=tuple(None if axis == "fsdp" else axis for axis in rule[:2]))
    if not gathers():
        return weight

    def one(suffix: str, x: jax.Array) -> jax.Array:
        return constrain(x, P(*(None if axis == "fsdp" else axis for axis in spec(path + suffix, x.ndim))))

    if isinstance(weight, jax.Array):
        return one("", weight)
    return jax.tree_util.tree_map_with_path(lambda key, x: one(f"/{key[-1].name}", x), weight)


def lookup(table: jax.Array | Quantised, tokens: jax.Array) -> jax.Array:
    """Rows [B, T, D] of an embedding table [V, D], which may be quantized.

    Each device looks up its slice of the embedding width for all tokens; an all-to-all then gives each device complete
    rows of its own tokens. The table itself is never gathered.
    """
    rows = table.rows if isinstance(table, Quantised) else table.__getitem__
    # Of one row alone, XLA gathers all of a table that is split, and a TPU copies all of one that is quantized.
    if tokens.size == 1 and (isinstance(table, Quantised) or current_mesh() is not None):
        return lookup(table, jnp.concatenate([tokens, tokens], axis=1))[:, :1]
    if not gathers():
        return rows(tokens)
    found = rows(constrain(tokens, P(None, None)))
    return on_every_device(constrain(found, P(None, None, "fsdp")))


def pin(state: Any) -> Any:
    """A decoding state laid out over the mesh that is entered: every program finds it as the last one left it."""
    if current_mesh() is None:
        return state
    return jax.tree.map(constrain, state, partition(state))


def state_shardings(state: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The layout that `pin` gives a state."""
    with entered(mesh):
        return jax.tree.map(lambda axes: NamedSharding(mesh, axes), partition(state))


def partition(tree: Any) -> Any:
    """The mesh axes of every array on the mesh that is entered: what has a method `partition` says so itself, of all
    else rows are split."""
    says = lambda x: callable(getattr(x, "partition", None))
    return jax.tree.map(lambda x: x.partition() if says(x) else P(ROWS), tree, is_leaf=says)


def settled(tree: Tree) -> Tree:
    """The same, each array bound to the devices where it lies: a program that is compiled for it then serves others
    that are put there. Nothing is copied."""
    arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.numpy.asarray(x), tree)
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding), arrays)
