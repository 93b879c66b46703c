"""Opens a training run: what does not fit is refused before its files are written; then it begins or continues."""

import json
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from dflash_jax.checkpoint import read_json
from dflash_jax.config import Raw
from dflash_jax.drafters.base import Drafter
from dflash_jax.files import one_line, write_json
from dflash_jax.mesh import HEADS, parts_of, rows_of, spread
from dflash_jax.sharding import shardings
from dflash_jax.target import Target
from dflash_jax.train.checkpoints import Checkpoints
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.data import Example, Packing
from dflash_jax.train.features import FeatureCache, data_fingerprint, model_fingerprint
from dflash_jax.train.metrics import MetricsLog
from dflash_jax.train.run import Judge, Run
from dflash_jax.train.step import init_state

# Settings that may change when a run continues: they decide what is reported and kept, not what is learned.
FREE = ("log_every", "save_every", "evaluate_every", "evaluate_samples", "evaluate_max_new_tokens", "keep")
FREE += ("evaluate_temperature", "accumulate", "loss_chunk", "remat")


def open_run(
    directory: str | Path,
    target: Target,
    drafter: Drafter,
    raw: Raw,
    examples: list[Example],
    config: TrainConfig,
    *,
    features: FeatureCache | None = None,
    evaluate: Judge | None = None,
) -> Run:
    """A run that begins, or continues at its newest checkpoint.

    Args:
        directory: new, or of the same run.
        target: frozen.
        drafter: as it begins.
        raw: the drafter's `config.json`.
        examples: see `data.read_examples`.
        features: cached target features; None computes them online.
        evaluate: figures of a drafter, with at least "tau"; None does not evaluate.

    Raises:
        ValueError: the directory holds a run of other settings, target or data; or drafter, data, settings and mesh do
            not fit one another.
        OSError: the directory cannot be written.
    """
    mesh = target.mesh
    assert not isinstance(mesh, AbstractMesh)  # there are devices to train on
    if evaluate is not None and jax.process_count() > 1:
        raise ValueError("evaluation during training needs a single process; run `evaluate` on a checkpoint")
    _check_data(drafter, examples, config)
    drafter.config.check_pair(target.config)
    _check_mesh(drafter, mesh, config)
    directory, leads = Path(directory), jax.process_index() == 0  # the process that writes what is not sharded
    directory.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(directory / "checkpoints", config.keep)
    identity = _identity(target, drafter, examples, config)
    if continues := bool(checkpoints.steps):  # nothing is lost before the first checkpoint
        _check_same_run(directory, identity)
    if leads:
        write_json(directory / "run.json", identity)
        write_json(directory / "config.json", config.named())
        write_json(directory / "drafter.json", raw)
    packing = Packing(examples, config.length, config.batch_size, config.seed)
    steps = packing.steps(config.epochs)
    steps = min(steps, config.max_steps) if config.max_steps else steps
    state, begun = init_state(drafter, config, steps), drafter
    if mesh is not None:
        drafter = spread(drafter, shardings(drafter, mesh)).replace(mesh=mesh)
        state = spread(state, shardings(state, mesh))
    if continues:
        state = checkpoints.restore(state)
    log = MetricsLog(directory / "metrics.jsonl", leads)
    run = Run(
        directory, target, drafter, raw, config, mesh, state, steps, packing, checkpoints, log, features, evaluate
    )
    if not continues:
        run.save("last", begun)
    log.cut(int(state.step))
    return run


def _check_data(drafter: Drafter, examples: list[Example], config: TrainConfig) -> None:
    mask = getattr(drafter.config, "mask_token_id", None)
    if mask is not None and any(np.any(example.tokens == mask) for example in examples):
        raise ValueError(f"the mask token {mask} occurs in the training data; choose another mask_token_id")
    unknown = sum(example.begins is None for example in examples)
    if config.anchor_placement == "decoded" and unknown:
        raise ValueError(
            f"anchor_placement 'decoded' needs answers that say where steps began; {unknown} of {len(examples)} do "
            "not: make them with `regenerate --drafter`"
        )
    size = drafter.config.block_size
    if size != config.block_size:  # an export would claim what was not trained
        raise ValueError(f"block_size {config.block_size} is not the drafter's {size}; see `with_block_size`")


def _check_mesh(drafter: Drafter, mesh: Mesh | None, config: TrainConfig) -> None:
    if config.batch_size % (config.accumulate * rows_of(mesh)):
        raise ValueError(
            f"batch_size {config.batch_size} must be a multiple of accumulate {config.accumulate} times the "
            f"{rows_of(mesh)} data-parallel parts of the mesh"
        )
    if mesh is None:
        return
    # The drafter's parameters stay as in the checkpoint, so that a run continues on any mesh.
    heads, parts = drafter.config.layers[0].attention.num_kv_heads, parts_of(mesh, HEADS)
    if drafter.layout.shards != 1 or heads % parts:
        raise ValueError(
            f"the drafter's {heads} key-value heads must be a multiple of the "
            f"mesh's model and expert axes, {parts}, and the drafter loaded without a mesh"
        )


def _identity(target: Target, drafter: Drafter, examples: list[Example], config: TrainConfig) -> Raw:
    """What may not change when a run continues."""
    settings = {name: value for name, value in config.named().items() if name not in FREE}
    return json.loads(json.dumps(settings)) | {
        "target": model_fingerprint(target),
        "data": data_fingerprint(examples),
        "initial drafter": model_fingerprint(drafter),
    }


def _check_same_run(directory: Path, identity: Raw) -> None:
    found = read_json(directory / "run.json")
    if differ := [name for name in identity if found.get(name) != identity[name]]:
        listed = (f"{name} {found.get(name)!r:.200}, now {identity[name]!r:.200}" for name in differ)
        raise ValueError(one_line(f"{directory} holds another run: {'; '.join(listed)}. Choose another directory"))
    for name in ("config.json", "drafter.json"):  # written anew, but a damaged disk is not passed over
        if (directory / name).exists():
            read_json(directory / name)
