"""A training run: resumable, evaluated by real decoding, stopped by what is not finite."""

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled, Wrapped

from dflash_jax.checkpoint import read_json
from dflash_jax.config import Raw
from dflash_jax.drafters.base import Drafter
from dflash_jax.drafters.loading import load_drafter
from dflash_jax.files import reading
from dflash_jax.infer.engine.compiler_options import training_compiler_options
from dflash_jax.infer.interrupt import stop_signals
from dflash_jax.mesh import ROWS, entered, gather, spread
from dflash_jax.sharding import shardings
from dflash_jax.target import Target
from dflash_jax.train.checkpoints import Checkpoints
from dflash_jax.train.config import NotFiniteError, TrainConfig
from dflash_jax.train.data import Packing
from dflash_jax.train.drafters import cast, save_drafter
from dflash_jax.train.features import FeatureCache
from dflash_jax.train.memory import compiled_step, memory_limit
from dflash_jax.train.metrics import Metrics, MetricsLog
from dflash_jax.train.operations import operations, share_of_peak
from dflash_jax.train.step import Batch, TrainState, split_params, train_step

Values = Mapping[str, Any]  # figures of a step by name, on the device
Judge = Callable[[Drafter], Metrics]  # figures of a drafter, with at least "tau"


class Figures:
    """The figures of steps, which are read one step late: whoever reads them waits for the device.

    Args:
        at: the step at which the run went on.
        progress: called with the step and its metrics whenever a line is logged, and after the second step.
    """

    def __init__(self, run: "Run", at: int, progress: Callable[[int, Metrics], None]):
        self._run, self._at, self._progress = run, at, progress
        self._begin, self._last = time.perf_counter(), Metrics()
        self._unread: tuple[int, Values] | None = None

    def add(self, step: int, values: Values) -> None:
        """Takes those of a step that was just sent, and reads those of the step before.

        Raises:
            NotFiniteError: naming that step.
        """
        self.all()
        self._unread = step, values

    def all(self) -> Metrics:
        """Reads what is left, and returns what was logged last."""
        if self._unread is None:
            return self._last
        (step, values), self._unread = self._unread, None
        run, config = self._run, self._run.config
        if not bool(values["finite"]):
            raise NotFiniteError(
                f"step {step}: loss {float(values['loss'])}, gradient norm {float(values['gradient_norm'])}; the "
                f"state before it is saved in {run.directory}. Look at this step's data, or begin a new run with "
                "a lower learning_rate"
            )
        first = step == self._at + 1  # it compiles
        logged = step % config.log_every == 0 or step == run.steps or first
        if logged or step == self._at + 2:  # the first that is timed, so that the time left is told soon
            rate = (step - self._at - 1) / (time.perf_counter() - self._begin)
            figures = {name: float(value) for name, value in values.items()}
            self._last = {"step": step, **figures, "steps_per_second": rate, **self._speeds(rate, figures["labels"])}
            if logged:
                run.log.add(self._last)
            self._progress(step, self._last)
        if first:
            self._begin = time.perf_counter()
        return self._last

    def _speeds(self, steps: float, labels: float) -> Metrics:
        """Figures of so many steps a second, each with so many labels."""
        run, config = self._run, self._run.config
        speeds = {"tokens_per_second": steps * config.batch_size * config.length, "labels_per_second": steps * labels}
        cached = run.features is not None
        asked = operations(config, run.target, run.drafter, run.state.params, cached=cached)
        share = share_of_peak(steps * asked, 1 if run.mesh is None else run.mesh.size)
        return speeds if share is None else speeds | {"share_of_peak": share}


