"""The name of a GPU, for which Pallas Triton asks while a program is compiled, where none is at hand."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def named() -> Iterator[None]:
    """Within, the mesh in force says which GPU is compiled for, as jax 0.12 wants it."""
    mesh = jax.sharding.get_abstract_mesh()
    if not (mesh.abstract_device or jax.default_backend() == "gpu"):
        mesh = mesh.update(abstract_device=jax.sharding.AbstractDevice("NVIDIA H100", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        yield
