"""Resumable state of a run, by orbax. A checkpoint appears whole or not at all."""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from dflash_jax.train.step import TrainState


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: of the run's checkpoints; made if it is missing.
        keep: how many to keep, the newest ones.
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(
            Path(directory).resolve(), item_handlers=ocp.StandardCheckpointHandler(), options=options
        )

    @property
    def steps(self) -> list[int]:
        """Steps that can be restored, in order."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState) -> None:
        """Writes the state under its step; the step is complete on disk when this returns.

        Raises:
            OSError: it could not be written, as to a full disk; checkpoints before it are as they were.
        """
        step = int(state.step)
        if step in self.steps:
            return
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state))
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:  # tensorstore raises ValueError for what the system refuses
            # The writes of the other arrays fail as well, and each would be logged with its traceback.
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            so = "the same command continues from the one before"
            raise OSError(f"the checkpoint of step {step} could not be written; {so}: {error}") from error

    def restore(self, like: Any, step: int | None = None) -> TrainState:
        """The newest state, or that of `step`, in the shapes of `like`.

        Raises:
            ValueError: there is none, or it is of another model or optimizer.
        """
        step = self._find(step)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        try:
            restored = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the checkpoint of step {step} does not fit this run: {error!s:.300}") from error
        return jax.tree.map(jax.numpy.array, restored)  # buffers of our own, which a step may be given

    def restore_params(self, step: int | None = None) -> Any:
        """The parameters of a checkpoint alone, as on disk."""
        step = self._find(step)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # wherever it was saved
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
        like = jax.tree.map(shape, self._manager.item_metadata(step))
        return self._manager.restore(step, args=ocp.args.StandardRestore(like))["params"]

    def _find(self, step: int | None) -> int:
        if not self.steps or (step is not None and step not in self.steps):
            which = "" if step is None else f" of step {step}"
            raise ValueError(f"there is no checkpoint{which}; steps on disk: {self.steps or 'none'}")
        return self.steps[-1] if step is None else step

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.close()
