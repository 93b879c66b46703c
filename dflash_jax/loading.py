"""From options to what they name: models and meshes.

Like `cli`, nothing here imports jax before there is work for it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_jax.cli import NGRAMS, GenerationOptions, ModelOptions
from dflash_jax.files import reading
from dflash_jax.parsing import names_object

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dflash_jax.config import DecoderConfig, TargetConfig
    from dflash_jax.decoding.state import DraftModel
    from dflash_jax.infer.engine.params import SamplingParams
    from dflash_jax.infer.text import Text
    from dflash_jax.target import Target


class Loaded(NamedTuple):
    """What a command line names.

    Attributes:
        drafter: None where nothing is to be speculated.
        defaults: settings of a request that names none.
    """

    target: "Target"
    drafter: "DraftModel | None"
    text: "Text"
    defaults: "SamplingParams"


def load(
    models: ModelOptions, generation: GenerationOptions, *, speculative: bool = True, max_length: int | None = None
) -> Loaded:
    """Loads what the options name; without a target, the bundled pair.

    Args:
        max_length: tokens that a row can have, if that is known; otherwise the target decides.
    """
    if generation.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {generation.max_new_tokens}")
    source, draft_source = pair_sources(models)
    generation.sampling().check()
    use_kernels(models.kernels)
    enable_compilation_cache()
    import jax

    from dflash_jax import checkpoint
    from dflash_jax.drafters.loading import drafter_named
    from dflash_jax.target import load_target

    config = target_config(source, models.target_config)
    if speculative and not draft_source:
        raise ValueError("no drafter given; pass --drafter, --drafter ngram (needs no model) or --no-speculation")
    mesh = choose_mesh(models.mesh, models_on_mesh(models, config, speculative=speculative))
    drafter = None
    if speculative and draft_source:  # the smaller one first: what is wrong with it is said at once
        drafter = drafter_named(
            draft_source,
            dtype=models.dtype,
            mesh=mesh,
            num_target_layers=config.num_hidden_layers,
            target=checkpoint.resolve(source, "target"),
            overrides=models.drafter_config,
            quantize=models.quantize,
        )
    dtype = models.dtype
    if dtype == "auto" and config.storage.method == "gguf" and jax.default_backend() == "cpu":
        dtype = "float32"  # a CPU would widen packed weights at every step
    how = {"overrides": models.target_config, "quantize": models.quantize}
    target = load_target(source, dtype=dtype, mesh=mesh, **how)
    _say_what_is_quantised(models, target, drafter)
    if drafter:
        with reading(Path(draft_source or "")):
            drafter.config.check_pair(target.config)
    return Loaded(target, drafter, *_text(target.directory, target.config, generation, max_length))


def _say_what_is_quantised(models: ModelOptions, target: "Target", drafter: "DraftModel | None") -> None:
    """The formats of weights, and whether it costs time that they were quantized as they were loaded."""
    from dflash_jax.quantised import forms
    from dflash_jax.quantize_speed import slower_than_plain

    found = {"target": forms(target.params), "drafter": forms(drafter) if drafter else []}
    if said := [f"{name} {', '.join(formats)}" for name, formats in found.items() if formats]:
        log.info("quantized weights: %s", "; ".join(said))
    if models.quantize and (note := slower_than_plain(target, models.quantize)):
        log.warning(note)


class Described(NamedTuple):
    """What a process needs to read requests that others answer: of a target, with the default settings of a request."""

    directory: str
    config: "TargetConfig"
    text: "Text"
    defaults: "SamplingParams"


def describe(models: ModelOptions, generation: GenerationOptions, *, max_length: int | None = None) -> Described:
    """What `load` says of a target, without its weights; arguments as there."""
    from dflash_jax import checkpoint

    directory = checkpoint.resolve(pair_sources(models)[0], "target")
    config = target_config(directory, models.target_config)
    return Described(str(directory), config, *_text(str(directory), config, generation, max_length))


def _text(
    directory: str, config: "TargetConfig", generation: GenerationOptions, max_length: int | None
) -> "tuple[Text, SamplingParams]":
    """A target's tokenizer, and the settings of a request that names none."""
    from dflash_jax.infer.text import Text

    longest = min(filter(None, (max_length, config.most_positions)), default=None)
    template = None
    if generation.chat_template is not None:
        with reading(Path(generation.chat_template)) as path:
            template = path.read_text(encoding="utf-8")
    text = Text(directory, generation.chat_template_kwargs, longest, generation.tool_format, template)
    ends = config.eos_token_ids
    if not ends and text.end_token is not None:
        ends = (text.end_token,)
    return text, generation.sampling(tuple(ends))


