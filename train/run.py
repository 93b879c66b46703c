"""The training loop: resumable, evaluated by real decoding, stopped by what is not finite."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.checkpoint import read_json
from dflash_jax.drafters.base import Drafter
from dflash_jax.drafters.loading import load_drafter
from dflash_jax.files import one_line, reading, write_json, write_text
from dflash_jax.infer.compiler_options import block_compiler_options
from dflash_jax.infer.interrupt import stop_signals
from dflash_jax.mesh import HEADS, ROWS, gather, parts_of, rows_of, spread
from dflash_jax.sharding import shardings
from dflash_jax.target import Target
from dflash_jax.train.checkpoints import Checkpoints
from dflash_jax.train.config import NotFiniteError, TrainConfig
from dflash_jax.train.data import Example, Packing
from dflash_jax.train.drafters import cast, save_drafter
from dflash_jax.train.features import FeatureCache, data_fingerprint, model_fingerprint
from dflash_jax.train.metrics import read_metrics
from dflash_jax.train.step import Batch, init_state, split_params, train_step

# Settings that may change when a run continues: they decide what is reported and kept, not what is learnt.
FREE = ("log_every", "save_every", "evaluate_every", "evaluate_samples", "evaluate_max_new_tokens", "keep")
FREE += ("evaluate_temperature", "accumulate", "loss_chunk", "remat")


class Run:
    """One training run in a directory.

    The directory holds `config.json` (every setting), `drafter.json` (the drafter's config), `metrics.jsonl`,
    `checkpoints/`, and the drafters `last/` and, if it is evaluated, `best/`.

    Args:
        directory: new, or of the same run, which then continues at its newest checkpoint.
        target: frozen.
        drafter: as it begins.
        raw: the drafter's `config.json`.
        examples: see `data.read_examples`.
        config: settings.
        features: cached target features; None computes them online.
        evaluate: figures of a drafter, with at least "tau"; None does not evaluate.

    Raises:
        ValueError: the directory holds a run of other settings, target or data, or a mask token the data uses.
    """

    def __init__(
        self,
        directory: str | Path,
        target: Target,
        drafter: Drafter,
        raw: dict[str, Any],
        examples: list[Example],
        config: TrainConfig,
        *,
        features: FeatureCache | None = None,
        evaluate: Callable[[Drafter], dict[str, Any]] | None = None,
    ):
        mask = getattr(drafter.config, "mask_token_id", None)
        if mask is not None and any(np.any(example.tokens == mask) for example in examples):
            raise ValueError(f"the mask token {mask} occurs in the training data; choose another mask_token_id")
        unknown = sum(example.begins is None for example in examples)
        if config.anchor_placement == "decoded" and unknown:
            raise ValueError(
                f"anchor_placement 'decoded' needs answers that say where steps began; {unknown} of {len(examples)} do "
                "not: make them with `regenerate --drafter`"
            )
        if drafter.config.block_size != config.block_size:  # an export would claim what was not trained
            own = drafter.config.block_size
            raise ValueError(f"block_size {config.block_size} is not the drafter's {own}; see `with_block_size`")
        drafter.config.check_pair(target.config)
        self.target, self.drafter, self.raw, self.config = target, drafter, raw, config
        self.leads = jax.process_index() == 0  # the process that writes what is not sharded
        if evaluate is not None and jax.process_count() > 1:
            raise ValueError("several processes do not evaluate on the way; run `evaluate` on a checkpoint")
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(self.directory / "checkpoints", config.keep)
        self._check_same_run(examples)
        self._features, self._evaluate = features, evaluate
        self._packing = Packing(examples, config.length, config.batch_size, config.seed)
        self.steps = self._packing.steps(config.epochs)
        if config.max_steps:
            self.steps = min(self.steps, config.max_steps)
        self._every = config.evaluate_every or max(1, self.steps // 10)
        assert not isinstance(target.mesh, AbstractMesh)  # there are devices to train on
        self.mesh = target.mesh
        if config.batch_size % (config.accumulate * rows_of(self.mesh)):
            raise ValueError(
                f"batch_size {config.batch_size} must be a multiple of accumulate {config.accumulate} times the mesh's "
                f"{rows_of(self.mesh)} parts of rows"
            )
        self.state = init_state(drafter, config, self.steps)
        if self.mesh is not None:
            # Its parameters stay as in the checkpoint, so that a run continues on any mesh.
            heads, parts = drafter.config.layers[0].attention.num_kv_heads, parts_of(self.mesh, HEADS)
            if drafter.layout.shards != 1 or heads % parts:
                raise ValueError(
                    f"the drafter's {heads} key-value heads must be a multiple of the "
                    f"mesh's model and expert axes, {parts}, and the drafter loaded without a mesh"
                )
            self.drafter = spread(drafter, shardings(drafter, self.mesh)).replace(mesh=self.mesh)
            self.state = spread(self.state, shardings(self.state, self.mesh))
        if self.checkpoints.steps:
            self.state = self.checkpoints.restore(self.state)
        else:
            self._save("last", drafter)
        self._cut_metrics(int(self.state.step))
        self._step = jax.jit(
            partial(train_step, config, self.steps),
            donate_argnums=2,
            compiler_options=block_compiler_options(),
            out_shardings=None
            if self.mesh is None
            else (shardings(self.state, self.mesh), NamedSharding(self.mesh, P())),
        )

    def fit(self, progress: Callable[[int, dict[str, Any]], None] = lambda step, metrics: None) -> dict[str, Any]:
        """Trains to the end and returns the last metrics; an interrupted run saves where it is.

        Args:
            progress: called with the step and its metrics whenever a line is logged.

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
        self._save("last", self.trained())
        return metrics

    def _loop(self, progress: Callable[[int, dict[str, Any]], None], stopping: list[int]) -> dict[str, Any]:
        config, metrics = self.config, {}
        begin, at = time.perf_counter(), int(self.state.step)
        self._evaluate_if_due(at, progress)
        with self._on_mesh():
            batch = self.batch(at) if at < self.steps else None
        for step in range(at, self.steps):
            done = step + 1
            with self._on_mesh():
                self.state, values = self._step(self.target, self.drafter, self.state, batch)
                # The device computes the step; whoever asks for its figures, as `finite`, waits for it.
                batch = self.batch(done) if done < self.steps else None
            if step == at:
                begin = time.perf_counter()
            if not bool(values["finite"]):
                raise NotFiniteError(
                    f"step {done}: loss {float(values['loss'])}, gradient norm {float(values['gradient_norm'])}; the "
                    f"state before it is saved in {self.directory}. Look at this step's data, or begin a new run with "
                    "a lower learning_rate"
                )
            if done % config.log_every == 0 or done == self.steps or step == at:
                metrics = {name: float(value) for name, value in values.items()}
                rate = (step - at) / (time.perf_counter() - begin)  # the first step compiles
                metrics = {"step": done, **metrics, "steps_per_second": rate}
                self._log(metrics)
                progress(done, metrics)
            if config.save_every and done % config.save_every == 0:
                self.checkpoints.save(self.state)
            metrics = metrics | self._evaluate_if_due(done, progress)
            if stopping:
                raise KeyboardInterrupt
        return metrics

    def _evaluate_if_due(self, step: int, progress: Callable[[int, dict[str, Any]], None]) -> dict[str, Any]:
        due = step > 0 and (step % self._every == 0 or step == self.steps)
        if self._evaluate is None or not due or any("tau" in x and x["step"] == step for x in self._metrics()):
            return {}
        self.checkpoints.save(self.state)  # an evaluation that fails must not cost the training
        figures = self.evaluate()
        progress(step, figures)
        return figures

    def batch(self, step: int) -> Batch:
        """The rows of a step, with their cached features if there are any."""
        contents = self._packing.contents(step)
        rows = self._packing.rows(contents)
        features, hidden = self._features.rows(contents, self.config.length) if self._features else (None, None)
        sharding = None if self.mesh is None else NamedSharding(self.mesh, P(ROWS))
        place = lambda x: jnp.asarray(x) if sharding is None else spread(x, sharding)
        return Batch(*(None if x is None else place(x) for x in (*rows, features, hidden)))  # type: ignore

    def _on_mesh(self) -> Any:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _save(self, name: str, drafter: Drafter, learnt: Mapping[str, Any] | None = None) -> None:
        drafter = drafter.replace(params=gather(drafter.params), mesh=None)
        if self.leads:
            save_drafter(self.directory / name, drafter, {**self.raw, **(learnt or {})})

    def trained(self) -> Drafter:
        """The drafter as it is now, in float32."""
        return self.drafter.replace(params=self.state.params | split_params(self.drafter.params)[1])

    def evaluate(self) -> dict[str, Any]:
        """Evaluates, logs, and keeps the drafter as `best` if none before reached its tau."""
        if self._evaluate is None:
            return {}
        drafter = self.trained()
        serving = drafter.replace(params=cast(drafter.params, self.target.dtype))
        figures = {"step": int(self.state.step), **self._evaluate(serving)}
        best = max((line["tau"] or 0 for line in self._metrics() if "tau" in line), default=0)
        if (figures["tau"] or 0) >= best:
            learnt = {name: figures[name] for name in ("proposal_sharpness",) if name in figures}
            self._save("best", drafter, learnt)
        self._log(figures)
        return figures

    def _check_same_run(self, examples: list[Example]) -> None:
        path = self.directory / "run.json"
        settings = {k: v for k, v in dataclasses.asdict(self.config).items() if k not in FREE}
        identity = json.loads(json.dumps(settings))
        identity |= {
            "target": model_fingerprint(self.target),
            "data": data_fingerprint(examples),
            "initial drafter": model_fingerprint(self.drafter),
        }
        if self.checkpoints.steps:  # nothing is lost before the first checkpoint
            found = read_json(path)
            if differ := [name for name in identity if found.get(name) != identity[name]]:
                listed = (f"{name} {found.get(name)!r:.200}, now {identity[name]!r:.200}" for name in differ)
                raise ValueError(
                    one_line(f"{self.directory} holds another run: {'; '.join(listed)}. Choose another directory")
                )
            for name in ("config.json", "drafter.json"):  # written anew below, but a damaged disk is not passed over
                if (self.directory / name).exists():
                    read_json(self.directory / name)
        if self.leads:
            write_json(path, identity)
            write_json(self.directory / "config.json", dataclasses.asdict(self.config))
            write_json(self.directory / "drafter.json", self.raw)

    def _metrics(self) -> list[dict[str, Any]]:
        path = self.directory / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def _cut_metrics(self, step: int) -> None:
        """Drops what was logged after the checkpoint that the run continues from."""
        path = self.directory / "metrics.jsonl"
        text = "".join(json.dumps(line) + "\n" for line in self._metrics() if line["step"] <= step)
        if self.leads:
            write_text(path, text)

    def _log(self, metrics: dict[str, Any]) -> None:
        if self.leads:
            with reading(self.directory / "metrics.jsonl") as path, path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(metrics) + "\n")


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
        return drafter.replace(params=params | split_params(drafter.params)[1]), raw
