"""Which implementation of a kernel runs.

A kernel is a folder with an implementation per file: `reference` in plain XLA for every platform and case, and Pallas
kernels that may decline a case, by a function `declines(*arrays) -> str | None` that says why.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Name = Literal["xla", "tpu", "gpu"]
# Preferred on a platform; where it declines or there is none, XLA runs.
PREFERRED: dict[str, Name] = {"tpu": "tpu", "gpu": "gpu"}
# Mesh axes that rows and key-value heads are split over, where there is a mesh.
ROWS, HEADS = ("data", "fsdp"), "model"
_named, _platform = jax.make_user_context(None), jax.make_user_context(None)  # parts of every jit cache key


@contextmanager
def using(implementation: Name | None, platform: str | None = None) -> Iterator[None]:
    """Within, every kernel takes this implementation where it serves the case and the call names none.

    What is compiled for another platform than the one at hand is compiled under its implementation's name, and its own.
    None goes back to what the platform prefers, and to the platform at hand.
    """
    with _named(implementation), _platform(platform):
        yield


def platform() -> str:
    """What is compiled for: "cpu", "gpu" or "tpu"."""
    return _platform.value or jax.default_backend()


def choose(implementations: Mapping[str, ModuleType], *arrays: jax.Array, implementation: Name | None) -> ModuleType:
    """The implementation that serves a call with these arrays.

    Raises:
        ValueError: it was named in the call and declines, or is none of them; the message says why.
    """
    if implementation is not None:
        if implementation not in implementations:
            raise ValueError(f"implementation must be one of {', '.join(implementations)}, got {implementation!r}")
        if why := implementations[implementation].declines(*arrays):
            raise ValueError(f"implementation {implementation!r} does not serve this case: {why}")
        return implementations[implementation]
    preferred = _named.value or PREFERRED.get(jax.default_backend(), "xla")
    serves = preferred in implementations and not implementations[preferred].declines(*arrays)
    return implementations[preferred if serves else "xla"]


def current_mesh() -> Any:
    """The mesh that is set, or None where there is none to split over."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def on_each_device(function: Callable, in_specs: tuple[PartitionSpec, ...], out_specs: Any) -> Callable:
    """`function` on each device's part of its arguments, where a mesh is set; else as it is.

    The compiler knows nothing of what is inside a kernel, and would gather its operands.
    """
    if current_mesh() is None:
        return function
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def local_row(row: jax.Array, rows: int, whole: bool) -> tuple[jax.Array, jax.Array]:
    """Where a block's first cache row lies among the `rows` that this device holds, and whether it does; inside
    `on_each_device`. A block of all rows (`whole`) is split as the cache is."""
    if whole or current_mesh() is None:
        return row, jnp.bool_(True)
    at = row - jax.lax.axis_index(ROWS) * rows
    return jnp.clip(at, 0, rows - 1), (at >= 0) & (at < rows)


def from_owner(x: jax.Array, here: jax.Array) -> jax.Array:
    """What the device that holds the row found, on every device; inside `on_each_device`."""
    if current_mesh() is None:
        return x
    return jax.lax.psum(jnp.where(here, x, 0), ROWS)
