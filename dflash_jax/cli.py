"""What the command lines share: options, and loading what they name.

Options are frozen dataclasses, which `parse` turns into a command line; the text below a field is its help. Nothing
here imports jax before there is work for it, so that `--help` answers at once.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, overload

import tyro
from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from dflash_jax.config import TargetConfig
    from dflash_jax.drafters.dflash import Drafter
    from dflash_jax.infer.engine import Engine, EngineConfig
    from dflash_jax.infer.params import SamplingParams
    from dflash_jax.infer.requests import Request
    from dflash_jax.infer.text import Text
    from dflash_jax.target import Target

T = TypeVar("T")


@overload
def parse(options: type[T], argv: Sequence[str] | None, *, prog: str, description: str) -> T: ...
@overload
def parse(options: object, argv: Sequence[str] | None, *, prog: str, description: str) -> Any: ...
def parse(options: Any, argv: Sequence[str] | None, *, prog: str, description: str) -> Any:
    """The options of a command line: an instance of `options`, a dataclass or a union of subcommands.

    Wrong usage ends the process with status 2 and says why on stderr; an unknown flag names the nearest.
    """
    config = (
        tyro.conf.OmitArgPrefixes,
        tyro.conf.OmitSubcommandPrefixes,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.HelptextFromCommentsOff,
    )
    try:
        return tyro.cli(options, prog=prog, description=description, args=argv, config=config)
    except BrokenPipeError:  # the reader of the help has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def optional(kind: type, metavar: str, default: str = "") -> Any:
    """Marks a field that is None unless it is given; `default` says what happens then."""
    hint = f"(default: {default})" if default else ""
    return arg(constructor=kind, metavar=metavar, help_behavior_hint=hint)


def parsed(read: Callable[[list[str]], Any], metavar: str, nargs: int | Literal["*"] = 1) -> PrimitiveConstructorSpec:
    """Marks a field whose value `read` makes of the words after its flag; it raises ValueError for wrong ones."""
    return PrimitiveConstructorSpec(nargs, metavar, read, lambda value: True, lambda value: [str(value)])


def _block_size(given: Sequence[str]) -> int | str:
    if given[0] == "auto":
        return "auto"
    try:
        return int(given[0])
    except ValueError as error:
        raise ValueError(f"must be a number or auto, got {given[0]!r}") from error


def _template_arguments(given: Sequence[str]) -> dict[str, Any]:
    from dflash_jax.infer.text import template_arguments

    try:
        value = json.loads(given[0])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be a JSON object, got {given[0]!r:.80} ({error!s:.100})") from error
    if value is None:
        raise ValueError("must be a JSON object, got null")
    return template_arguments(value)


BlockSize = Annotated[
    int | Literal["auto"] | None,
    parsed(_block_size, "N|auto"),
    arg(help_behavior_hint=""),
]
TemplateArguments = Annotated[
    Mapping[str, Any],
    parsed(_template_arguments, "JSON"),
    arg(help_behavior_hint="(default: the template's own)"),
]
Kernels = Annotated[Literal["auto", "xla", "pallas"] | None, arg(metavar="auto|xla|pallas", help_behavior_hint="")]


@dataclass(frozen=True)
class ModelOptions:
    """The models, and where they run.

    Attributes:
        target: target checkpoint: a directory, a GGUF file of the llama family, or a hub id
        drafter: its DFlash drafter
        mesh: devices, like data=2,model=4 (axes data, fsdp, model; -1 is the rest); auto: heads over the devices of a
            host as far as they divide, rows over the others
        dtype: float32, bfloat16, float16; auto: float32 on CPU, else bfloat16, or float16 on GPUs that lack it
        kernels: which implementation of the kernels runs; auto checks each Pallas kernel against XLA at its first use
            (also DFLASH_KERNELS)
    """

    target: Annotated[str | None, optional(str, "DIR|FILE.gguf|ID", "the bundled pair")] = None
    drafter: Annotated[str | None, optional(str, "DIR|ID")] = None
    mesh: Annotated[str, arg(metavar="AXES")] = "auto"
    dtype: str = "auto"
    kernels: Kernels = None


@dataclass(frozen=True)
class NamedModelOptions(ModelOptions):
    """The models, and where they run.

    Attributes:
        target: target checkpoint: a directory, a GGUF file of the llama family, or a hub id
    """

    target: Annotated[str, arg(metavar="DIR|ID")] = field()  # without the default that it would inherit


@dataclass(frozen=True)
class GenerationOptions:
    """How answers are generated.

    Attributes:
        max_new_tokens: tokens per answer
        temperature: 0 is greedy
        top_p: in (0, 1]; 1 keeps every token
        top_k: 0 keeps every token
        min_p: in 0..1; 0 keeps every token
        block_size: draft slots per step, up to the checkpoint's (default); auto measures what pays, no speculation
            included (default of serve --input and --http). In bfloat16 block sizes round differently and auto follows
            the clock, so answers may differ in their last bits from run to run; --deterministic of serve fixes
            everything
        batch_size: rows decoded together
        proposals: how the drafter picks tokens at temperature > 0; never changes the answers
        chat_template_kwargs: arguments of the chat template, a JSON object like {"enable_thinking": false}
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    block_size: BlockSize = None
    batch_size: int = 1
    proposals: Literal["coupled", "argmax", "independent"] = "coupled"
    chat_template_kwargs: TemplateArguments = field(default_factory=dict)

    def sampling(self, stop_token_ids: tuple[int, ...] = ()) -> "SamplingParams":
        """The settings of a request that names none."""
        from dflash_jax.infer.params import SamplingParams

        return SamplingParams(
            self.max_new_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.min_p,
            stop_token_ids=stop_token_ids,
        )


