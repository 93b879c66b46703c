"""A drafter that learns while its engine is used: from answers, and the target's features that verification computed.

No further pass of the target is needed. In reinforcement learning the target changes, and a drafter that does not
follow it gets slower.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.drafters.around import inmost
from dflash_jax.drafters.base import Drafter
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.rollouts import Rollouts
from dflash_jax.quantised import forms
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.drafters import cast
from dflash_jax.train.step import Batch, TrainState, init_state, split_params, train_step

DEFAULTS = {"learning_rate": 1e-4, "schedule": "constant", "warmup": 0.0, "row_anchors": 64, "batch_size": 8}


class OnlineDrafter:
    """Trains the drafter of an engine on its rollouts, and gives the engine the new weights.

    Args:
        engine: made with `keep_features=True`, on one device; its drafter has plain weights.
        config: of the training, with the drafter's block size and a constant learning rate; settings of data, saving
            and evaluation are not used. By default the trainer's settings, with a learning rate of 1e-4, steps of 8
            answers, and 64 blocks of each.
        every: calls of `learn` from one training to the next; all rollouts since then are used.

    Rollouts do not have the target's logits. A drafter that is also compared with these, as LiLiCorr is, learns without
    that part of its loss.

    What is given to `Engine.update` as its drafter in between is replaced by what this one has learned.

    Attributes:
        state: parameters in float32, and what the optimizer keeps.

    Raises:
        ValueError: an engine that keeps no features, is split over devices, or has a drafter of quantized weights; a
            training that needs what rollouts do not have.
    """

    def __init__(self, engine: Engine, config: TrainConfig | None = None, *, every: int = 1):
        drafter = inmost(engine.drafter)
        if not engine.config.keep_features or not isinstance(drafter, Drafter):
            raise ValueError("an online drafter learns from features; make the engine with keep_features=True")
        if engine.target.mesh is not None:
            raise ValueError("an online drafter learns on one device; its engine is split over several")
        if forms(drafter.params):
            raise ValueError("an online drafter needs plain weights; load it unquantized")
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        size = drafter.config.block_size
        config = config or TrainConfig(block_size=size, **DEFAULTS)
        if config.block_size != size:
            raise ValueError(f"block_size must be the drafter's, {size}; got {config.block_size}")
        if config.schedule != "constant" or config.warmup:
            raise ValueError(
                'the learning rate must be constant, as the number of steps is not known: schedule="constant", warmup=0'
            )
        if config.losses.distill or config.anchor_placement == "decoded":
            raise ValueError("rollouts have neither the target's distribution nor the places of steps to learn from")
        self.config = replace(config, remat=False) if config.remat == "auto" else config
        self.state: TrainState = init_state(drafter, self.config, 1)
        self._engine, self._every, self._made = engine, every, list[Rollouts]()
        self._width = 0  # of the rollouts
        self._step = jax.jit(partial(train_step, self.config, 1), donate_argnames="state")

    def learn(self, made: Rollouts) -> list[dict[str, float]]:
        """Takes rollouts. When there are enough, takes a step with every `batch_size` answers of them, in an order that
        follows from the seed, and gives the engine the new weights.

        Returns:
            The figures of each step, `train_step`'s: loss, accuracy and more; nothing where none was taken.

        Raises:
            ValueError: rollouts without features, or of another width than the first ones.
        """
        if made.features is None:
            raise ValueError("these rollouts have no features; they come from an engine without keep_features")
        self._width = self._width or made.tokens.shape[1]
        if made.tokens.shape[1] != self._width:
            raise ValueError(f"all rollouts must have the same width, {self._width} as the first; give `rollouts` that")
        self._made.append(made)
        if len(self._made) < self._every:
            return []
        taken, self._made = self._made, []
        drafter, figures = inmost(self._engine.drafter), []
        assert isinstance(drafter, Drafter)
        for batch in self._batches(taken):
            self.state, found = self._step(self._engine.target, drafter, self.state, batch)
            figures.append(jax.device_get(found))  # or the features of all steps would be on the device
        params = cast(self.state.params, drafter.dtype) | split_params(drafter)[1]
        self._engine.update(drafter=drafter.replace(params=params))
        return [{name: float(x) for name, x in found.items()} for found in figures]

    def _batches(self, taken: Sequence[Rollouts]) -> Iterator[Batch]:
        """Rows of the rollouts in random order; the last step takes some of the first ones again."""
        rows = [(made, i) for made in taken for i in range(len(made.tokens))]
        rng, size = np.random.default_rng((self.config.seed, int(self.state.step))), self.config.batch_size
        order = rng.permutation(len(rows))
        for begin in range(0, len(rows), size):
            some = [rows[i] for i in np.resize(np.concatenate([order[begin:], order]), size)]
            of = lambda name, some=some: jnp.asarray(np.stack([getattr(made, name)[i] for made, i in some]))
            tokens = of("tokens")
            yield Batch(tokens, jnp.zeros_like(tokens), of("mask"), features=of("features"))
