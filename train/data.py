"""Regenerated answers as packed rows of a fixed length. No jax; any step's rows follow from seed and step.

Shapes: B rows, S tokens of a row.
"""

import json
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.files import one_line, said
from dflash_jax.infer.text import Text

OPEN_ROWS = 16  # that packing chooses from


class Example(NamedTuple):
    """One conversation.

    Attributes:
        tokens: of prompt and answer.
        supervised: which of them are answer.
        begins: after which of them a step began, where the answer was decoded with a drafter; None if not known.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    begins: np.ndarray | None = None


class Rows(NamedTuple):
    """Packed rows.

    Attributes:
        tokens: [B, S], 0 where a row is not full.
        starts: where the document of each position begins, [B, S]; empty positions are documents of one.
        supervised: answer tokens, [B, S].
        begins: tokens after which a step began, [B, S]; none where that is not known.
    """

    tokens: np.ndarray
    starts: np.ndarray
    supervised: np.ndarray
    begins: np.ndarray


@dataclass
class Dataset:
    """Examples, and what was left out on the way.

    Attributes:
        examples: in file order.
        without_answer: lines with too few answer tokens to hold an anchor and a label.
        cut: examples cut to `length`.
    """

    examples: list[Example] = field(default_factory=list)
    without_answer: int = 0
    cut: int = 0


def read_examples(
    path: str | Path, length: int, vocab_size: int, text: Text | None = None, ends: Collection[int] = ()
) -> Dataset:
    """Reads `{"prompt_token_ids", "response_token_ids", "loss_mask"?}` or `{"token_ids", "loss_mask"}` lines, with
    "anchors" if an answer was decoded with a drafter; and `{"messages"}` lines with answers of the role assistant.

    Args:
        text: the target's tokenizer, for messages.
        ends: tokens that end an answer: what the chat template writes behind them is not learned.

    Sequences longer than `length` are cut; what then has fewer than two consecutive answer tokens is left out.

    Raises:
        ValueError: an unreadable line (with its number), tokens outside the vocabulary, or nothing to train on.
    """
    data = Dataset()
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                tokens, supervised, begins = _parse(json.loads(line), text, ends)
            except Exception as error:  # values of any other type
                raise ValueError(one_line(f"{path}, line {number}: {said(error):.200}")) from error
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                raise ValueError(f"{path}, line {number}: token ids must lie in 0..{vocab_size - 1}")
            data.cut += len(tokens) > length
            tokens, supervised = tokens[:length], supervised[:length]
            if np.any(supervised[:-1] & supervised[1:]):
                data.examples.append(Example(tokens, supervised, None if begins is None else begins[:length]))
            else:
                data.without_answer += 1
    if not data.examples:
        raise ValueError(
            f"{path} has nothing to train on: {data.without_answer} lines without two answer tokens in the first "
            f"{length}; expected prompt_token_ids and response_token_ids (see `regenerate`)"
        )
    return data


def _parse(row: Any, text: Text | None, ends: Collection[int]) -> Example:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    if "error" in row:  # a prompt that `regenerate` could not answer
        return Example(np.zeros(0, np.int32), np.zeros(0, bool))
    if text is not None and "messages" in row and "prompt_token_ids" not in row:
        return Example(*_conversation(row["messages"], text, ends))
    tokens, mask = _tokens(row)
    if "anchors" not in row:
        return Example(tokens, mask)
    places = _ids(row["anchors"])
    if places.size and not 0 <= places.min() <= places.max() < len(tokens):
        raise ValueError(f"anchors must lie in 0..{len(tokens) - 1}")
    begins = np.zeros(len(tokens), bool)
    begins[places] = True
    return Example(tokens, mask, begins)


def _conversation(messages: object, text: Text, ends: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
    tokens, mask = list[int](), list[bool]()
    for piece, answer in text.answered(messages):
        new = text.encode_rendered(piece)
        last = max((i for i, token in enumerate(new) if token in ends), default=len(new) - 1)
        tokens += new
        mask += [answer and i <= last for i in range(len(new))]
    return np.asarray(tokens, np.int32), np.asarray(mask, bool)


def _tokens(row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    if "token_ids" in row and "loss_mask" in row:
        tokens, mask = _ids(row["token_ids"]), _ids(row["loss_mask"]).astype(bool)
        if len(tokens) != len(mask):
            raise ValueError(f"token_ids has {len(tokens)} entries, loss_mask {len(mask)}")
        return tokens, mask
    if "prompt_token_ids" not in row or "response_token_ids" not in row:
        raise ValueError("expected prompt_token_ids and response_token_ids, token_ids and loss_mask, or messages")
    prompt, answer = _ids(row["prompt_token_ids"]), _ids(row["response_token_ids"])
    tokens = np.concatenate([prompt, answer])
    mask = _ids(row["loss_mask"]).astype(bool) if "loss_mask" in row else np.arange(len(tokens)) >= len(prompt)
    if len(mask) != len(tokens):
        raise ValueError(f"prompt and answer have {len(tokens)} tokens, loss_mask {len(mask)}")
    return tokens, mask


def _ids(value: Any) -> np.ndarray:
    if not isinstance(value, list) or not all(type(i) is int and abs(i) < 2**31 for i in value):
        raise ValueError(f"token ids must be a list of integers, got {value!r:.60}")
    return np.asarray(value, np.int32)


class Packing:
    """Rows of every epoch: the examples shuffled, each laid whole into the first open row that has room.

    The number of rows of an epoch depends on its order, so a step's epoch is found by counting.

    Args:
        examples: none longer than `length`.
        length: S.
        batch_size: rows of a step; what is left of an epoch's rows at its end is dropped.
        seed: of the order.
    """

    def __init__(self, examples: Sequence[Example], length: int, batch_size: int, seed: int):
        self.examples, self.length, self.batch_size, self.seed = examples, length, batch_size, seed
        self._sizes = np.asarray([len(example.tokens) for example in examples])
        self._epochs: list[list[list[int]]] = []
        self._first: list[int] = [0]  # step at which each known epoch begins

    def steps(self, epochs: float) -> int:
        """Optimizer steps of so many epochs, at least one."""
        whole, part = int(epochs), epochs - int(epochs)
        while len(self._epochs) < whole + bool(part):
            self._plan_epoch()
        total = self._first[whole]
        if part:
            total += int(part * (self._first[whole + 1] - total))
        return max(1, total)

    @property
    def rows_of_an_epoch(self) -> int:
        """Of the first one; in another order there may be one more or less."""
        if not self._epochs:
            self._plan_epoch()
        return len(self._epochs[0])

    def batch(self, step: int) -> Rows:
        """The rows of a step."""
        return self.rows(self.contents(step))

    def contents(self, step: int) -> list[list[int]]:
        """Example numbers of each row of a step, counted from 0."""
        while step >= self._first[-1]:
            self._plan_epoch()
        epoch = bisect_right(self._first, step) - 1
        at = (step - self._first[epoch]) * self.batch_size
        return self._epochs[epoch][at : at + self.batch_size]

    def _plan_epoch(self) -> None:
        order = np.random.default_rng([self.seed, len(self._epochs)]).permutation(len(self.examples))
        rows: list[list[int]] = []
        room: dict[int, int] = {}  # of the rows still open
        for index in order.tolist():
            size = int(self._sizes[index])
            row = next((row for row, left in room.items() if left >= size), None)
            if row is None:
                if len(room) == OPEN_ROWS:
                    del room[min(room, key=lambda r: room[r])]
                row = len(rows)
                rows.append([])
                room[row] = self.length
            rows[row].append(index)
            room[row] -= size
        while len(rows) < self.batch_size:  # a corpus smaller than a step is repeated
            rows += rows[: self.batch_size - len(rows)]
        self._epochs.append(rows)
        self._first.append(self._first[-1] + len(rows) // self.batch_size)

    def rows(self, contents: Sequence[Sequence[int]]) -> Rows:
        """Rows holding the given examples."""
        shape = len(contents), self.length
        starts = np.broadcast_to(np.arange(self.length, dtype=np.int32), shape).copy()
        rows = Rows(np.zeros(shape, np.int32), starts, np.zeros(shape, bool), np.zeros(shape, bool))
        for row, indices in enumerate(contents):
            at = 0
            for index in indices:
                tokens, supervised, begins = self.examples[index]
                end = at + len(tokens)
                rows.tokens[row, at:end], rows.supervised[row, at:end] = tokens, supervised
                rows.begins[row, at:end] = False if begins is None else begins
                rows.starts[row, at:end] = at
                at = end
        return rows
