"""Lines on their way through an engine: lines in, records out."""

import hashlib
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dflash_jax.checkpoint.fingerprint import fingerprint
from dflash_jax.config import TargetConfig
from dflash_jax.constraints.constraint import VERSION
from dflash_jax.files import Fields, Json
from dflash_jax.infer.answers import answer
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.jobs.job_input import JobInput
from dflash_jax.infer.jobs.lines import Line
from dflash_jax.infer.jobs.records import error_record
from dflash_jax.infer.jobs.sample import Sample
from dflash_jax.infer.plain import refusal
from dflash_jax.infer.text import Text


def job_settings(
    directory: str,
    dtype: str,
    text: Text,
    defaults: SamplingParams,
    lines: JobInput | Sequence[Line],
    seed: int,
    max_length: int | None,
    deterministic: Fields | None = None,
    overrides: Mapping[str, Fields] | None = None,
    cache_dtype: str = "auto",
) -> Json:
    """All that the answers of a job depend on.

    `target` and `input` are for people; their fingerprints are what must not change (None for a target that was made
    in memory).

    Args:
        deterministic: what the last bits depend on besides, of a job that fixes them.
        overrides: replaced fields of `config.json`, by the option that names them.
        cache_dtype: of the target's keys and values; "auto" is that of its weights.
    """
    more: Json = {}  # defaults are left out
    if cache_dtype != "auto":
        more["cache_dtype"] = cache_dtype
    if text.template_arguments:
        more["chat_template_kwargs"] = text.template_arguments
    if text.tool_format:
        more["tool_format"] = text.tool_format
    if deterministic is not None:
        more["deterministic"] = dict(deterministic)
    more |= {name: dict(fields) for name, fields in (overrides or {}).items() if fields}
    if isinstance(lines, JobInput):
        count, constrained, found = lines.count, lines.constrained, lines.fingerprint
    else:
        count, constrained = len(lines), any(line.request and line.request.params.constraint for line in lines)
        found = hashlib.sha256(b"".join(line.digest for line in lines)).hexdigest()
    if constrained:
        more["constraints"] = VERSION
    if defaults.min_tokens:
        more["min_tokens"] = defaults.min_tokens
    sampling = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
    return more | {
        "target": directory,
        "target_fingerprint": fingerprint(directory) if directory else None,
        "input": f"{count} lines",
        "input_fingerprint": found,
        **{name: getattr(defaults, name) for name in sampling},
        "seed": seed,
        "stop_token_ids": list(defaults.ends),
        "max_length": max_length,
        "dtype": dtype,
        "chat_template": text.chat_template,
    }


WINDOW = 64  # requests that wait in an engine, at least,
AHEAD = 4  # and for each of its slots
Event = tuple[Json | None, list[Completion]]  # output record or None while in progress, answers so far


def outgrows(request: Request | None, max_length: int, config: TargetConfig) -> bool:
    """Whether a request that could be served needs more tokens than rows of an engine have, and the target has
    positions for more."""
    if request is None:
        return False
    needed = len(request.prompt_token_ids) + max(request.params.max_new_tokens, 1)
    if max_length >= min(needed, config.most_positions or needed):
        return False
    return all(0 <= token < config.vocab_size for token in request.prompt_token_ids)


class Outgrown(Container[int]):
    """Indices of lines that are too long for an engine, a byte for each line before the last of them. The lines
    themselves are read again when there is an engine for them.

    Attributes:
        sample: of the lines, by which that engine is made.
    """

    def __init__(self) -> None:
        self.sample, self._flags, self._count = Sample[Line](), bytearray(), 0

    def add(self, line: Line) -> None:
        self._flags.extend(bytes(max(0, line.index + 1 - len(self._flags))))
        self._count += not self._flags[line.index]
        self._flags[line.index] = True
        self.sample.add(line.most_tokens, line)

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and index < len(self._flags) and bool(self._flags[index])

    def __len__(self) -> int:
        return self._count


class Answering:
    """Lines on their way through an engine.

    Args:
        record: what to write of a finished line, given its answers: one a turn of a conversation, one a sample.
        text: continues conversations; without it their first turn is the whole line.
        outgrown: takes a conversation of which a later turn needs longer rows than the engine has, and the target could
            have them; it is then dropped here. None answers it as far as there is room.
    """

    def __init__(
        self,
        engine: Engine,
        record: Callable[[Line, list[Completion]], Json],
        text: Text | None = None,
        outgrown: Callable[[Line], object] | None = None,
    ):
        self._engine, self._record, self._text, self._outgrown = engine, record, text, outgrown
        self._tickets: dict[int, tuple[Line, list[Completion]]] = {}  # and its answers

    def run(self, lines: Iterable[Line], admit: Callable[[], bool] = lambda: True) -> Generator[Event, None, None]:
        """Answers every line: yields (output record or None while in progress, its answers so far). Lines are taken as
        they are needed: few wait in the engine.

        Args:
            admit: asked before every piece of work; while it is false no request is begun, and it ends when those in
                progress are finished.
        """
        try:
            source, window = iter(lines), max(WINDOW, AHEAD * self._engine.slots)
            line: Line | None = None
            while True:
                going = admit()
                while going and self._engine.waiting < window and (line := next(source, None)) is not None:
                    yield from self.add(line)
                    going = admit()
                ended = going and line is None and self._engine.waiting < window
                if (ended and not self._tickets) or (not going and not self._engine.busy):
                    return
                yield from self.step(going)
        finally:
            self._engine.cancel(*self._tickets)

    def add(self, line: Line) -> Iterator[Event]:
        """Queues a line; yields the record of one that cannot be answered."""
        try:
            if line.error is not None:
                raise line.error
            assert line.request is not None
            answers: list[Completion] = []
            for sample in range(line.n):
                self._tickets[self._engine.submit(replace(line.request, sample=sample))] = line, answers
        except Exception as error:
            yield error_record(replace(line, error=refusal(error))), []

    def step(self, admit: bool) -> Iterator[Event]:
        """One piece of the engine's work; see `Engine.step`."""
        for ticket, completion in self._engine.step(admit=admit):
            line, answers = self._tickets[ticket]
            if not completion.finish_reason:
                yield None, [*answers, completion]
                continue
            del self._tickets[ticket]
            answers.append(completion)
            try:
                if len(answers) < line.n:
                    yield None, answers
                elif self._text and line.later[len(answers) - 1 :]:
                    following = _next_turn(line, answers, self._text)
                    config = self._engine.target.config
                    if self._outgrown and outgrows(following, self._engine.max_length, config):
                        self._outgrown(line)
                    else:
                        self._tickets[self._engine.submit(following)] = line, answers
                    yield None, answers
                else:
                    answers.sort(key=lambda completion: completion.sample)
                    yield self._record(line, answers), answers
            except Exception as error:  # such as a conversation that has outgrown the engine
                yield error_record(replace(line, error=refusal(error))), answers


def _next_turn(line: Line, turns: Sequence[Completion], text: Text) -> Request:
    """The request of a conversation's next user turn: all before it, answers included, under the chat template."""
    assert line.request is not None
    messages = list(line.messages)
    least = line.request.params.min_tokens
    for completion, following in zip(turns, line.later, strict=False):
        given = answer(completion, text, line.stop, least, line.form)
        said = given.get("message", {"role": "assistant", "content": given["text"] or ""})
        messages += [said, {"role": "user", "content": following}]
    return replace(line.request, prompt_token_ids=text.encode_chat(messages, **line.template_arguments))
