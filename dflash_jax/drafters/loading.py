"""Drafters from checkpoints."""

from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from dflash_jax import checkpoint, drafters, sharding
from dflash_jax.config import parse_dtype
from dflash_jax.drafters import published
from dflash_jax.drafters.base import UNREAD, Drafter


def load_drafter(
    source: str | Path,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    num_target_layers: int | None = None,
    target: str | Path | None = None,
) -> Drafter:
    """Loads a drafter of any kind from a local directory or a hub id; see `load_target` for the arguments.

    Args:
        num_target_layers: depth of the target. The official EAGLE-3 drafters do not say which layers they tap; it
            follows from this.
        target: the target's directory. Some drafters have their mask token as text only; its tokenizer knows the id.

    Raises:
        ValueError: as `load_target`; or the layers that it taps are not known, or its mask token, or which of its slots
            predict.
    """
    array_type = parse_dtype(dtype)
    directory = checkpoint.resolve(source, "drafter")
    raw = published.completed(checkpoint.read_json(directory / "config.json"), str(source))
    kind, config = drafters.KINDS[drafters.kind_of(raw)], drafters.drafter_config(raw, num_target_layers, target)
    reader = checkpoint.Reader(directory, kind.canonical_name)
    config = config.with_tensors({name: reader.shape(name) for name in reader.names()})
    layout = sharding.check_layout(config, mesh)
    unread = lambda name: name.endswith(UNREAD)
    table = kind.tensors(config, layout)
    params = checkpoint.load(reader, table, array_type, ignored=unread, place=sharding.placement(mesh))
    if config.own_vocabulary and config.draft_vocab_size == config.vocab_size and not params["d2t"].any():
        del params["d2t"]  # all tokens, in the target's order
        config = replace(config, own_vocabulary=False)
    return kind.Drafter(params, config, layout=layout, mesh=mesh)
