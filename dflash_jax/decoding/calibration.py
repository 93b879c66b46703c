"""How far a drafter's scores are to be trusted against the noise of sampling: learnt from what verification reveals.

Draft and target share their noise, so the best guess of `argmax(log p / T + noise)` would be `argmax(log q / T +
noise)` if q were p. Where the target is sharper than its drafter says, the noise misleads. Then a sharpness c above 1
makes a better guess, `argmax(c log q / T + noise)`, up to `argmax(log q)`. At every verified position whose proposals
before were right, the target's token is known, and so is whether each c would have proposed it. What is proposed never
changes what is emitted. Shapes: B rows, P proposals, D depths, C candidates.
"""

import math
from collections.abc import Sequence
from typing import Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

SHARPNESS = (1.0, 1.5, 2.0, 3.0, math.inf)  # candidates; the last one leaves the noise out
MOST = 1000.0  # stands for infinity in a file
MEMORY = 4096.0  # verified positions of a depth after which what was learnt has faded to 1 / e
PRIOR = 16.0  # verified positions that a stored sharpness counts as


class Calibration(struct.PyTreeNode):
    """Counters of a drafter in an engine.

    Attributes:
        hits: verified positions at which each candidate would have been right, fading.
        frozen: whether nothing more is learnt.
    """

    hits: Float[Array, "D C"]
    frozen: bool = struct.field(pytree_node=False, default=False)

    @property
    def best(self) -> Int[Array, " D"]:
        """The candidate to use at each depth; the first of equals."""
        return jnp.argmax(self.hits, axis=1)

    @property
    def sharpness(self) -> list[float]:
        """The best of each depth, to be stored with a drafter; the largest is a number that JSON has."""
        return [min(SHARPNESS[i], MOST) for i in np.asarray(self.best)]

    def learn(self, trials: Int[Array, "B P C"], right: Int[Array, "B P"], judged: Bool[Array, "B P"]) -> "Calibration":
        """Counts a step.

        Args:
            trials: what each candidate would have proposed.
            right: the target's tokens.
            judged: positions that were sampled, and whose proposals before were right.
        """
        if self.frozen:
            return self
        hit = (trials == right[:, :, None]) & judged[:, :, None]
        depth = trials.shape[1]
        keep = jnp.exp(-jnp.sum(judged, axis=0).astype(jnp.float32) / MEMORY)
        hits = keep[:, None] * self.hits[:depth] + jnp.sum(hit, axis=0).astype(jnp.float32)
        return self.replace(hits=self.hits.at[:depth].set(hits))

    def partition(self) -> Self:
        """The same on every device."""
        return self.replace(hits=PartitionSpec())


def init_calibration(depth: int, start: Sequence[float] = ()) -> Calibration:
    """Counters for so many depths.

    Args:
        start: sharpness of each depth to begin with, as it is stored with the drafter, the last one for those beyond;
            the nearest candidate is taken. Without it, all begin with the first candidate.
    """
    hits = np.zeros((depth, len(SHARPNESS)), np.float32)
    for d in range(depth):
        if start:
            c = start[min(d, len(start) - 1)]
            distances = [abs(1 / c - 1 / each) for each in SHARPNESS]
            hits[d, distances.index(min(distances))] = PRIOR
    return Calibration(jnp.asarray(hits))
