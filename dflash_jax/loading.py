"""From options to what they name: models and meshes.

Like `cli`, nothing here imports jax before there is work for it.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_jax.cli import GenerationOptions, ModelOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dflash_jax.config import TargetConfig
    from dflash_jax.drafters.base import Drafter
    from dflash_jax.infer.params import SamplingParams
    from dflash_jax.infer.text import Text
    from dflash_jax.target import Target


class Loaded(NamedTuple):
    """What a command line names.

    Attributes:
        drafter: None where nothing is to be speculated.
        defaults: settings of a request that names none.
    """

    target: "Target"
    drafter: "Drafter | None"
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
    if speculative and not draft_source:
        raise ValueError("--drafter is needed to speculate; without one, say --no-speculation")
    generation.sampling().check()
    use_kernels(models.kernels)
    enable_compilation_cache()
    from dflash_jax import checkpoint
    from dflash_jax.drafters.loading import load_drafter
    from dflash_jax.target import load_target

    mesh, drafter = choose_mesh(models.mesh, source, draft_source if speculative else None), None
    if speculative and draft_source:  # the smaller one first: what is wrong with it is said at once
        depth = target_config(source).num_hidden_layers
        where = {"mesh": mesh, "num_target_layers": depth, "target": checkpoint.resolve(source, "target")}
        drafter = load_drafter(draft_source, dtype=models.dtype, **where)
    target = load_target(source, dtype=models.dtype, mesh=mesh)
    if drafter:
        drafter.config.check_pair(target.config)
    return Loaded(target, drafter, *_text(target.directory, target.config, generation, max_length))


class Described(NamedTuple):
    """What a process needs to read requests that others answer.

    Attributes:
        directory: of the target.
        defaults: settings of a request that names none.
    """

    directory: str
    config: "TargetConfig"
    text: "Text"
    defaults: "SamplingParams"


def describe(models: ModelOptions, generation: GenerationOptions, *, max_length: int | None = None) -> Described:
    """What `load` says of a target, without its weights.

    Args:
        max_length: tokens of a row that were asked for.
    """
    from dflash_jax import checkpoint
    from dflash_jax.models import target_config

    directory = checkpoint.resolve(pair_sources(models)[0], "target")
    config = target_config(checkpoint.read_json(directory / "config.json"))
    return Described(str(directory), config, *_text(str(directory), config, generation, max_length))


def _text(
    directory: str, config: "TargetConfig", generation: GenerationOptions, max_length: int | None
) -> "tuple[Text, SamplingParams]":
    """A target's tokenizer, and the settings of a request that names none."""
    from dflash_jax.infer.text import Text

    longest = min(filter(None, (max_length, config.max_position_embeddings)), default=None)
    text = Text(directory, generation.chat_template_kwargs, longest)
    stops = config.eos_token_ids
    if not stops and text.end_token is not None:
        stops = (text.end_token,)
    return text, generation.sampling(tuple(stops))


def pair_sources(models: ModelOptions) -> tuple[str, str | None]:
    """Target and drafter that the options name: the bundled pair if they name none.

    Raises:
        ValueError: a drafter is named without its target.
    """
    if models.target:
        return models.target, models.drafter
    if models.drafter:
        raise ValueError("--drafter needs its --target; name both, or neither")
    from dflash_jax.bundled import bundled_pair

    target, drafter = bundled_pair()
    return str(target), str(drafter)


def use_kernels(name: str | None) -> None:
    """Sets which implementation of the kernels runs, if that is given; before anything is traced."""
    if name is not None:
        from dflash_jax.kernels.dispatch import set_policy

        set_policy(name)


def choose_mesh(text: str, target: str, drafter: str | None, *, training: bool = False) -> "Mesh | None":
    """The mesh that `--mesh` names, or None for a single device.

    Several CPU devices are the same cores; they are used only where the mesh is named.
    """
    import jax

    from dflash_jax import checkpoint, sharding
    from dflash_jax.drafters import drafter_config, published
    from dflash_jax.mesh import make_mesh, parse_mesh

    if text != "auto":
        sizes = parse_mesh(text)
        return None if len(jax.devices()) == 1 else make_mesh(sizes)
    if len(jax.devices()) == 1 or jax.default_backend() == "cpu":
        return None
    if training:
        return make_mesh(parse_mesh("fsdp=-1"))
    configs: list[Any] = [target_config(target)]
    if drafter:
        raw = checkpoint.read_json(checkpoint.resolve(drafter, "drafter") / "config.json")
        known = published.completed(raw, drafter), configs[0].num_hidden_layers, checkpoint.resolve(target, "target")
        configs.append(drafter_config(*known))
    return make_mesh(sharding.auto_mesh(configs, len(jax.devices()), jax.local_device_count()))


def target_config(source: str) -> "TargetConfig":
    """Of a target in a directory, a `.gguf` file or on the hub; nothing else of it is read."""
    from dflash_jax import checkpoint, models

    return models.target_config(checkpoint.read_json(checkpoint.resolve(source, "target") / "config.json"))


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless the user has chosen a place or none."""
    import jax

    from dflash_jax.checkpoint import cache_directory

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
