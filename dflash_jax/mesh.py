"""The mesh: its axes, how it is made and entered, and how arrays lie on it. At the bottom; kernels import it, too.

Axes: `data` splits rows; `fsdp` splits rows and parameters (training); `model` splits heads, inner widths and the
vocabulary (tensor parallelism); `expert` splits experts, and all else as `model` does. An axis of size 1 does nothing,
so the smallest job is the largest with another mesh.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

ROWS, HEADS = ("data", "fsdp"), ("expert", "model")  # the axes that rows, and heads, are split over
AXES = (*ROWS, *HEADS)
AnyMesh = Mesh | AbstractMesh  # of devices, or of their number alone


@dataclass(frozen=True)
class Layout:
    """How the weights of a model lie on a mesh; stands beside its configuration, which no mesh changes.

    Attributes:
        shards: devices of a tensor-parallel group. Fused weights are interleaved in so many parts.
        experts: parts that the experts are split in; a multiple of it is `shards`.
    """

    shards: int = 1
    experts: int = 1

    @property
    def inner(self) -> int:
        """Parts that each expert is split in."""
        return self.shards // self.experts

    def copies(self, kv_heads: int) -> int:
        """How often each key-value head is there: more than once where a group has more devices than heads."""
        return max(1, self.shards // kv_heads)


WHOLE = Layout()  # on a single device


def parse_mesh(text: str, devices: Sequence[object] | None = None) -> dict[str, int]:
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
    known = math.prod(max(size, 1) for size in sizes.values())
    if list(sizes.values()).count(-1) == 1 and count % known == 0:
        sizes = {name: count // known if size == -1 else size for name, size in sizes.items()}
        known = count
    if known != count or -1 in sizes.values():
        raise ValueError(f"--mesh {text}: its sizes multiply to {known}, but there are {count} devices")
    return sizes


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:  # pyright: ignore[reportInvalidTypeForm] (a compiled class)
    """The mesh of these axis sizes, all axes automatic.

    Args:
        sizes: of all four axes: data, fsdp, model and expert, as `parse_mesh` returns them.
        devices: as many as the sizes multiply to; None is all of this program.

    Raises:
        KeyError: an axis is missing.
        ValueError: another number of devices.
    """
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(sizes[name] for name in AXES), AXES, axis_types=types, devices=devices)


@contextmanager
def entered(mesh: AnyMesh | None) -> Iterator[None]:
    """Within, programs are split over this mesh; None changes nothing. It may be entered while a program is traced."""
    current = jax.sharding.get_abstract_mesh()
    if mesh is None or current == mesh.abstract_mesh:
        yield
        return
    try:
        setting = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    except ValueError:  # a program is being traced, where devices play no part
        setting = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    with setting:
        yield


def current_mesh() -> AbstractMesh | None:
    """The mesh that is entered, or None where there is none to split over."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def on_one_device() -> bool:
    """Whether what is traced is of a single device: there is no mesh, or it is inside `on_each_device`."""
    mesh = current_mesh()
    return mesh is None or all(kind == AxisType.Manual for kind in mesh.axis_types)


def rows_of(mesh: AnyMesh | None) -> int:
    """In how many parts a mesh splits rows; the rows of a batch must be a multiple."""
    return parts_of(mesh, ROWS)


