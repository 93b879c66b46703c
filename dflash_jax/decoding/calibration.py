"""How far a drafter's scores are to be trusted against the noise of sampling: learned from what verification reveals.

Draft and target share their noise, so the best guess of `argmax(log p / T + noise)` would be `argmax(log q / T +
noise)` if q were p. Where the target is sharper than its drafter says, the noise misleads. Then a sharpness c above 1
makes a better guess, `argmax(c log q / T + noise)`, up to `argmax(log q)`. At every verified position whose proposals
before were right, the target's token is known, and so is whether each c would have proposed it.

A tree is ranked by how likely each token is to be the target's. The drafter says p, the softmax of the scores with the
noise, and may be too sure of it, or not sure enough. So two numbers are fitted at each depth, apart for greedy and
sampled rows: a token is right with probability sigmoid(a + b logit(p)). Every verified position is an observation of
its ranked tokens, and a and b take a Newton step of the logistic regression.

What is proposed never changes what is emitted. Shapes: B rows, M places, D depths, T block positions, C candidates,
R ranks, G kinds of rows: greedy and sampled.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

SHARPNESS = (1.0, 1.5, 2.0, 3.0, math.inf)  # candidates for c; the last one leaves the noise out
MOST = 1000.0  # stands for infinity in a file
MEMORY = 4096.0  # verified positions of a depth after which what was learned has faded to 1 / e
PRIOR = 16.0  # verified positions that a stored sharpness counts as
STIFF = (4.0, 0.0, 4.0)  # information on a and b that there is before any token was judged
LEAST, MOST_LOGIT = 0.05, 12.0  # of b; and of all logits, in size


class Lessons(struct.PyTreeNode):
    """What the target's tokens will say of the drafter, wherever they turn out to lie.

    A place is a context that the drafter looked at: the anchor, or a node that it went on from.

    Attributes:
        trials: what each sharpness would have proposed after each place; None where none is learned.
        tokens: the likeliest tokens after each place, the best first; of a tree.
        logits: of the drafter's probability of each of them to be right.
        places: place of each block position, -1 for a node that the drafter did not go on from, or has nothing to
            learn from. None: a place for each depth.
    """

    trials: Int[Array, "B M C"] | None
    tokens: Int[Array, "B M R"] | None = None
    logits: Float[Array, "B M R"] | None = None
    places: Int[Array, "B T"] | None = None

    def along(self, path: Int[Array, "B J"] | None, depth: int) -> "tuple[Lessons, Bool[Array, 'B D'] | None]":
        """Those of the first `depth` positions of a path, by depth, and which of these have a place; None is all."""
        every = self.replace(places=None)
        if self.places is None:
            return jax.tree.map(lambda x: x[:, :depth], every), None
        places = self.places[:, :depth] if path is None else jnp.take_along_axis(self.places, path[:, :depth], axis=1)

        def pick(x: Array) -> Array:
            at = jnp.maximum(places, 0).reshape(*places.shape, *[1] * (x.ndim - 2))
            return jnp.take_along_axis(x, at, axis=1)

        return jax.tree.map(pick, every), places >= 0


class Calibration(struct.PyTreeNode):
    """Counters of a drafter in an engine.

    Attributes:
        hits: verified positions at which each candidate would have been right, fading.
        weights: a and b of each depth.
        information: on them, fading: the Hessian of the regression, aa, ab and bb.
        frozen: whether nothing more is learned.
    """

    hits: Float[Array, "D C"]
    weights: Float[Array, "G D 2"]
    information: Float[Array, "G D 3"]
    frozen: bool = struct.field(pytree_node=False, default=False)

    @property
    def best(self) -> Int[Array, " D"]:
        """The candidate to use at each depth; the first of equals."""
        return jnp.argmax(self.hits, axis=1)

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
        learnt = self
        if lessons.trials is not None:
            of = judged & sampled[:, None]
            hit = (lessons.trials == right[:, :, None]) & of[:, :, None]
            learnt = learnt.replace(hits=_fading(self.hits, of, jnp.sum(hit, axis=0).astype(jnp.float32)))
        if lessons.tokens is not None and lessons.logits is not None:
            of = jnp.stack([judged & ~sampled[:, None], judged & sampled[:, None]])
            learnt = learnt._regressed(lessons.logits, lessons.tokens == right[:, :, None], of)
        return learnt

    def _regressed(
        self, logits: Float[Array, "B P R"], right: Bool[Array, "B P R"], judged: Bool[Array, "G B P"]
    ) -> "Calibration":
        """A Newton step toward the a and b of the first depths that make these outcomes likeliest."""
        depth, summed = logits.shape[1], partial(jnp.sum, axis=(1, 3))
        a, b = (self.weights[:, None, :depth, None, i] for i in range(2))
        counts, p = judged[..., None], jax.nn.sigmoid(a + b * logits[None])
        missed, doubt = jnp.where(counts, right[None].astype(p.dtype) - p, 0.0), jnp.where(counts, p * (1 - p), 0.0)
        keep = jnp.exp(-jnp.sum(judged, axis=1).astype(jnp.float32) / MEMORY)[..., None]
        z, least = logits[None], jnp.asarray(STIFF)[None, None]
        seen = jnp.stack([summed(doubt), summed(doubt * z), summed(doubt * z**2)], axis=-1)
        information = keep * self.information[:, :depth] + (1 - keep) * least + seen
        g, h = summed(missed), summed(missed * z)
        aa, ab, bb = jnp.moveaxis(information, -1, 0)
        step = jnp.stack([bb * g - ab * h, aa * h - ab * g], axis=-1) / (aa * bb - ab**2)[..., None]
        weights = jnp.clip(self.weights[:, :depth] + step, jnp.asarray([-MOST_LOGIT, LEAST])[None, None], MOST_LOGIT)
        return self.replace(
            weights=self.weights.at[:, :depth].set(weights),
            information=self.information.at[:, :depth].set(information),
        )

    def partition(self) -> Self:
        """The same on every device."""
        return self.replace(hits=PartitionSpec(), weights=PartitionSpec(), information=PartitionSpec())


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
    weights = jnp.tile(jnp.asarray([0.0, 1.0]), (2, depth, 1))
    return Calibration(jnp.asarray(hits), weights, jnp.tile(jnp.asarray(STIFF), (2, depth, 1)))
