"""From options and requests to the engine that answers them.

Like `cli`, nothing here imports jax before there is work for it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dflash_jax.cli import EngineOptions, GenerationOptions, ModelOptions, check_least
from dflash_jax.loading import Loaded, load

if TYPE_CHECKING:
    from dflash_jax.config import TargetConfig
    from dflash_jax.decoding.state import DraftModel
    from dflash_jax.infer.engine.engine import Engine
    from dflash_jax.infer.engine.engine_config import EngineConfig
    from dflash_jax.infer.engine.requests import Request
    from dflash_jax.infer.jobs.job_input import JobInput
    from dflash_jax.infer.jobs.lines import Line
    from dflash_jax.infer.text import Text
    from dflash_jax.target import Target

LARGEST_CHUNK = 256  # tokens of a prompt that are read at once
DETERMINISTIC_LENGTH = 2048  # tokens of a row of a deterministic job, if none is given


class Needs(NamedTuple):
    """What requests need of an engine.

    Attributes:
        sizes: tokens of the prompt, and to generate, of each request that can be served; None where requests are still
            unknown.
        chunk: prompts are read in pieces of so many tokens.
        shared: pieces with which more than one prompt begins; None where any may.
        logprobs: most alternatives that one asks for.
        constraints: whether one has a constraint, or may have.
    """

    sizes: list[tuple[int, int]] | None
    chunk: int
    shared: int | None
    logprobs: int | None
    constraints: bool = False


def needs_of(
    config: "TargetConfig",
    requests: "Sequence[Request]",
    options: EngineOptions,
    *,
    logprobs: int | None = None,
    growing: bool = False,
) -> Needs:
    """What these requests need.

    Args:
        logprobs: alternatives that requests still unknown may ask for.
        growing: whether such requests may begin as others did, like the turns of a conversation.
    """
    from dflash_jax.infer.engine.prefixes import shared_chunks, shared_tokens

    known = range(config.vocab_size)
    fit = [r for r in requests if r.prompt_token_ids and all(token in known for token in r.prompt_token_ids)]
    prompts, kept = [r.prompt_token_ids for r in fit], options.prefix_chunks
    chunk = LARGEST_CHUNK
    if requests and not options.deterministic:
        longest = max(map(len, prompts), default=1)
        chunk = min(chunk, max(32, 1 << (longest - 1).bit_length()))  # no prompt needs more
        # Short pieces in common are found in short chunks only; they must be worth reading the others piece by piece.
        if chunk <= 128 and 2 * shared_tokens(prompts, 32) > sum(map(len, prompts)):
            chunk = 32
    return Needs(
        [(len(r.prompt_token_ids), max(r.params.max_new_tokens, 1)) for r in fit] if requests else None,
        chunk,
        None if growing else shared_chunks(prompts, chunk) if kept is None else kept,
        max((n for r in requests if (n := r.params.logprobs) is not None), default=logprobs),
        not requests or any(r.params.constraint is not None for r in requests),
    )


def engine_config(
    target: "Target", needs: Needs, generation: GenerationOptions, options: EngineOptions, *, plain: bool = False
) -> "EngineConfig":
    """A configuration with room for the longest request.

    Raises:
        ValueError: an option is out of range.
    """
    from dflash_jax.infer.engine.engine_config import EngineConfig
    from dflash_jax.infer.engine.memory import tokens_worth_sharing
    from dflash_jax.mesh import rows_of

    check_options(generation, options)
    parts, sizes, kept, chunk = rows_of(target.mesh), needs.sizes or [], options.prefix_chunks, needs.chunk
    wanted = DETERMINISTIC_LENGTH  # nor may the length of the rows follow from other requests
    if not options.deterministic:
        needed = max((prompt + new for prompt, new in sizes), default=1)
        round_up = target.config.most_positions and not options.cache_tokens
        wanted = -(-needed // 256) * 256 if round_up else needed
    max_length = row_length(target.config, options.max_length, wanted)
    slots = -(-generation.rows // parts) * parts
    if options.cache_tokens is not None and options.cache_tokens < (least := parts * max_length):
        raise ValueError(
            f"--cache-tokens must be at least {least}, for the longest request; got {options.cache_tokens}"
        )
    tokens = options.cache_tokens
    if tokens is None and needs.sizes is not None and needs.shared is not None and not options.deterministic:
        sizes = [(prompt, min(new, max_length - prompt)) for prompt, new in sizes if prompt < max_length]
        tokens = tokens_worth_sharing(target, sizes, slots, max_length)
    if kept is None:  # what is of use, and no more memory than the rows take
        room = tokens or slots * max_length
        kept = room // chunk if needs.shared is None else min(room // chunk, needs.shared)
    return EngineConfig(
        slots=slots,
        max_length=max_length,
        block_size=generation.block_size,
        tree=generation.tree,
        verify_budget=options.verify_budget,
        cache_dtype=None if options.cache_dtype == "auto" else options.cache_dtype,
        draft_window=options.draft_window,
        proposals=generation.proposals,
        seed=options.seed,
        prefill_chunk=chunk,
        prefill_budget="auto" if options.prefill_budget is None else options.prefill_budget or None,
        steps_per_visit=options.stream_interval or EngineConfig.steps_per_visit,
        prefix_chunks=kept,
        logprobs=needs.logprobs,
        cache_tokens=tokens,
        plain=plain,
        deterministic=options.deterministic,
        gpu_graphs=options.gpu_graphs,
        constraints=needs.constraints,
    )


def row_length(config: "TargetConfig", given: int | None, wanted: int) -> int:
    """How many tokens a row may hold: as many as are given, which `check_length` checks, else as are wanted and the
    target has positions for."""
    check_length(config, given)
    return given if given is not None else min(wanted, config.most_positions or wanted)


def check_length(config: "TargetConfig", max_length: int | None) -> None:
    """Raises ValueError for a `--max-length` that the target was not made for."""
    if max_length is not None and (most := config.most_positions) and max_length > most:
        raise ValueError(f"--max-length must be at most {most}, the context length of the target, got {max_length}")


def check_options(generation: GenerationOptions, options: EngineOptions) -> None:
    """Raises ValueError for an option that is out of range, or excludes another."""
    check_least(generation, batch_size=1)
    check_least(
        options,
        max_length=1,
        cache_tokens=1,
        draft_window=1,
        verify_budget=2,
        prefill_budget=0,
        prefix_chunks=0,
        stream_interval=1,
    )


def make_engine(target: "Target", drafter: "DraftModel | None", config: "EngineConfig") -> "Engine":
    """The engine; says what to do where there is no memory for it."""
    from dflash_jax.infer.engine.engine import Engine

    try:
        return Engine(target, drafter, config)
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"not enough memory for {config.slots} sequences of {config.max_length} tokens; lower --max-length or "
            f"--batch-size ({str(error).splitlines()[0]:.120})"
        ) from error


def needs_of_input(config: "TargetConfig", lines: "JobInput", options: EngineOptions) -> Needs:
    """What the lines of a job need, by a sample of them and what is known of all."""
    found = needs_of_lines(config, lines.sample, options, growing=lines.growing)
    return found._replace(
        logprobs=max((n for n in (found.logprobs, lines.logprobs) if n is not None), default=None),
        constraints=found.constraints or lines.constrained,
    )


def needs_of_lines(
    config: "TargetConfig",
    lines: "Sequence[Line]",
    options: EngineOptions,
    *,
    growing: bool = False,
    whole: bool = False,
) -> Needs:
    """What the lines of a job need.

    Args:
        growing: as of `needs_of`.
        whole: whether rows are to hold whole conversations, as long as they may become; else their first turns.
    """
    # Two of several answers to a prompt show that it is read more than once.
    requests = [line.request for line in lines if line.request for _ in range(min(line.n, 2))]
    found = needs_of(config, requests, options, growing=growing or any(line.later for line in lines))
    if whole and found.sizes is not None:
        asked = ((len(line.request.prompt_token_ids), line) for line in lines if line.request and line.later)
        found.sizes.extend((prompt, line.most_tokens - prompt) for prompt, line in asked)
    return found


def load_engine(
    models: ModelOptions, generation: GenerationOptions, options: EngineOptions, needs: Needs, *, speculative: bool
) -> "tuple[Engine, Text]":
    """Models and engine for requests that need this, with the target's tokenizer, in a process that has neither."""
    loaded = load(models, generation, speculative=speculative, max_length=options.max_length)
    return engine_for(loaded, needs, generation, options), loaded.text


def engine_for(
    loaded: Loaded, needs: Needs, generation: GenerationOptions, options: EngineOptions, *, plain: bool = False
) -> "Engine":
    """An engine for requests that need this; arguments as in `engine_config`."""
    config = engine_config(loaded.target, needs, generation, options, plain=plain)
    return make_engine(loaded.target, loaded.drafter, config)