def parts_of(mesh: AnyMesh | None, axes: Sequence[str]) -> int:
    """In how many parts a mesh splits what is split over these axes."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def row_parts() -> int:
    """In how many parts the mesh that is entered splits rows."""
    return rows_of(current_mesh())


# --------------------------------------------------------------------------------------------------
# Inside a program


def constrain(x: jax.Array, axes: PartitionSpec) -> jax.Array:
    """`x` laid out so over the mesh that is entered, if one is."""
    return x if current_mesh() is None else jax.lax.with_sharding_constraint(x, axes)


def on_every_device(x: jax.Array) -> jax.Array:
    """Hidden states [B, T, D] with their whole width on every device that holds the row. One sum after attention and
    one after the MLP, where the compiler may else split the width and sum in every norm."""
    return constrain(x, PartitionSpec(PartitionSpec.UNCONSTRAINED, None, None))


def on_each_device(function: Callable, in_specs: tuple[object, ...], out_specs: Any) -> Callable:
    """`function` on each device's part of its arguments, where a mesh is entered; else as it is.

    The compiler knows nothing of what is inside a kernel, and would gather its operands.
    """
    if current_mesh() is None:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def split_evenly(count: int, axes: tuple[str, ...]) -> tuple[str, ...] | None:
    """These mesh axes, if they split what there are `count` of into equal parts; else None."""
    return axes if count % parts_of(current_mesh(), axes) == 0 else None


def split_rows(rows: int) -> tuple[str, ...] | None:
    """The mesh axes that a cache of so many rows is split over; none if they do not divide it, as for a single row."""
    return split_evenly(rows, ROWS)


def split_cache(rows: int, heads: int) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """The mesh axes that the rows of a cache are split over, and those that its heads are.

    A single head (of latent attention) cannot be split. Rows then take the axes of heads, too, if these divide them;
    else every device of those axes holds the same.
    """
    if split_evenly(heads, HEADS):
        return split_rows(rows), HEADS
    return split_evenly(rows, AXES) or split_rows(rows), None


def local_rows(rows: jax.Array | None, count: int, held: Any) -> tuple[jax.Array | None, jax.Array]:
    """Where cache rows lie among the `count` that this device holds, and whether they do; inside `on_each_device`.

    Args:
        rows: None is every row.
        held: the mesh axes that split them; None if every device holds all.
    """
    if rows is None or held is None or current_mesh() is None:
        return rows, jnp.bool_(True)
    at = rows - jax.lax.axis_index(held) * count
    return jnp.clip(at, 0, count - 1), (at >= 0) & (at < count)


def local_pages(pages: jax.Array, count: int, held: Any) -> tuple[jax.Array, jax.Array]:
    """The same of the pages [B, M] of rows, all of a row on one device; those of a row that lies elsewhere are 0."""
    at, inside = local_rows(pages, count, held)
    assert at is not None
    here = jnp.broadcast_to(inside, pages.shape)[:, 0]
    return jnp.where(here[:, None], at, 0), here


def owned_rows(rows: jax.Array, owned: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of a block's rows those that this device holds, all different, as a writer wants them; see `local_rows`.

    Args:
        rows, owned: where they lie among the `count` that it holds, and whether they do.

    Returns:
        Places in the block, as many as there can be; where their rows lie; and whether they do. Those that do not have
        rows that nothing is to be written to.
    """
    at = jnp.argsort(~owned, stable=True)[: min(len(rows), count)]
    rows, owned = rows[at], owned[at]
    taken = jnp.zeros(count, bool).at[jnp.where(owned, rows, count)].set(True, mode="drop")
    spare = jnp.argsort(taken, stable=True)[jnp.maximum(jnp.cumsum(~owned) - 1, 0)]
    return at, jnp.where(owned, rows, spare), owned


def from_owner(x: jax.Array, owned: jax.Array, axes: tuple[str, ...] = ROWS) -> jax.Array:
    """Rows [B, ...] as the device that holds each of them found it, on every device along these axes, if there are
    any; inside `on_each_device`."""
    if current_mesh() is None or not axes:
        return x
    return jax.lax.psum(jnp.where(owned.reshape(-1, *(1,) * (x.ndim - 1)), x, 0), axes)


# --------------------------------------------------------------------------------------------------
# Between host and devices


def spread(tree: Any, shardings: Any) -> Any:
    """Host values onto a mesh, by their shardings; of several processes each has all values, and keeps its shards."""

    def place(x: Any, sharding: NamedSharding) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree, shardings)


def gather(tree: Any) -> Any:
    """The complete values on the host, in every process; all processes must call it."""

    def on_host(x: Any) -> np.ndarray:
        if getattr(x, "is_fully_addressable", True):
            return np.asarray(x)
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(on_host, tree)


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