def pair_sources(models: ModelOptions) -> tuple[str, str | None]:
    """Target and drafter that the options name: the bundled pair if they name none, and the bundled target for n-grams
    alone.

    Raises:
        ValueError: a drafter is named without its target, or a revision of what is not on the hub.
    """
    if models.target:
        target = _at(models.target, models.revision, "--revision")
        return target, models.drafter and _at(models.drafter, models.drafter_revision, "--drafter-revision")
    for given, name in ((models.revision, "--revision"), (models.drafter_revision, "--drafter-revision")):
        if given is not None:
            raise ValueError(f"{name} needs a model on the hub; name it with --target and --drafter")
    if models.drafter not in (None, NGRAMS) and not names_object(models.drafter):
        raise ValueError("--drafter needs its --target; name both, or neither")
    from dflash_jax.bundled import bundled_pair

    target, drafter = bundled_pair()
    return str(target), models.drafter or str(drafter)


def _at(source: str, revision: str | None, name: str) -> str:
    """A hub id at a revision."""
    if revision is None:
        return source
    if source == NGRAMS or "@" in source or Path(source.removeprefix(f"{NGRAMS}+")).expanduser().exists():
        raise ValueError(f"{name} is for models on the hub, got {source!r:.80}; leave it out")
    return f"{source}@{revision}"


def use_kernels(name: str | None) -> None:
    """Sets which implementation of the kernels runs, if that is given; before anything is traced."""
    if name is not None:
        from dflash_jax.kernels.dispatch import set_policy

        set_policy(name)


def choose_mesh(text: str, configs: "Iterable[DecoderConfig]" = (), *, training: bool = False) -> "Mesh | None":
    """The mesh that `--mesh` names, or None for a single device.

    Several CPU devices are the same cores; they are used only where the mesh is named.

    Args:
        configs: of the models that it is for, which "auto" looks at.
    """
    import jax

    from dflash_jax import sharding
    from dflash_jax.mesh import make_mesh, parse_mesh

    if text != "auto":
        sizes = parse_mesh(text)
        return None if len(jax.devices()) == 1 else make_mesh(sizes)
    if len(jax.devices()) == 1 or jax.default_backend() == "cpu":
        return None
    if training:
        return make_mesh(parse_mesh("fsdp=-1"))
    return make_mesh(sharding.auto_mesh(list(configs), len(jax.devices()), jax.local_device_count()))


def models_on_mesh(
    models: ModelOptions, target: "TargetConfig", *, speculative: bool = True
) -> "Iterator[DecoderConfig]":
    """What `choose_mesh` looks at: the target, and the drafter if there is to be one. The latter's file is read when it
    is asked for."""
    from dflash_jax.checkpoint import resolve
    from dflash_jax.drafters import drafter_config
    from dflash_jax.drafters.loading import checkpoint_of, read_drafter_config

    yield target
    place, source = pair_sources(models)
    if speculative and source and (source := checkpoint_of(source)):
        with reading(resolve(source, "drafter") / "config.json"):
            raw = read_drafter_config(source, models.drafter_config)
            config = drafter_config(raw, target.num_hidden_layers, resolve(place, "target"))
        yield config


def target_config(source: "str | Path", overrides: Mapping[str, Any] | None = None) -> "TargetConfig":
    """Of a target in a directory, a `.gguf` file or on the hub, whose weights are not read; `overrides` replace fields
    of its `config.json`."""
    from dflash_jax.checkpoint import resolve
    from dflash_jax.target import read_target_config

    return read_target_config(resolve(source, "target"), overrides)


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless the user has chosen a place or none."""
    import jax

    from dflash_jax.files import cache_directory

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
