"""What the stages begin with that read training data: settings, target, data and drafter."""

import sys
from typing import Any, NamedTuple

from dflash_jax import loading
from dflash_jax.checkpoint import resolve
from dflash_jax.drafters import kind_of, laid_out
from dflash_jax.drafters.base import Drafter
from dflash_jax.drafters.config import with_mask_token
from dflash_jax.drafters.loading import load_drafter, read_drafter_config
from dflash_jax.infer.text import Text
from dflash_jax.loading import choose_mesh, target_config, use_kernels
from dflash_jax.mesh import join
from dflash_jax.target import Target, load_target
from dflash_jax.train.arguments import DataOptions
from dflash_jax.train.card import TARGET
from dflash_jax.train.config import TrainConfig, make_config, read_settings
from dflash_jax.train.data import Dataset, read_examples
from dflash_jax.train.drafters import choose_mask_token, converted, frequent_tokens, new_drafter, with_block_size


class Prepared(NamedTuple):
    """What a stage trains with.

    Attributes:
        raw: the drafter's `config.json`.
    """

    config: TrainConfig
    target: Target
    data: Dataset
    drafter: Drafter
    raw: dict[str, Any]


def prepare(options: DataOptions, overrides: dict[str, Any]) -> Prepared:
    """Loads what the options name.

    Args:
        overrides: settings that were given beside those of the options' file.

    Raises:
        ValueError: an option or a setting is unusable, or there is nothing to train on.
        OSError: a file cannot be read.
    """
    given = read_settings(options.config, overrides)  # complains before anything is loaded
    if options.distributed is not None:
        join(options.distributed)
    use_kernels(options.kernels)
    loading.enable_compilation_cache()
    started, raw = None, {}
    if options.init_from:
        started, raw, given = _started(options, given)
    config = make_config(given)
    if others := ", ".join(name for name in given if name not in config.named()):
        print(f"note: without effect for a {config.drafter} drafter: {others}", file=sys.stderr)
    mesh = choose_mesh(options.mesh, training=True)
    if "drafter" in options.quantize:
        raise ValueError("training keeps the drafter in float32; leave drafter=... out of --quantize")
    how = {"overrides": options.target_config, "quantize": options.quantize}
    target = load_target(options.target, dtype=config.dtype, mesh=mesh, **how)
    ends = target.config.eos_token_ids
    data = read_examples(options.data, config.length, target.config.vocab_size, Text(target.directory), ends)
    print(
        f"{len(data.examples)} conversations; {data.cut} cut to {config.length} tokens, "
        f"{data.without_answer} without an answer to learn left out",
        file=sys.stderr,
    )
    if started is not None:
        started.config.check_pair(target.config)
        started, raw = converted(target, started, raw, config)
        started, raw = with_block_size(started, raw, config.block_size)
        return Prepared(config, target, data, started, raw | {TARGET: options.target})
    mask = choose_mask_token(target, config.mask_token_id)
    vocabulary = frequent_tokens(data.examples, config.draft_vocab_size)
    drafter, raw = new_drafter(target, config, mask, vocabulary)
    return Prepared(config, target, data, drafter, raw | {TARGET: options.target})


def _started(options: DataOptions, given: dict[str, Any]) -> tuple[Drafter, dict[str, Any], dict[str, Any]]:
    """The drafter of `--init-from` in float32, its `config.json`, and the settings with those that it decides."""
    assert options.init_from
    depth = target_config(options.target, options.target_config).num_hidden_layers
    place = resolve(options.target, "target")
    where = {"num_target_layers": depth, "target": place, "overrides": options.drafter_config}
    drafter = load_drafter(options.init_from, dtype="float32", **where)
    raw = laid_out(read_drafter_config(options.init_from, options.drafter_config))
    raw = {"num_target_layers": depth, **with_mask_token(raw, place)}
    decided = {"num_layers": drafter.config.num_hidden_layers, "target_layer_ids": list(drafter.taps)}
    decided["mask_token_id"] = getattr(drafter.config, "mask_token_id", None)
    if fixed := [name for name in decided if name in given]:
        raise ValueError(f"--init-from decides {', '.join(fixed)}; leave them out")
    return drafter, raw, {"block_size": drafter.config.block_size, "drafter": kind_of(raw)} | given | decided