@dataclass(eq=False)
class Run:
    """One training run in a directory, which `opening.open_run` opens.

    The directory holds `config.json` (every setting), `drafter.json` (the drafter's config), `metrics.jsonl`,
    `checkpoints/`, and the drafters `last/` and, if it is evaluated, `best/`.

    Attributes:
        drafter: as it began, on the mesh.
        state: parameters and optimizer, as they are now.
        steps: of the run from its beginning to its end.
        remat: whether layers are computed again; known once the first step was taken.
    """

    directory: Path
    target: Target
    drafter: Drafter
    raw: Raw
    config: TrainConfig
    mesh: Mesh | None
    state: TrainState
    steps: int
    packing: Packing
    checkpoints: Checkpoints
    log: MetricsLog
    features: FeatureCache | None
    judge: Judge | None
    remat: bool | None = None
    _compiled: Compiled | None = None

    def _step(self, *arguments: object) -> tuple[TrainState, dict[str, jax.Array]]:
        """`train_step` compiled; the first call compiles it."""
        if self._compiled is None:
            self._compiled, self.remat = compiled_step(
                lambda remat: self._jitted(remat).lower(*arguments), self.config.remat, memory_limit()
            )
        return self._compiled(*arguments)

    def _jitted(self, remat: bool) -> Wrapped:
        placed = None
        if self.mesh is not None:
            placed = shardings(self.state, self.mesh), NamedSharding(self.mesh, P())
        return jax.jit(
            partial(train_step, replace(self.config, remat=remat), self.steps),
            donate_argnums=2,
            compiler_options=training_compiler_options(),
            out_shardings=placed,
        )

    def fit(self, progress: Callable[[int, Metrics], None] = lambda step, metrics: None) -> Metrics:
        """Trains to the end and returns the last metrics; an interrupted run saves where it is.

        Args:
            progress: called with the step and its metrics whenever a line is logged, and after the second step.

        Raises:
            NotFiniteError: naming the step; the state before it is saved.
        """
        stopping: list[int] = []
        try:
            # Acted upon between steps: in the middle of one there is no state to save.
            with stop_signals() as stopping:
                metrics = self._loop(progress, stopping)
            self.checkpoints.save(self.state)
        except (KeyboardInterrupt, NotFiniteError):
            if len(stopping) < 2:
                self.checkpoints.save(self.state)
            raise
        finally:
            self.checkpoints.close()
        self.save("last", self.trained())
        return metrics

    def _loop(self, progress: Callable[[int, Metrics], None], stopping: list[int]) -> Metrics:
        """Takes the steps that are left. The device is never waited for before it has the next step: while it computes
        one, a thread packs the rows of the next, and then the figures of the step before are read."""
        at = int(self.state.step)
        reported = Figures(self, at, progress)
        metrics = self._evaluate_if_due(at, progress)
        with ThreadPoolExecutor(1, "rows") as packing:
            batch = packing.submit(self.batch, at) if at < self.steps else None
            going = self.state.step >= 0  # on the state's devices, or there would be another program
            for done in range(at + 1, self.steps + 1):
                assert batch is not None
                rows = batch.result()
                with entered(self.mesh):
                    self.state, values = self._step(self.target, self.drafter, self.state, rows, going)
                going = values["finite"]  # if it is not, the next step changes nothing
                if done < self.steps:
                    batch = packing.submit(self.batch, done)
                reported.add(done, values)
                if self._pauses_after(done) or stopping:
                    metrics = metrics | reported.all()
                    if self._is_saved(done):
                        self.checkpoints.save(self.state)
                    metrics = metrics | self._evaluate_if_due(done, progress)
                if stopping:
                    raise KeyboardInterrupt
        return metrics

    def _pauses_after(self, step: int) -> bool:
        """Whether something is done with the state after this step before the next one begins."""
        return step == self.steps or self._is_saved(step) or self._is_evaluated(step)

    def _is_saved(self, step: int) -> bool:
        return self.config.save_every > 0 and step % self.config.save_every == 0

    def _is_evaluated(self, step: int) -> bool:
        every = self.config.evaluate_every or max(1, self.steps // 10)
        return self.judge is not None and step > 0 and (step % every == 0 or step == self.steps)

    def _evaluate_if_due(self, step: int, progress: Callable[[int, Metrics], None]) -> Metrics:
        if not self._is_evaluated(step) or any("tau" in x and x["step"] == step for x in self.log.lines()):
            return {}
        self.checkpoints.save(self.state)  # an evaluation that fails must not cost the training
        figures = self.evaluate()
        progress(step, figures)
        return figures

    def batch(self, step: int) -> Batch:
        """The rows of a step, with their cached features if there are any."""
        contents = self.packing.contents(step)
        rows = self.packing.rows(contents)
        features, hidden = self.features.rows(contents, self.config.length) if self.features else (None, None)
        return Batch(*(None if x is None else self._placed(x, P(ROWS)) for x in (*rows, features, hidden)))  # type: ignore

    def _placed(self, x: np.ndarray, spec: P) -> jax.Array:
        """A value of the host on the devices."""
        return jnp.asarray(x) if self.mesh is None else spread(x, NamedSharding(self.mesh, spec))

    def save(self, name: str, drafter: Drafter, learnt: Metrics | None = None) -> None:
        """Writes a drafter into a directory of this name, with what was learned of it in its `config.json`."""
        drafter = drafter.replace(params=gather(drafter.params), mesh=None)
        if jax.process_index() == 0:
            save_drafter(self.directory / name, drafter, {**self.raw, **(learnt or {})})

    def trained(self) -> Drafter:
        """The drafter as it is now, in float32."""
        return self.drafter.replace(params=self.state.params | split_params(self.drafter)[1])

    def evaluate(self) -> Metrics:
        """Evaluates, logs, and keeps the drafter as `best` if none before reached its tau."""
        if self.judge is None:
            return {}
        drafter = self.trained()
        serving = drafter.replace(params=cast(drafter.params, self.target.dtype))
        figures = {"step": int(self.state.step), **self.judge(serving)}
        best = max((line["tau"] or 0 for line in self.log.lines() if "tau" in line), default=0)
        if (figures["tau"] or 0) >= best:
            learnt = {name: figures[name] for name in ("proposal_sharpness",) if name in figures}
            self.save("best", drafter, learnt)
        self.log.add(figures)
        return figures


def load_run(directory: str | Path, step: int | None = None) -> tuple[Drafter, dict[str, Any]]:
    """The drafter of a run in float32, and its `config.json`: of the checkpoint of `step`, else `best` if the run
    was evaluated, else of the newest checkpoint.

    Raises:
        ValueError: the directory holds no run, or no such checkpoint.
    """
    with reading(Path(directory)) as directory:
        raw = read_json(directory / "drafter.json")
        if step is None and (directory / "best").is_dir():
            return load_drafter(directory / "best", dtype="float32"), read_json(directory / "best" / "config.json")
        drafter = load_drafter(directory / "last", dtype="float32")  # for what is not trained
        with contextlib.closing(Checkpoints(directory / "checkpoints")) as checkpoints:
            params = checkpoints.restore_params(step)
        return drafter.replace(params=params | split_params(drafter)[1]), raw
