"""The cache entry of a gated delta rule layer: a state of every head, and the last inputs of its convolution.

A pass never changes it. What a block would add are its keys, corrections and convolution inputs; the accepted ones are
applied. A long prompt, all of which is kept, comes with the state after it instead.
Shapes: R cache rows, B block rows, T block positions, J committed positions, K key heads, G value heads that share one,
H key dim, Hv value dim, W taps of the convolution but its own, C channels.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dflash_jax.cache.attention import Path, Rows
from dflash_jax.kernels.delta_rule import advance
from dflash_jax.mesh import HEADS, ROWS


class Corrections(struct.PyTreeNode):
    """What a block adds to the state, position by position.

    Attributes:
        k, u: keys and corrections.
        g: logarithm of what each position keeps of the state.
        inputs: of the convolution.
    """

    k: Float[Array, "B T K H"]
    u: Float[Array, "B T K G Hv"]
    g: Float[Array, "B T K G"]
    inputs: Float[Array, "B T C"]


class State(struct.PyTreeNode):
    """The state of some rows: a snapshot, or what a prompt leaves behind.

    Attributes:
        s: of every head.
        inputs: of the convolution, at the last positions.
    """

    s: Float[Array, "B K G H Hv"]
    inputs: Float[Array, "B W C"]
    whole: ClassVar[bool] = True

    def partition(self) -> "State":
        """The mesh axes of a snapshot's arrays."""
        return State(P(None, HEADS), P(None, None, HEADS))  # type: ignore[arg-type]


class Recurrent(State):
    """The committed state of all rows; an `Entry`."""

    def of(self, rows: Rows | None) -> State:
        """The state of some rows; None is all."""
        return State(*(x if rows is None else x[rows] for x in (self.s, self.inputs)))

    def begin(self, row: Int[Array, ""]) -> "Recurrent":
        return self.replace(s=self.s.at[row].set(0), inputs=self.inputs.at[row].set(0))

    def commit(
        self, fresh: Corrections | State, lengths: Rows, kept: Rows, *, path: Path | None, rows: Rows | None
    ) -> "Recurrent":
        """Of a `State` all positions are kept, or none."""
        old = self.of(rows)
        if isinstance(fresh, State):
            some = lambda new, old: jnp.where((kept > 0).reshape(-1, *[1] * (new.ndim - 1)), new, old)
            after = jax.tree.map(some, fresh, old)
        else:
            added = fresh
            if path is not None:
                pick = lambda x: jnp.take_along_axis(x, path.reshape(*path.shape, *[1] * (x.ndim - 2)), axis=1)
                added: Corrections = jax.tree.map(pick, fresh)
            s = advance(old.s, added.k, added.u, added.g, kept)
            after = State(s, last_inputs(old.inputs, added.inputs, kept))
        put = lambda all, new: new if rows is None else all.at[rows].set(new)
        return self.replace(s=put(self.s, after.s), inputs=put(self.inputs, after.inputs))

    def snapshot(self, row: Int[Array, ""], start: Int[Array, ""], count: int) -> State:
        """The state itself, however many positions it is of."""
        one = lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1)
        return State(one(self.s), one(self.inputs))

    def restore(self, snapshot: State, row: Int[Array, ""], end: Int[Array, ""]) -> "Recurrent":
        put = lambda all, one: jax.lax.dynamic_update_slice_in_dim(all, one, row, 0)
        return self.replace(s=put(self.s, snapshot.s), inputs=put(self.inputs, snapshot.inputs))

    def partition(self) -> "Recurrent":
        """Rows and heads are split."""
        return self.replace(s=P(ROWS, HEADS), inputs=P(ROWS, None, HEADS))


def allocate(
    rows: int, heads: tuple[int, int], sizes: tuple[int, int], taps: int, channels: int, dtype: DTypeLike
) -> Recurrent:
    """An empty entry.

    Args:
        heads: key heads, and value heads that share one.
        sizes: key and value dims.
        taps: of the convolution.
    """
    state = jnp.zeros((rows, *heads, *sizes), jnp.float32)
    return Recurrent(state, jnp.zeros((rows, taps - 1, channels), dtype))


def last_inputs(old: Float[Array, "B W C"], new: Float[Array, "B T C"], kept: Rows) -> Float[Array, "B W C"]:
    """The last inputs after the first `kept` new ones."""
    both = jnp.concatenate([old, new.astype(old.dtype)], axis=1)
    at = kept[:, None] + jnp.arange(old.shape[1])[None]
    return jnp.take_along_axis(both, at[:, :, None], axis=1)
