"""Drafters from checkpoints."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike

from dflash_jax import checkpoint, drafters, files, sharding
from dflash_jax.config import Raw, parse_dtype
from dflash_jax.decoding.state import DraftModel
from dflash_jax.drafters import AnyKind, function, ngram, published
from dflash_jax.drafters.base import UNREAD, Drafter
from dflash_jax.drafters.config import DrafterConfig
from dflash_jax.mesh import AnyMesh, Layout
from dflash_jax.models.tables import unread_scales
from dflash_jax.overrides import overridden
from dflash_jax.parsing import names_object
from dflash_jax.quantize import Quantize, parse_quantize, rule


def load_drafter(
    source: str | Path,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    num_target_layers: int | None = None,
    target: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    quantize: Quantize = None,
) -> Drafter:
    """Loads a drafter of any kind from a local directory or a hub id; see `load_target` for the arguments.

    Args:
        num_target_layers: number of layers of the target. The official EAGLE-3 drafters do not say which layers they
            tap; it follows from this.
        target: the target's directory. Some drafters have their mask token as text only; its tokenizer knows the id.
        overrides: fields of `config.json` to replace, by name.
        quantize: as of `load_target`, with the keys "drafter", of its layers, and "head", if it has its own. What fuses
            the target's features, and small heads, stay as they are.

    Raises:
        ValueError: as `load_target`; or the layers that it taps are not known, or its mask token, or which of its slots
            predict.
    """
    if isinstance(source, str) and ngram.named(source)[0]:
        raise ValueError(f"{source} has no weights to load here; a folder of this name is ./{source}")
    array_type, quantised = parse_dtype(dtype), rule(parse_quantize(quantize), "drafter")
    directory = checkpoint.resolve(source, "drafter")
    with files.reading(directory / "config.json"):
        raw = read_drafter_config(source, overrides)
        kind, config = drafters.KINDS[drafters.kind_of(raw)], drafters.drafter_config(raw, num_target_layers, target)
    with files.reading(directory):
        reader = checkpoint.Reader(directory, kind.canonical_name)
        config = config.with_tensors({name: reader.shape(name) for name in reader.names()})
        layout = sharding.check_layout(config, mesh)
        how = {"dequantise": dtype not in (None, "auto"), "quantise": quantised}
        params = read_params(reader, kind, config, layout, mesh, array_type, **how)
        if config.own_vocabulary and config.draft_vocab_size == config.vocab_size and not params["d2t"].any():
            del params["d2t"]  # all tokens, in the target's order
            config = replace(config, own_vocabulary=False)
        return kind.drafter(params, config, layout=layout, mesh=mesh)


def drafter_named(name: str, **how: Any) -> DraftModel:
    """The drafter that a command line names: a checkpoint, for which `how` has the arguments of `load_drafter`, n-grams
    ("ngram"), both ("ngram+CHECKPOINT"), or an object of a module ("module:Name").

    Raises:
        ValueError: as `load_drafter`; for n-grams alone a field to replace that is not `block_size`, or quantization.
    """
    if names_object(name):
        return function.imported(name)
    ngrams, source = ngram.named(name)
    if source is None:
        if "drafter" in parse_quantize(how.get("quantize")):
            raise ValueError("n-grams have no weights to quantize; leave drafter=... out of --quantize")
        given = dict(how.get("overrides") or {})
        size = given.pop("block_size", ngram.NgramConfig().block_size)
        if given or not isinstance(size, int) or size < 1:
            raise ValueError(f"n-grams have one field, block_size, at least 1; got {how['overrides']}")
        return ngram.Ngram(ngram.NgramConfig(size))
    drafter = load_drafter(source, **how)
    return ngram.Mixture(drafter) if ngrams else drafter


def checkpoint_of(name: str) -> str | None:
    """The checkpoint that `drafter_named` reads; None for n-grams alone and objects of a module."""
    return None if names_object(name) else ngram.named(name)[1]


def read_params(
    reader: checkpoint.Reader,
    kind: AnyKind,
    config: DrafterConfig,
    layout: Layout,
    mesh: AnyMesh | None,
    dtype: DTypeLike,
    *,
    dequantise: bool = False,
    quantise: Callable[[str], str | None] = lambda path: None,
) -> checkpoint.Params:
    """The parameters of a drafter from its tensors, by the names of its kind; see `checkpoint.load`."""
    unread = lambda name: name.endswith(UNREAD) or any(fnmatch(name, pattern) for pattern in unread_scales(config))
    how = {"dequantise": dequantise, "quantise": quantise, "place": sharding.placement(mesh)}
    return checkpoint.load(reader, kind.tensors(config, layout), dtype, ignored=unread, **how)


def read_drafter_config(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Raw:
    """The object in a drafter's `config.json`, with what is known of published ones by their hub ids.

    Args:
        source: a directory or a hub id.
        overrides: fields to replace (see `overrides.overridden`).

    Raises:
        ValueError: there is no such file.
    """
    raw = checkpoint.read_config(checkpoint.resolve(source, "drafter"))
    return overridden(published.completed(raw, str(source).partition("@")[0]), overrides)
