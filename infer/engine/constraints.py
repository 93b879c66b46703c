"""The constraints of an engine: prepared once, placed in its tables while requests need them."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dflash_jax.constraints.constraint import STATES, Constraint, prepared
from dflash_jax.constraints.errors import ConstraintError
from dflash_jax.constraints.process import Process
from dflash_jax.constraints.tokenizer import vocabulary_of
from dflash_jax.constraints.vocabulary import TokenAutomaton, Vocabulary
from dflash_jax.decoding.automata import Automata, Walk, empty_tables
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import RequestError, invalid
from dflash_jax.target import Target
from dflash_jax.vocabulary import load_tokenizer

KEPT = 2**28  # bytes of prepared constraints, used or not
AUTOMATA = 64  # in the tables at a time
MOST_CLASSES = 2**15 - 1  # of tokens: the largest number of the tables' kind
NO_ROOM = "constraint_too_large"
CELLS = 512  # transitions for each state of the tables,
MASKS = 8  # and one mask for so many


class _Key(NamedTuple):
    constraint: Constraint
    ends: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Ready:
    """A prepared constraint.

    Attributes:
        automaton: that reads tokens.
    """

    key: _Key
    automaton: TokenAutomaton

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return sum(x.nbytes for x in self.automaton)


def room_for(vocab_size: int, states: int) -> Automata:
    """Empty tables with room for so many states of all automata together, on the host."""
    rooms = {"states": states, "cells": CELLS * states, "masks": states // MASKS}
    return empty_tables(vocab_size, **rooms, automata=AUTOMATA)


@dataclass
class _Placed:
    """Where an automaton lies in the tables, and how many requests use it."""

    number: int
    states: tuple[int, int]
    cells: tuple[int, int]
    masks: list[int]
    users: int = 0


@dataclass
class Constraints:
    """What an engine knows of constraints. `check` may be called by any thread, the rest by the engine's.

    Attributes:
        target: whose tokenizer says what tokens are made of.
        states: of all automata together.
        tables: as programs read them.
    """

    target: Target
    states: int
    tables: Automata = field(init=False)

    def __post_init__(self):
        self._host = room_for(self.target.config.vocab_size, self.states)
        self._lock, self._vocabulary = threading.Lock(), None
        self._making = threading.Lock()  # of what takes long; `knows` must not wait for it
        self._process: Process | None = None
        self._beside = False
        self._ready: OrderedDict[_Key, Ready] = OrderedDict()
        self._placed: OrderedDict[_Key, _Placed] = OrderedDict()
        self._mask_users, self._mask_at = [1] + [0] * (self.states // MASKS - 1), dict[bytes, int]()
        self._upload()

    @property
    def most_states(self) -> int:
        """States that one automaton may have."""
        return min(STATES, self.states - 1)

    @property
    def vocabulary(self) -> Vocabulary:
        """What tokens are made of.

        Raises:
            ConstraintError: the target has no tokenizer that says so.
        """
        with self._making:
            if self._vocabulary is None:
                directory = self.target.directory
                tokenizer = load_tokenizer(Path(directory)) if directory else None
                self._vocabulary = vocabulary_of(tokenizer, self.target.config.vocab_size)
            return self._vocabulary

    @staticmethod
    def check_settings(params: SamplingParams) -> None:
        """Raises RequestError for settings that do not go together with a request's constraint."""
        if params.constraint is None:
            return
        name = _name(params.constraint)
        if params.ignore_eos:
            raise invalid(f"{name} and ignore_eos cannot be combined: a constraint says where the answer ends", name)
        if not params.eos_token_ids:
            raise invalid(
                f"{name} needs eos_token_ids, the tokens that end an answer where the constraint allows it", name
            )

    def check(self, params: SamplingParams) -> Ready | None:
        """The prepared constraint of a request, if it has one; raises RequestError if it cannot be served."""
        self.check_settings(params)
        if params.constraint is None:
            return None
        try:
            return self._prepare(_Key(params.constraint, params.eos_token_ids))
        except ConstraintError as error:
            name = _name(params.constraint)
            raise RequestError(error.code, f"{name}: {error}", name) from error

    def knows(self, params: SamplingParams) -> bool:
        """Whether `check` has nothing to prepare."""
        key = params.constraint and _Key(params.constraint, params.eos_token_ids)
        with self._lock:
            return key is None or key in self._ready

    def _prepare(self, key: _Key) -> Ready:
        with self._lock:
            if (known := self._ready.get(key)) is not None:
                self._ready.move_to_end(key)
                return known
        try:
            ready = self._fitting(key, key.constraint)
        except ConstraintError as error:
            form = key.constraint.form
            if error.code != NO_ROOM or form is None or form.loosened == form:
                raise
            ready = self._fitting(key, replace(key.constraint, form=form.loosened))
        with self._lock:
            self._ready[key] = ready
            while len(self._ready) > 1 and sum(one.size for one in self._ready.values()) > KEPT:
                self._ready.popitem(last=False)
        return ready

    def _fitting(self, key: _Key, constraint: Constraint) -> Ready:
        """A constraint, prepared; raises ConstraintError if it does not fit into the tables."""
        found = self._prepared(constraint, key.ends)
        room = len(self._host.cells), len(self._host.masks) - 1, MOST_CLASSES
        if any(x > y for x, y in zip((found.next.size, len(found.masks), found.next.shape[1]), room, strict=True)):
            raise ConstraintError(NO_ROOM, "the constraint takes too much memory; make it smaller")
        return Ready(key, found)

    def _prepared(self, constraint: Constraint, ends: Sequence[int]) -> TokenAutomaton:
        vocabulary = self.vocabulary
        if not self._beside:
            return prepared(constraint, vocabulary, ends, states=self.most_states)
        with self._making:
            self._process = self._process or Process(vocabulary, self.most_states)
        return self._process.prepared(constraint, ends)

    def prepare_beside(self) -> None:
        """From now on constraints are prepared in a process of its own, which begins with the first one: this one has
        requests to answer meanwhile. `close` ends it."""
        self._beside = True

    def close(self) -> None:
        """Ends the process of `prepare_beside`."""
        if self._process is not None:
            self._process.close()

    def place(self, ready: Ready | None, read: Sequence[int] = ()) -> Walk | None:
        """Where the row of a request begins, after so much of its answer; None if there is no room in the tables until
        another request ends."""
        if ready is None:
            return _walk(0, 0)
        if ready.key not in self._placed:
            # Those that nobody uses go, the one first that was not used for longest.
            unused = [other for other, placed in self._placed.items() if not placed.users]
            while (where := self._room(ready)) is None:
                if not unused:
                    return None
                self._remove(unused.pop(0))
            self._write(ready, *where)
        placed = self._placed[ready.key]
        placed.users += 1
        self._placed.move_to_end(ready.key)
        return _walk(placed.states[0] + ready.automaton.walk(read)[-1] - 1, placed.number)

    def release(self, ready: Ready | None) -> None:
        """A request that was placed has ended. Its automaton stays until the room is needed."""
        if ready is not None:
            self._placed[ready.key].users -= 1

    def _room(self, ready: Ready) -> tuple[int, int, int] | None:
        """A free number, and where states and cells are free."""
        placed, following = self._placed.values(), ready.automaton.next
        numbers = set(range(AUTOMATA)) - {one.number for one in placed}
        states = _gap([one.states for one in placed], len(following) - 1, 1, self.states)
        cells = _gap([one.cells for one in placed], following.size, 0, len(self._host.cells))
        new = sum(mask.tobytes() not in self._mask_at for mask in ready.automaton.masks)
        if not numbers or states is None or cells is None or new > self._mask_users.count(0):
            return None
        return min(numbers), states, cells

    def _remove(self, key: _Key) -> None:
        for mask in self._placed.pop(key).masks:
            self._mask_users[mask] -= 1
        self._mask_at = {word: at for word, at in self._mask_at.items() if self._mask_users[at]}

    def _write(self, ready: Ready, number: int, state: int, cell: int) -> None:
        host, found, masks = self._host, ready.automaton, list[int]()
        for mask in found.masks:
            name = mask.tobytes()
            if name not in self._mask_at:
                self._mask_at[name] = self._mask_users.index(0)
                host.masks[self._mask_at[name]] = mask
            masks.append(self._mask_at[name])
            self._mask_users[masks[-1]] += 1
        size, classes = len(found.next) - 1, found.next.shape[1]  # without the dead state
        states, cells = slice(state, state + size), slice(cell, cell + found.next.size)
        host.mask_of[states] = np.asarray(masks, np.int32)[found.mask_of[1:]]
        host.base[states] = cell + classes * np.arange(1, size + 1)
        host.hint[states] = found.hint[1:]
        host.cells[cells] = np.where(found.next > 0, found.next + (state - 1), 0).reshape(-1)
        host.classes[number] = found.classes
        self._placed[ready.key] = _Placed(number, (state, state + size), (cell, cell + found.next.size), masks)
        self._upload()

    def _upload(self) -> None:
        mesh = self.target.mesh
        where = NamedSharding(mesh, PartitionSpec()) if mesh is not None else None
        copied = jax.tree.map(np.copy, self._host)  # on CPU the device may keep what it is given
        self.tables = jax.device_put(copied, where)


def _name(constraint: Constraint) -> str:
    return constraint.name or "constraint"


def _walk(state: int, automaton: int) -> Walk:
    return Walk(np.int32(state), np.int32(automaton))  # pyright: ignore[reportArgumentType] (brought there by programs)


def _gap(taken: Sequence[tuple[int, int]], size: int, begin: int, end: int) -> int | None:
    """Where so many places in a row are free."""
    for low, high in [*sorted(taken), (end, end)]:
        if begin + size <= low:
            return begin
        begin = max(begin, high)
    return None