@dataclass(frozen=True)
class EngineOptions:
    """The engine that generates."""

    seed: int = 0
    """noise of requests without a seed of their own"""
    max_length: Annotated[int | None, optional(int, "N", "what the longest request needs")] = None
    """prompt and answer tokens per row"""
    short_length: Annotated[
        int | None, optional(int, "N", "what a file of requests needs; a server has one length")
    ] = None
    """tokens of all but --long-slots of the rows: so one long request does not make every row long. A request moves to
    a long row when it needs more"""
    long_slots: Annotated[int | None, optional(int, "N", "an eighth")] = None
    """rows of --max-length tokens where there are shorter ones"""
    prefix_chunks: Annotated[
        int | None, optional(int, "N", "what is of use, in no more memory than the slots take")
    ] = None
    """chunks of prompts (32 to 256 tokens, by the longest prompt) to keep for those that begin alike; 0 keeps none"""
    stream_interval: Annotated[int, arg(metavar="N")] = 16
    """decoding steps between two looks at the tokens: fewer show them sooner, more cost less"""
    deterministic: bool = False
    """the bits of an answer are the same in every run: nothing is chosen by the clock or by the other prompts, and
    --block-size auto is the checkpoint's own"""

    def fixed(self, generation: GenerationOptions, drafter: str | None) -> dict[str, Any] | None:
        """What the last bits of an answer follow from besides its request, if they are to be the same in every run.

        Args:
            drafter: its directory; None without speculation. Which tokens are accepted decides which are computed
                together.
        """
        if not self.deterministic:
            return None
        from dflash_jax.checkpoint import resolve
        from dflash_jax.checkpoint.fingerprint import fingerprint

        which = None if drafter is None else fingerprint(str(resolve(drafter, "drafter")))
        sizes = {"block_size": generation.block_size, "batch_size": generation.batch_size}
        return sizes | {"proposals": generation.proposals, "drafter": which}


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
    from dflash_jax.drafters.dflash import load_drafter
    from dflash_jax.target import load_target

    mesh = choose_mesh(models.mesh, source, draft_source if speculative else None)
    drafter = load_drafter(draft_source, dtype=models.dtype, mesh=mesh) if speculative and draft_source else None
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
    """What `load` says of a target, without its weights."""
    from dflash_jax import checkpoint
    from dflash_jax.models import target_config

    directory = checkpoint.resolve(pair_sources(models)[0], "target")
    config = target_config(checkpoint.read_json(directory / "config.json"))
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

    from dflash_jax import checkpoint, models, sharding
    from dflash_jax.drafters.config import drafter_config
    from dflash_jax.mesh import make_mesh, parse_mesh

    if text != "auto":
        sizes = parse_mesh(text)
        return None if len(jax.devices()) == 1 else make_mesh(sizes)
    if len(jax.devices()) == 1 or jax.default_backend() == "cpu":
        return None
    if training:
        return make_mesh(parse_mesh("fsdp=-1"))
    raw = lambda source, what: checkpoint.read_json(checkpoint.resolve(source, what) / "config.json")
    configs: list[Any] = [models.target_config(raw(target, "target"))]
    if drafter:
        configs.append(drafter_config(raw(drafter, "drafter")))
    return make_mesh(sharding.auto_mesh(configs, len(jax.devices()), jax.local_device_count()))


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
    from dflash_jax.infer.engine import EngineConfig
    from dflash_jax.infer.lengths import Lengths, two_lengths
    from dflash_jax.infer.prefixes import shared_chunks, shared_tokens
    from dflash_jax.mesh import rows_of

    if options.stream_interval < 1:
        raise ValueError(f"--stream-interval must be at least 1, got {options.stream_interval}")
    if generation.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {generation.batch_size}")
    parts, most = rows_of(target.mesh), target.config.max_position_embeddings
    known = range(target.config.vocab_size)
    fit = [r for r in requests if r.prompt_token_ids and all(token in known for token in r.prompt_token_ids)]
    prompt = max((len(r.prompt_token_ids) for r in fit), default=1)
    max_length, kept = options.max_length, options.prefix_chunks
    if max_length is None:
        needed = max((len(r.prompt_token_ids) + max(r.params.max_new_tokens, 1) for r in fit), default=1)
        max_length = min(-(-needed // 256) * 256, most or needed)
    slots = -(-generation.batch_size // parts) * parts
    if options.long_slots is not None and options.short_length is None:
        raise ValueError("--long-slots needs --short-length")
    chunk, prompts = 256, [r.prompt_token_ids for r in fit]
    if requests and not options.deterministic:
        chunk = min(chunk, max(32, 1 << (prompt - 1).bit_length()))  # no prompt needs more
        # Short pieces in common are found in short chunks only; they must be worth reading the others piece by piece.
        if chunk <= 128 and 2 * shared_tokens(prompts, 32) > sum(map(len, prompts)):
            chunk = 32
    lengths = None
    if options.short_length is not None:
        long = -(-slots // 8) if options.long_slots is None else options.long_slots
        lengths = Lengths(options.short_length, -(-long // parts) * parts)
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
