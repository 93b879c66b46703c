"""Answers on the terminal: to one prompt, or turn by turn in a conversation. Models are loaded and compiled once."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dflash_jax.cli import ENGINE, GENERATION, MODEL, EngineOptions, GenerationOptions, ModelOptions, optional
from dflash_jax.engines import LARGEST_CHUNK, Needs, engine_for, needs_of, row_length
from dflash_jax.infer.progress import log, warm_up
from dflash_jax.loading import Loaded, load, pair_sources

if TYPE_CHECKING:
    from dflash_jax.infer.engine.engine import Engine
    from dflash_jax.infer.engine.requests import Completion

PATIENCE = 4.0  # seconds of compiling for one prompt before it is announced
STREAM_INTERVAL = 4  # decoding steps of one device call, so that an answer grows smoothly
LENGTH = 4096  # tokens of a conversation, if --max-length does not say
HELP = "/clear begins anew, /system TEXT sets a system prompt, /exit (or Ctrl-D) ends; Ctrl-C stops an answer"


@dataclass(frozen=True)
class ChatOptions:
    """Options of `dflash-jax chat`.

    Attributes:
        system: system prompt
        no_speculation: autoregressive decoding, without a drafter (the baseline)
        config: YAML file of options by name, such as `max-length: 8192`; the command line takes precedence
    """

    system: Annotated[str | None, optional(str, "TEXT")] = None
    no_speculation: bool = False
    models: Annotated[ModelOptions, MODEL] = field(default_factory=ModelOptions)
    generation: Annotated[GenerationOptions, GENERATION] = field(
        default_factory=lambda: GenerationOptions(max_new_tokens=1024)
    )
    engine: Annotated[EngineOptions, ENGINE] = field(default_factory=EngineOptions)
    config: Annotated[str | None, optional(str, "FILE.yaml")] = None


def for_one(generation: GenerationOptions) -> GenerationOptions:
    """With the defaults of a single request: the draft length that pays; chains only, which compile sooner."""
    if generation.block_size is None and generation.tree is None:
        return replace(generation, block_size="auto", tree=0)
    return generation


def smooth(engine: EngineOptions) -> EngineOptions:
    """With few decoding steps in a device call, if nothing else was asked for."""
    return engine if engine.stream_interval is not None else replace(engine, stream_interval=STREAM_INTERVAL)


def loaded(models: ModelOptions, generation: GenerationOptions, *, speculative: bool, length: int | None) -> Loaded:
    """Loads the models, and says so."""
    log.info("loading %s ...", Path(pair_sources(models)[0]).name)
    return load(models, generation, speculative=speculative, max_length=length)


def answer_once(
    prompt: str, models: ModelOptions, generation: GenerationOptions, options: EngineOptions, *, speculative: bool
) -> int:
    """Streams the answer to one prompt and returns the exit status."""
    generation, options = for_one(generation), smooth(options)
    found = loaded(models, generation, speculative=speculative, length=options.max_length)
    from dflash_jax.infer.engine.requests import Request

    text = found.text
    tokens = text.encode_chat([_said("user", prompt)]) if text.has_chat_template else text.encode(prompt)
    request = Request(tokens, found.defaults, id="0")
    engine = engine_for(found, needs_of(found.target.config, [request], options), generation, options)
    engine.check(request)
    warm_up(engine, first=True, patience=PATIENCE)  # the others take longer to compile than they save in one answer
    completion = _stream(engine, found, tokens, "0")
    if completion is not None:
        print(_figures(engine, completion), file=sys.stderr)
    return 0


def chat(options: ChatOptions) -> int:
    """Reads a turn, streams its answer, and so on, until the input ends; returns the exit status."""
    generation, how = for_one(options.generation), smooth(options.engine)
    found = loaded(options.models, generation, speculative=not options.no_speculation, length=how.max_length or LENGTH)
    if not found.text.has_chat_template:
        raise ValueError("the target's tokenizer has no chat template; use generate, which continues a plain text")
    how = replace(how, max_length=row_length(found.target.config, how.max_length, LENGTH))
    engine = engine_for(found, Needs(None, LARGEST_CHUNK, None, None), replace(generation, batch_size=1), how)
    warm_up(engine, patience=PATIENCE)
    print(HELP, file=sys.stderr)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # keys and history of `input`
    system, messages, turn = options.system, list[dict[str, str]](), 0
    while True:
        try:
            said = _asked()
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        command, _, rest = said.partition(" ")
        if command == "/exit":
            return 0
        if command in ("/clear", "/system"):
            system = (rest.strip() or None) if command == "/system" else system
            messages.clear()
            print(f"[a new conversation, {'with' if system else 'without'} a system prompt]", file=sys.stderr)
        elif said.startswith("/"):
            print(HELP, file=sys.stderr)
        elif said:
            turn += 1
            told = [_said("system", system)] if system else []
            answer = _turn(engine, found, [*told, *messages, _said("user", said)], str(turn))
            if answer is not None:
                messages += [_said("user", said), _said("assistant", answer)]


def _asked() -> str:
    """The next turn. Where the output is read by a program, it has the answers alone."""
    if sys.stdout.isatty():
        return input("> ").strip()
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return input().strip()


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _turn(engine: "Engine", found: Loaded, messages: Sequence[dict[str, str]], name: str) -> str | None:
    """Streams the answer to a conversation; returns its text, or None if there is none to keep."""
    from dflash_jax.infer.engine.requests import RequestError

    try:
        tokens = found.text.encode_chat(messages)
        completion = _stream(engine, found, tokens, name)
    except RequestError as error:
        print(f"error: {error}; /clear begins anew", file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print("\n[stopped]", file=sys.stderr)
        return None
    if completion is None:
        return None
    print(_figures(engine, completion), file=sys.stderr)
    if completion.finish_reason == "length":
        print("[the answer reached --max-new-tokens or the length of the context]", file=sys.stderr)
    return found.text.answer(completion.token_ids)


def _stream(engine: "Engine", found: Loaded, tokens: list[int], name: str) -> "Completion | None":
    """Prints an answer as it grows."""
    from dflash_jax.infer.engine.requests import Request
    from dflash_jax.infer.text import GrowingText

    shown, seen, completion = GrowingText(found.text), 0, None
    with contextlib.closing(engine.stream([Request(tokens, found.defaults, id=name)])) as completions:
        for _, completion in completions:
            print(shown.add(completion.token_ids[seen:]), end="", flush=True)
            seen = len(completion.token_ids)
    print(shown.end(completion.token_ids) if completion else "", flush=True)
    return completion


def _figures(engine: "Engine", completion: "Completion") -> str:
    """Steps, tau and speed of an answer; if speculation gained anything, how fast it is without, where measured."""
    count, steps = len(completion.token_ids), len(completion.acceptance_lengths)
    seconds = completion.finished - completion.first_token
    parts = [f"{count} tokens"]
    if engine.drafter and completion.tau is not None:
        parts += [f"{steps} steps", f"tau {completion.tau:.2f}"]
    if seconds > 0 and count > 1:
        parts.append(f"{(count - 1) / seconds:.1f} tokens/s")
    parts.append(f"first token after {completion.first_token - completion.submitted:.2f} s")
    plain = engine.drafts.plain_seconds(1) if completion.tau is not None and completion.tau > 1 else None
    more = f"; without speculation about {1 / plain:.1f} tokens/s, measured at the start" if plain else ""
    return f"[{', '.join(parts)}{more}]"
