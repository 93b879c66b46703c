"""From options to what they name: models, meshes and engines.

Like `cli`, nothing here imports jax before there is work for it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_jax.cli import EngineOptions, GenerationOptions, ModelOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dflash_jax.config import TargetConfig
    from dflash_jax.drafters.base import Drafter
    from dflash_jax.infer.engine import Engine
    from dflash_jax.infer.engine_config import EngineConfig
    from dflash_jax.infer.lengths import Lengths
    from dflash_jax.infer.params import SamplingParams
    from dflash_jax.infer.requests import Request
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
    from dflash_jax.drafters.loading import load_drafter
    from dflash_jax.target import load_target

    mesh, drafter = choose_mesh(models.mesh, source, draft_source if speculative else None), None
    if speculative and draft_source:  # the smaller one first: what is wrong with it is said at once
        depth = target_config(source).num_hidden_layers
        drafter = load_drafter(draft_source, dtype=models.dtype, mesh=mesh, num_target_layers=depth)
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
    check_length(config, max_length)
    return Described(str(directory), *_text(str(directory), config, generation, max_length))


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
        raise ValueError("--drafter needs its --target; with neither, the bundled pair is used")
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
    from dflash_jax.drafters import drafter_config
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
        configs.append(drafter_config(raw, configs[0].num_hidden_layers))
    return make_mesh(sharding.auto_mesh(configs, len(jax.devices()), jax.local_device_count()))


def target_config(source: str) -> "TargetConfig":
    """Of a target in a directory, a `.gguf` file or on the hub; nothing else of it is read."""
    from dflash_jax import checkpoint, models

    return models.target_config(checkpoint.read_json(checkpoint.resolve(source, "target") / "config.json"))


def check_length(config: "TargetConfig", max_length: int | None) -> None:
    """Raises ValueError for a `--max-length` that the target was not made for."""
    if max_length is not None and (most := config.most_positions) and max_length > most:
        raise ValueError(f"--max-length must be at most {most}, the positions of the target, got {max_length}")


def engine_config(
    target: "Target",
    requests: "Sequence[Request]",
    generation: GenerationOptions,
    options: EngineOptions,
    *,
    logprobs: int | None = None,
    growing: bool = False,
) -> "EngineConfig":
    """A configuration with room for the longest request.

    Args:
        logprobs: alternatives that requests still unknown may ask for.
        growing: whether such requests may begin as others did, like the turns of a conversation.
    """
    from dflash_jax.infer.engine_config import EngineConfig
    from dflash_jax.infer.lengths import two_lengths
    from dflash_jax.infer.prefixes import shared_chunks, shared_tokens
    from dflash_jax.mesh import rows_of

    _check_options(generation, options)
    check_length(target.config, options.max_length)
    parts, most = rows_of(target.mesh), target.config.max_position_embeddings
    known = range(target.config.vocab_size)
    fit = [r for r in requests if r.prompt_token_ids and all(token in known for token in r.prompt_token_ids)]
    prompt = max((len(r.prompt_token_ids) for r in fit), default=1)
    max_length, kept = options.max_length, options.prefix_chunks
    if max_length is None:
        needed = max((len(r.prompt_token_ids) + max(r.params.max_new_tokens, 1) for r in fit), default=1)
        max_length = min(-(-needed // 256) * 256, most or needed)
    slots = -(-generation.batch_size // parts) * parts
    chunk, prompts = 256, [r.prompt_token_ids for r in fit]
    if requests and not options.deterministic:
        chunk = min(chunk, max(32, 1 << (prompt - 1).bit_length()))  # no prompt needs more
        # Short pieces in common are found in short chunks only; they must be worth reading the others piece by piece.
        if chunk <= 128 and 2 * shared_tokens(prompts, 32) > sum(map(len, prompts)):
            chunk = 32
    lengths = None
    if options.short_length is not None:
        lengths = _given_lengths(options, options.short_length, slots, max_length, chunk, parts)
    elif requests and not growing and not options.deterministic:
        sizes = [(len(r.prompt_token_ids), max(r.params.max_new_tokens, 1)) for r in fit]
        lengths = two_lengths(sizes, slots, max_length, least=chunk, parts=parts)
    if kept is None:  # what is of use, and no more memory than the slots take
        room = slots * max_length
        if lengths is not None:
            room -= (slots - lengths.long_slots) * (max_length - lengths.short_length)
        kept = room // chunk
        kept = kept if growing else min(kept, shared_chunks(prompts, chunk))
    return EngineConfig(
        slots=slots,
        max_length=max_length,
        block_size=generation.block_size,
        proposals=generation.proposals,
        seed=options.seed,
        prefill_chunk=chunk,
        steps_per_visit=options.stream_interval,
        prefix_chunks=kept,
        logprobs=max((n for r in requests if (n := r.params.logprobs) is not None), default=logprobs),
        short_length=lengths and lengths.short_length,
        long_slots=lengths.long_slots if lengths else 1,
        deterministic=options.deterministic,
    )


def _check_options(generation: GenerationOptions, options: EngineOptions) -> None:
    """Raises ValueError for an option that is out of range, or excludes another."""
    for flag, value, least in (
        ("--batch-size", generation.batch_size, 1),
        ("--max-length", options.max_length, 1),
        ("--short-length", options.short_length, 1),
        ("--long-slots", options.long_slots, 1),
        ("--prefix-chunks", options.prefix_chunks, 0),
        ("--stream-interval", options.stream_interval, 1),
    ):
        if value is not None and not least <= value < 2**31:
            raise ValueError(f"{flag} must be at least {least} and below 2**31, got {value}")
    if options.long_slots is not None and options.short_length is None:
        raise ValueError("--long-slots needs --short-length")
    if options.short_length is not None and options.deterministic:
        raise ValueError("--short-length and --deterministic exclude each other: where a row stands decides bits")


def _given_lengths(
    options: EngineOptions, short: int, slots: int, max_length: int, chunk: int, parts: int
) -> "Lengths":
    """The lengths that `--short-length` and `--long-slots` name.

    Raises:
        ValueError: rows cannot have them.
    """
    from dflash_jax.infer.lengths import Lengths

    long = -(-slots // 8) if options.long_slots is None else options.long_slots
    long = -(-long // parts) * parts
    if not chunk <= short < max_length:
        raise ValueError(
            f"--short-length must be at least {chunk}, a piece of a prompt, and below --max-length, {max_length}; "
            f"got {short}"
        )
    if long >= slots:
        raise ValueError(f"--short-length needs a --batch-size above the {long} long rows, got {slots}")
    return Lengths(short, long)


def make_engine(target: "Target", drafter: "Drafter | None", config: "EngineConfig") -> "Engine":
    """The engine; says what to do where there is no memory for it."""
    from dflash_jax.infer.engine import Engine

    try:
        return Engine(target, drafter, config)
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"no memory for {config.slots} rows of {config.max_length} tokens; lower --max-length or --batch-size "
            f"({str(error).splitlines()[0]:.120})"
        ) from error


def enable_compilation_cache() -> None:
    """Keeps compiled programs between runs, unless the user has chosen a place or none."""
    import jax

    from dflash_jax.checkpoint import cache_directory

    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
