"""Answers while they arrive, read by the same formats that constrain them.

A format reads text by a generator: it yields what it found, and None where it needs more text. So what an answer says
does not depend on how many tokens come at a time.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Literal, NamedTuple

from dflash_jax.constraints.tools.form import Form

Kind = Literal["reasoning", "content", "call", "arguments", "done"]


class Event(NamedTuple):
    """A part of an answer.

    Attributes:
        kind: reasoning, content and arguments come in pieces; a call begins with its name, and is done when its
            arguments are complete.
        text: of the piece, or name of the function.
        id: of the call, where the model writes one.
    """

    kind: Kind
    text: str = ""
    id: str = ""


class EndedError(Exception):
    """The answer has ended where more was expected."""


Steps = Generator[Event | None, None, None]
_INSIDE = re.compile(r'[^"\\]*')  # of a string of JSON, up to its end or an escape
_BETWEEN = re.compile(r'[^"{}\[\]]*')


class Feed:
    """Text that arrives in pieces.

    Attributes:
        form: of the answer.
        text: what has arrived and was not read yet.
        ended: whether no more will arrive.
    """

    def __init__(self, form: Form, symbols: Mapping[str, str] | None = None):
        self.form, self.text, self.ended, self._symbols = form, "", False, dict(symbols or {})

    def mark(self, name: str) -> str:
        """How a mark is seen in the text: a special token as a character that no text has."""
        return self._symbols.get(name, name)

    def more(self) -> Steps:
        if self.ended:
            raise EndedError
        yield None

    def starts(self, name: str) -> Generator[None, None, bool]:
        """Whether a mark follows, which is then read."""
        mark = self.mark(name)
        while len(self.text) < len(mark) and mark.startswith(self.text) and not self.ended:
            yield None
        found = self.text.startswith(mark)
        if found:
            self.text = self.text[len(mark) :]
        return found

    def skip(self, of: str) -> Generator[None, None, None]:
        """Reads all of these characters that follow."""
        while True:
            self.text = self.text.lstrip(of)
            if self.text or self.ended:
                return
            yield None

    def take(self, name: str) -> Generator[Event | None, None, str]:
        """The text before a mark, both of which are read; raises EndedError if there is none."""
        mark = self.mark(name)
        while (place := self.text.find(mark)) < 0:
            yield from self.more()
        found, self.text = self.text[:place], self.text[place + len(mark) :]
        return found

    def until(
        self, kind: Kind, *names: str, trim: Literal["", "end", "both"] = "", change: Callable[[str], str] = str
    ) -> Generator[Event | None, None, str]:
        """Yields the text before the first of these marks, piece by piece; returns the mark, which is read, or "" at
        the end of the answer.

        Args:
            trim: leave out blanks before a mark, or at the beginning, too.
            change: what becomes of each piece.
        """
        marks = {self.mark(name): name for name in names}
        begun = trim != "both"
        while True:
            if not begun:
                self.text = self.text.lstrip()
            at, found = min(((place, mark) for mark in marks if (place := self.text.find(mark)) >= 0), default=(-1, ""))
            if found:
                piece, self.text = self.text[:at], self.text[at + len(found) :]
                piece = piece.rstrip() if trim else piece
            elif self.ended:
                piece, self.text = self.text, ""
            else:
                held = max((_held(self.text, mark) for mark in marks), default=0)
                ready = self.text[: len(self.text) - held]
                ready = ready.rstrip() if trim else ready
                piece, self.text = ready, self.text[len(ready) :]
            if piece:
                begun = True
                yield Event(kind, change(piece))
            if found or self.ended:
                return marks.get(found, "")
            yield None

    def value(self) -> Steps:
        """An object of JSON, as it is written; raises EndedError if it is not complete."""
        depth, string = 0, False
        while True:
            at, done = 0, False
            while at < len(self.text) and not done:
                if string:
                    at = _INSIDE.match(self.text, at).end()  # pyright: ignore[reportOptionalMemberAccess] (it may be empty)
                    if self.text[at : at + 1] == "\\":
                        if at + 1 == len(self.text):
                            break  # what is escaped has not arrived
                        at += 2
                    elif at < len(self.text):
                        string, at = False, at + 1
                    continue
                at = _BETWEEN.match(self.text, at).end()  # pyright: ignore[reportOptionalMemberAccess]
                if at < len(self.text):
                    letter, at = self.text[at], at + 1
                    string = letter == '"'
                    depth += (letter in "{[") - (letter in "}]")
                    done = letter in "}]" and not depth
            if self.ended and not done:
                at = len(self.text)
            piece, self.text = self.text[:at], self.text[at:]
            if piece:
                yield Event("arguments", piece)
            if done:
                return
            yield from self.more()


def _held(text: str, mark: str) -> int:
    """Characters at the end of a text that may be the beginning of a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def escaped(text: str) -> str:
    """A piece of a string as JSON has it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Reading:
    """Reads an answer while it arrives.

    Args:
        read: of its format.
        form: of the answer.
        symbols: characters in place of special tokens, by their names.
    """

    def __init__(self, read: Callable[[Feed], Steps], form: Form, symbols: Mapping[str, str] | None = None):
        self._feed = Feed(form, symbols)
        self._steps = read(self._feed)

    def add(self, text: str, *, last: bool = False) -> list[Event]:
        """What a further piece of the answer says; `last` says that no more will come."""
        self._feed.text += text
        self._feed.ended = last
        found = list[Event]()
        try:
            for event in self._steps:
                if event is None:
                    break
                found.append(event)
        except EndedError:
            pass
        return found


def joined(events: Sequence[Event], kind: Kind) -> str:
    """All text of a kind."""
    return "".join(event.text for event in events if event.kind == kind)
