"""How far a drafter's scores are to be trusted against the noise of sampling: learnt from what verification reveals.

Draft and target share their noise, so the best guess of `argmax(log p / T + noise)` would be `argmax(log q / T +
noise)` if q were p. Where the target is sharper than its drafter says, the noise misleads. Then a sharpness c above 1
makes a better guess, `argmax(c log q / T + noise)`, up to `argmax(log q)`. At every verified position whose proposals
before were right, the target's token is known, and so is whether each c would have proposed it.

A tree is ranked by how likely each token is to be the target's. Of a greedy target that is not q, but a sharper
distribution, softmax(c0 log q). There the likelihood of the target's tokens tells which c0 is best.

What is proposed never changes what is emitted. Shapes: B rows, M places, D depths, T block positions, C candidates,
R ranks.
"""

import math
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

SHARPNESS = (1.0, 1.5, 2.0, 3.0, math.inf)  # candidates for c; the last one leaves the noise out
GREEDY = (1.0, 0.7, 1.4, 2.0, 3.0)  # candidates for c0
MOST = 1000.0  # stands for infinity in a file
MEMORY = 4096.0  # verified positions of a depth after which what was learnt has faded to 1 / e
PRIOR = 16.0  # verified positions that a stored sharpness counts as


class Lessons(struct.PyTreeNode):
    """What the target's tokens will say of the drafter, wherever they turn out to lie.

    A place is a context that the drafter looked at: the anchor, or a node that it went on from.

    Attributes:
        trials: what each sharpness would have proposed after each place; None where none is learnt.
        tokens: the likeliest tokens after each place, the best first; of a tree.
        likelihood: their log-probabilities under each candidate for c0.
        places: place of each block position, -1 for a node that the drafter did not go on from. None: a place for each
            depth.
    """

    trials: Int[Array, "B M C"] | None
    tokens: Int[Array, "B M R"] | None = None
    likelihood: Float[Array, "B M R C0"] | None = None
    places: Int[Array, "B T"] | None = None

    def along(self, path: Int[Array, "B J"] | None, depth: int) -> "tuple[Lessons, Bool[Array, 'B D'] | None]":
        """Those of the first `depth` positions of a path, by depth, and which of these have a place; None is all."""
        every = self.replace(places=None)
        if self.places is None or path is None:
            return jax.tree.map(lambda x: x[:, :depth], every), None
        places = jnp.take_along_axis(self.places, path[:, :depth], axis=1)

        def pick(x: Array) -> Array:
            at = jnp.maximum(places, 0).reshape(*places.shape, *[1] * (x.ndim - 2))
            return jnp.take_along_axis(x, at, axis=1)

        return jax.tree.map(pick, every), places >= 0


class Calibration(struct.PyTreeNode):
    """Counters of a drafter in an engine.

    Attributes:
        hits: verified positions at which each candidate would have been right, fading.
        likelihood: log-probability of the target's greedy tokens under each candidate for c0, summed and fading.
        frozen: whether nothing more is learnt.
    """

    hits: Float[Array, "D C"]
    likelihood: Float[Array, "D C0"]
    frozen: bool = struct.field(pytree_node=False, default=False)

    @property
    def best(self) -> Int[Array, " D"]:
        """The candidate to use at each depth; the first of equals."""
        return jnp.argmax(self.hits, axis=1)

    @property
    def greedy(self) -> Float[Array, " D"]:
        """c0 of each depth; the first of equals."""
        return jnp.asarray(GREEDY)[jnp.argmax(self.likelihood, axis=1)]

    @property
    def sharpness(self) -> list[float]:
        """The best of each depth, to be stored with a drafter; the largest is a number that JSON has. A depth at which
        nothing was right has that of the one before; it is empty if none of them has any."""
        found = list[float]()
        for best, hits in zip(np.asarray(self.best), np.asarray(self.hits), strict=True):
            if not hits.any() and not found:
                return []
            found.append(min(SHARPNESS[best], MOST) if hits.any() else found[-1])
        return found

    def learn(
        self,
        lessons: Lessons,
        right: Int[Array, "B D"],
        path: Int[Array, "B J"] | None,
        judged: Bool[Array, "B D"],
        sampled: Bool[Array, " B"],
    ) -> "Calibration":
        """Counts a step.

        Args:
            right: the target's tokens.
            path: see `proposal.Accepted`.
            judged: positions before which all is right.
            sampled: rows at a temperature.
        """
        if self.frozen:
            return self
        depth = right.shape[1]
        lessons, placed = lessons.along(path, depth)
        judged = judged if placed is None else judged & placed
        hits, likelihood = self.hits, self.likelihood
        if lessons.trials is not None:
            of = judged & sampled[:, None]
            hit = (lessons.trials == right[:, :, None]) & of[:, :, None]
            hits = _fading(hits, of, jnp.sum(hit, axis=0).astype(jnp.float32))
        if lessons.tokens is not None and lessons.likelihood is not None:
            of = judged & ~sampled[:, None]
            same = (lessons.tokens == right[:, :, None])[..., None]
            known = jnp.sum(jnp.where(same, lessons.likelihood, 0.0), axis=2)
            other = jnp.log1p(-jnp.minimum(jnp.sum(jnp.exp(lessons.likelihood), axis=2), 1 - 1e-6))
            found = jnp.where(jnp.any(same, axis=2), known, other)
            likelihood = _fading(likelihood, of, jnp.sum(jnp.where(of[..., None], found, 0.0), axis=0))
        return self.replace(hits=hits, likelihood=likelihood)

    def partition(self) -> Self:
        """The same on every device."""
        return self.replace(hits=PartitionSpec(), likelihood=PartitionSpec())


def _fading(counted: Float[Array, "D C"], judged: Bool[Array, "B P"], more: Float[Array, "P C"]) -> Float[Array, "D C"]:
    """Counters with what a step adds to the first depths."""
    depth = more.shape[0]
    keep = jnp.exp(-jnp.sum(judged, axis=0).astype(jnp.float32) / MEMORY)
    return counted.at[:depth].set(keep[:, None] * counted[:depth] + more)


def init_calibration(depth: int, start: Sequence[float] = ()) -> Calibration:
    """Counters for so many depths.

    Args:
        start: sharpness of each depth to begin with, as it is stored with the drafter, the last one for those beyond;
            the nearest candidate is taken. Without it, all begin with the first candidate.
    """
    hits = np.zeros((depth, len(SHARPNESS)), np.float32)
    for d in range(depth if start else 0):
        distances = [abs(1 / start[min(d, len(start) - 1)] - 1 / sharpness) for sharpness in SHARPNESS]
        hits[d, distances.index(min(distances))] = PRIOR
    return Calibration(jnp.asarray(hits), jnp.zeros((depth, len(GREEDY))))
