"""Streamed completions: what each chunk says."""

import itertools
import json
from collections.abc import Iterator, Sequence

from dflash_jax.constraints.tools.reading import Event
from dflash_jax.files import Json, Value
from dflash_jax.infer import openai
from dflash_jax.infer.answers import answer_name, token_logprobs
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.http import reports
from dflash_jax.infer.http.asked import Asked
from dflash_jax.infer.http.worker import Progress
from dflash_jax.infer.parts import AnswerParts, Deltas
from dflash_jax.infer.text import GrowingText, Text


class CompletionStream:
    """The server-sent events of all answers to a request.

    Args:
        asked: the request.
    """

    def __init__(self, text: Text, asked: Asked):
        kind = "chat.completion.chunk" if asked.endpoint == openai.CHAT else "text_completion"
        self._asked, self._head = asked, openai.envelope(asked.endpoint, kind, asked.model)
        self._streams = [AnswerStream(text, asked, sample) for sample in range(len(asked.samples))]

    def begin(self) -> bytes:
        """What is sent before any token has come."""
        return b""

    def add(self, index: int, progress: Progress) -> bytes:
        """What is sent of the progress of one answer; nothing if nothing more can be said yet."""
        if (choice := self._streams[index].add(progress)) is None:
            return b""
        fields: Json = {"choices": [{"index": index} | choice]}
        if self._asked.always_usage or progress.finished:  # load generators look for it there, asked for or not
            fields["usage"] = self._usage()
        if progress.finished:
            done = progress.completion
            fields["speculation"] = reports.timed(done, progress.alone)
            fields |= {"meta_info": reports.meta_info(done)} if self._asked.with_meta_info else {}
            if not self._asked.with_usage:  # clients add up what they find, so an answer has it once
                fields["metrics"] = reports.metrics(done)
        return event(self._head | fields)

    def _usage(self) -> Json:
        begun = [stream for stream in self._streams if stream.tokens]
        prompts = {i // self._asked.of_each: s.completion for i, s in enumerate(self._streams) if s.tokens}
        done, counts = [stream.completion for stream in begun], [stream.tokens for stream in begun]
        return reports.usage(done, counts, prompts.values())

    def end(self) -> bytes:
        """What is sent after all answers."""
        last = b""
        if self._asked.with_usage:
            metrics = {"metrics": reports.metrics(self._streams[0].completion)} if len(self._streams) == 1 else {}
            last = event(self._head | {"choices": [], "usage": self._usage()} | metrics)
        return last + b"data: [DONE]\n\n"

    def failed(self, message: str) -> bytes:
        """What is sent in place of the rest."""
        return event({"error": {"message": message, "code": "engine_failed"}})


def event(fields: Json, name: str = "") -> bytes:
    """A server-sent event."""
    return (b"event: %s\n" % name.encode() if name else b"") + b"data: %s\n\n" % compact(fields)


def compact(value: Value) -> bytes:
    """JSON without blanks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class AnswerStream:
    """The chunks of one streamed answer.

    Attributes:
        completion: the answer, which the engine may go on writing to.
        tokens: those of it that chunks were made of.
    """

    def __init__(self, text: Text, asked: Asked, sample: int = 0):
        self._asked, self._text, self._growing = asked, text, GrowingText(text, asked.stop, asked.min_tokens)
        self._parts, self._deltas = None, Deltas()
        if asked.form is not None:
            name = answer_name(asked.samples[sample].id, Completion(sample=sample))
            self._parts = AnswerParts(text, asked.form, name, asked.stop, asked.min_tokens)
        self.completion, self.tokens = Completion(), 0
        self._scored = 0  # tokens whose log-probabilities were sent
        self._begun = False

    def add(self, progress: Progress) -> Json | None:
        """The choice of the next chunk; None if nothing more can be said yet."""
        done, count, ended = progress.completion, progress.tokens, progress.finished
        self.completion = done
        steps, events = [], list[Event]()
        for end in self._ends(done, count):
            steps.append([end - self.tokens, self._read(done.token_ids[self.tokens : end], events)])
            self.tokens = end
        if ended:
            rest = self._end(done, events)
            if steps:
                steps[-1][1] += rest
            elif rest:
                steps.append([0, rest])
        piece = "".join(text for _, text in steps)
        parts = None if self._parts is None else self._deltas.of(events)
        if not piece and not parts and not ended and not self._asked.with_steps:
            return None
        scores = None
        if self._asked.samples[0].params.logprobs is not None:
            scores = token_logprobs(done, self._text, self._scored, count)
            self._scored = count
        first, self._begun = not self._begun, True
        reason = done.finish_reason if ended else None
        if reason and self._parts is not None:
            reason = self._parts.finish_reason(reason)
        choice = openai.chunk_choice(self._asked.endpoint, piece, reason, first, scores, parts)
        if self._asked.with_steps:
            choice |= {"steps": steps} | ({} if progress.draft is None else {"draft": _draft(*progress.draft)})
        return choice

    def _read(self, tokens: Sequence[int], events: list[Event]) -> str:
        """The text of new tokens; if an answer has other parts, they are added to `events`."""
        if self._parts is None:
            return self._growing.add(tokens)
        found = self._parts.add(tokens)
        events += found
        return _shown(found)

    def _end(self, done: Completion, events: list[Event]) -> str:
        """The same of what is left at the end."""
        if self._parts is None:
            return self._growing.end(done.token_ids)
        found = self._parts.add([], last=True)
        events += found
        return _shown(found)

    def _ends(self, done: Completion, count: int) -> Iterator[int]:
        """Where the new tokens end; if steps are asked for, where those of each step do."""
        if self._asked.with_steps:
            # The first token comes from the prompt.
            lengths = done.acceptance_lengths or [1] * count
            for end in itertools.accumulate(lengths, initial=1):
                if self.tokens < end < count:
                    yield end
        if self.tokens < count:
            yield count


def _draft(draft: Draft, proposed: int) -> Json:
    """What steps proposed; a block of size 1 is its own first token, and no speculation."""
    size = draft.block_size if proposed else 1
    return {"block_size": size, "tree": draft.nodes, "budget": draft.budget, "proposed": proposed}


def _shown(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if event.kind in ("reasoning", "content", "arguments"))
