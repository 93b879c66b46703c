"""The slots of an engine on the device: their state, and the compiled programs that change it."""

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.cache import Group
from dflash_jax.decoding.state import DraftModel, RowSettings, init_state
from dflash_jax.decoding.step import Committed
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.compiler_options import Options, fastest_options
from dflash_jax.infer.engine.compiling import compile_all
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.params import STOP_WIDTH, SamplingParams
from dflash_jax.infer.engine.prefixes import PrefixCache
from dflash_jax.infer.engine.programs import begin, decode_call, move, prefill, release
from dflash_jax.infer.engine.prompts import Cost, Selected, Shape, Unread, cheapest, fixed, modelled, select, shapes
from dflash_jax.mesh import entered, rows_of
from dflash_jax.sharding import pin
from dflash_jax.target import Target

NARROWER = (4, 2)  # few busy rows run programs of a fourth or half of the rows,
MANY = 16  # where there are so many: fewer are not worth compiling several times as many programs


class Read(NamedTuple):
    """Of one prompt.

    Attributes:
        filled: tokens that are committed now.
        copied: of them, copied from another prompt this time.
        place: of its row in the program; None if it was not read.
    """

    slot: int
    filled: int
    copied: int
    place: int | None


class Slots:
    """Rows that decode together. Which requests they belong to is the engine's business.

    Args:
        target, drafter: the models; without a drafter, one token a step.
        config: of the engine. Rows and their length are those given here.
        slots: rows.
        max_length: tokens a row can hold.
        drafts: what `decode` may be asked for; a block size of 0 proposes nothing.

    Attributes:
        state: consumed and replaced by every call.
        lengths: tokens that each row can hold.
        widths: how many rows `decode` may be asked to advance.
    """

    def __init__(
        self,
        target: Target,
        drafter: DraftModel | None,
        config: EngineConfig,
        slots: int,
        max_length: int,
        drafts: Sequence[Draft],
    ):
        self._target, self._drafter, self._slots, self._config = target, drafter, slots, config
        self._parts, self._chunk = rows_of(target.mesh), config.prefill_chunk
        self._shapes = shapes(self._chunk, slots // self._parts)
        short = None
        if config.short_length is not None:
            short = Group(slots - config.long_slots, config.short_length)
        self.lengths = [max_length] * slots
        if short is not None:  # of each part of the mesh, the first rows
            of_part, count = slots // self._parts, short.rows // self._parts
            self.lengths = [short.slots if i % of_part < count else max_length for i in range(slots)]
        self._short = short
        groups = max_length if short is None else (short, Group(slots - short.rows, max_length))
        self._fixed, self._neutral = config.deterministic, SamplingParams().on_device("", 0, 0, 1)
        self._costs: dict[Shape, Cost] = {}  # in seconds, once measured
        self._drafts = tuple(drafts)
        fewer = [slots // n // self._parts * self._parts for n in NARROWER if slots >= MANY and not self._fixed]
        self.widths = tuple(sorted({slots, *filter(None, fewer)}))
        with self._on_mesh():
            made = jax.jit(lambda: pin(init_state(target, drafter, slots, groups, STOP_WIDTH, self._chunk)))()
            if self._fixed and made.calibration is not None:
                made = made.replace(calibration=made.calibration.replace(frozen=True))
            self.state = jax.block_until_ready(made)  # if there is no memory, say so here
            self._prefixes = PrefixCache(self.state, config.prefix_chunks, self._chunk)

    @property
    def programs(self) -> int:
        """How many `warm_up` compiles: for chunks of prompts, kinds of drafts, a row's beginning, move and end, kept
        prefixes."""
        more = 2 + bool(self._short) + self._prefixes.programs
        return len(self._shapes) + len(self.widths) * len(self._drafts) + more

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """Of the prompt's chunks, for `read`."""
        return self._prefixes.keys(prompt)

    def warm_up(self, look: Callable[[], object] = lambda: None) -> None:
        """Compiles every program; afterwards none is compiled any more. All rows must be idle.

        Args:
            look: called between programs; what it raises ends the work.
        """
        reading = ((prefill, self._prefill_arguments(*self._nothing(shape))) for shape in self._shapes)
        decoding = (self._decode_call(draft, 0, 0, self.idle(width)) for draft, width in self._decoding)
        with self._on_mesh():
            compile_all(itertools.chain(reading, decoding), look)
        self.begin(0)
        if self._short:
            self.move(0, self._slots - 1, self._neutral)
            self.release(self._slots - 1)
        for shape in self._shapes:
            look()
            self._prefill(*self._nothing(shape))
            if not self._fixed:
                self._costs[shape] = self._prefill_cost(shape)
        with self._on_mesh():
            self.state = self._prefixes.warm_up(self.state)
        for draft, width in self._decoding:
            look()
            self.decode(draft, 0, 0, self.idle(width))
        self.release(0)
        jax.block_until_ready(self.state)

    def begin(self, slot: int) -> None:
        """Makes an idle row ready for a new prompt."""
        with self._on_mesh():
            self.state = begin(self.state, np.int32(slot))

    def read(self, prompts: Sequence[Unread]) -> tuple[list[Read], Committed, float | None]:
        """Commits the next tokens of some of these prompts, of the first one at least; after its last token a row
        decodes.

        Args:
            prompts: of rows that were begun; which are read together with the first is decided by the program's cost.

        Returns:
            What was read, the first new tokens [B, 1] of the rows whose prompt ended, and how many seconds the program
            takes, if that was measured.
        """
        prompts = prompts[:1] if self._fixed else prompts
        starts = {unread.slot: self._copied(unread) for unread in prompts}
        ends = {u.slot: min(len(u.prompt), (starts[u.slot] // self._chunk + 1) * self._chunk) for u in prompts}
        # A chunk that one of them reads is copied by the others when it is there.
        begun: dict[bytes, int] = {}
        shared = Counter(self._key(u, starts[u.slot]) for u in prompts)
        for u in prompts:
            begun.setdefault(self._key(u, starts[u.slot]), u.slot)
        alone = [u for u in prompts if begun[self._key(u, starts[u.slot])] == u.slot]
        parts = [[u for u in alone if u.slot * self._parts // self._slots == part] for part in range(self._parts)]
        first, seconds = prompts[0].slot, None
        if self._fixed:
            shape = fixed(self._shapes, ends[first] - starts[first])
        else:
            left = [[(starts[u.slot], ends[u.slot] - starts[u.slot]) for u in part] for part in parts]
            shape, cost = cheapest(self._costs or {shape: modelled(shape) for shape in self._shapes}, left)
            seconds = cost if self._costs else None
        taken = [[(u.slot, u.prompt[starts[u.slot] : ends[u.slot]]) for u in part] for part in parts]
        selected = select(shape, taken, self._slots // self._parts)
        of_slot = {u.slot: u for u in prompts}
        rows, found = selected.rows.tolist(), []
        settings, last = [self._neutral] * len(rows), np.zeros(len(rows), np.bool_)
        for place, (row, count) in enumerate(zip(rows, selected.counts.tolist(), strict=True)):
            if not count:
                continue
            unread, filled = of_slot[row], starts[row] + count
            settings[place], last[place] = unread.settings, filled == len(unread.prompt)
            found.append(Read(row, filled, starts[row] - unread.start, place))
        tokens = self._prefill(selected, last, tuple(settings))
        for read in found:
            with self._on_mesh():
                keys, awaited = of_slot[read.slot].keys, shared[self._key(of_slot[read.slot], starts[read.slot])] > 1
                self._prefixes.offer(self.state, read.slot, read.filled, keys, awaited=awaited)
        read = {one.slot for one in found}
        found += [Read(slot, at, at - of_slot[slot].start, None) for slot, at in starts.items() if slot not in read]
        return found, tokens, seconds

    def _key(self, unread: Unread, at: int) -> bytes:
        """Of the chunk of a prompt that is read next; one of its own where it could not be copied."""
        if unread.keys and at % self._chunk == 0 and at + self._chunk < len(unread.prompt):
            return unread.keys[at // self._chunk]
        return unread.slot.to_bytes(4)

    def _copied(self, unread: Unread) -> int:
        """Tokens of a prompt that are committed once all chunks of it that are kept have been copied."""
        with self._on_mesh():
            self.state, at = self._prefixes.copy(self.state, unread.slot, unread.start, unread.prompt, unread.keys)
        return at

    @property
    def _decoding(self) -> list[tuple[Draft, int]]:
        """Draft and rows of each program that decodes."""
        return [(draft, width) for width in self.widths for draft in self._drafts]

    def some(self, busy: Sequence[int]) -> list[int]:
        """The rows of the narrowest program that advances these, as many of each part of the mesh."""
        of_part = self._slots // self._parts
        busy_of = [[slot for slot in busy if slot // of_part == part] for part in range(self._parts)]
        most = max(map(len, busy_of)) * self._parts
        return self._filled(busy_of, next(width for width in self.widths if width >= most))

    def _filled(self, busy_of: Sequence[Sequence[int]], width: int) -> list[int]:
        """The busy rows of each part, and others, so that there are as many of each part."""
        of_part, chosen = self._slots // self._parts, list[int]()
        for part, taken in enumerate(busy_of):
            others = (slot for slot in range(part * of_part, (part + 1) * of_part) if slot not in taken)
            chosen += sorted([*taken, *itertools.islice(others, width // self._parts - len(taken))])
        return chosen

    def idle(self, width: int) -> list[int]:
        """Rows of a program of that width, whichever."""
        return self._filled([[]] * self._parts, width)

    def decode(self, draft: Draft, max_steps: int, leave_below: int, slots: Sequence[int]) -> Committed:
        """One visit to the device (see `decoding.step.run`): the tokens of each step, not waited for.

        Args:
            slots: of the rows to advance, see `some`.
        """
        program, arguments = self._decode_call(draft, max_steps, leave_below, slots)
        with self._on_mesh():
            self.state, trace = program(*arguments)
        return trace

    def release(self, slot: int) -> None:
        """Makes a row idle."""
        with self._on_mesh():
            self.state = release(self.state, np.int32(slot))

    def move(self, slot: int, to: int, settings: RowSettings) -> None:
        """Continues a short row that stopped in an idle long one, under these settings."""
        assert self._short is not None
        with self._on_mesh():
            where = np.int32(slot), np.int32(to)
            self.state = move(self.state, *where, settings, count=self._short.slots)

    def wait(self) -> None:
        """Waits for the device: `read` returns before it has."""
        jax.block_until_ready(self.state.anchor)

    def step_seconds(self, look: Callable[[], object] = lambda: None) -> dict[tuple[Draft, int], float]:
        """Times a step of each kind of draft and number of rows, all of them busy with random tokens and half full:
        tokens that are alike would visit fewer experts than a real block does. `look` is as in `warm_up`."""
        with self._calibration_kept():
            return self._timed_steps(look)

    def _timed_steps(self, look: Callable[[], object]) -> dict[tuple[Draft, int], float]:
        rng, short = np.random.default_rng(0), self._shapes[0]
        endless = SamplingParams().on_device("", 0, 0, np.iinfo(np.int32).max)
        times: dict[tuple[Draft, int], list[float]] = {how: [] for how in self._decoding}
        for _ in range(3):
            for draft, width in times:
                look()
                slots = self.idle(width)
                for slot in slots:
                    length = max(1, self.lengths[slot] // 2)
                    prompt = rng.integers(0, self._target.config.vocab_size, min(short.tokens, length)).tolist()
                    self._place(slot, length - len(prompt))
                    part = slot * self._parts // self._slots
                    taken = [[(slot, prompt)] if p == part else [] for p in range(self._parts)]
                    selected = select(short, taken, self._slots // self._parts)
                    self._prefill(selected, selected.counts > 0, (endless,) * len(selected.rows))
                self.wait()
                begin = time.perf_counter()
                trace = jax.device_get(self.decode(draft, min(self._config.steps_per_visit, 4), 0, slots))
                times[draft, width].append((time.perf_counter() - begin) / int(np.sum(trace.count.any(axis=1))))
                for slot in slots:
                    self.release(slot)
        return {how: min(measured) for how, measured in times.items()}

    @contextlib.contextmanager
    def _calibration_kept(self) -> Iterator[None]:
        """What decodes here teaches the calibration of the drafter's scores nothing: random tokens are no text."""
        kept = jax.tree.map(jnp.copy, self.state.calibration)  # the programs consume the state's own arrays
        try:
            yield
        finally:
            self.state = self.state.replace(calibration=kept)

    def _place(self, slot: int, length: int) -> None:
        """Begins a row as if so many tokens were committed; what the caches hold there is of no interest."""
        self.begin(slot)
        with self._on_mesh():
            self.state = self.state.replace(lengths=pin(self.state.lengths.at[slot].set(length)))

    def _on_mesh(self) -> Any:
        return entered(self._target.mesh)

    def _nothing(self, shape: Shape) -> tuple[Selected, np.ndarray, tuple[RowSettings, ...]]:
        """What a program reads that reads nothing."""
        selected = select(shape, [[]] * self._parts, self._slots // self._parts)
        return selected, selected.counts > 0, (self._neutral,) * len(selected.rows)

    def _prefill_cost(self, shape: Shape) -> Cost:
        """Of a program for prompts, in seconds, by its times for empty rows and for such as are half full."""
        arguments, seconds = self._nothing(shape), []
        halves = {slot: max(1, self.lengths[slot] // 2) for slot in arguments[0].rows.tolist()}
        for full in (0, 1):
            times = []
            for _ in range(2):
                for slot, half in halves.items():
                    self._place(slot, full * half)
                self.wait()
                begin = time.perf_counter()
                self._prefill(*arguments)
                self.wait()
                times.append(time.perf_counter() - begin)
            seconds.append(min(times))
        return Cost(seconds[0], max(0.0, seconds[1] - seconds[0]) / max(halves.values()))

    def _prefill_arguments(self, selected: Selected, last: np.ndarray, settings: tuple[RowSettings, ...]) -> tuple:
        return self._target, self._drafter, self.state, *selected, last, settings, self._config.logprobs

    def _prefill(self, selected: Selected, last: np.ndarray, settings: tuple[RowSettings, ...]) -> Committed:
        with self._on_mesh():
            self.state, first = prefill(*self._prefill_arguments(selected, last, settings))
        return first

    def _decode_call(self, draft: Draft, max_steps: int, leave_below: int, slots: Sequence[int]) -> tuple[Any, tuple]:
        return decode_call(
            self._target,
            self._drafter,
            self.state,
            max_steps,
            leave_below,
            block_size=draft.block_size,
            nodes=draft.nodes,
            proposals=self._config.proposals,
            capacity=self._config.steps_per_visit,
            rows=None if len(slots) == self._slots else np.asarray(slots, np.int32),
            logprobs=self._config.logprobs,
            options=self.compiler_options(draft, len(slots)),
        )

    def compiler_options(self, draft: Draft, rows: int) -> Options | None:
        """Of the program with this draft; None for single tokens."""
        if self._drafter is None or draft.block_size == 0:
            return None
        config, block = self._target.config, (draft.nodes or self._drafter.depth(draft.block_size)) + 1
        inner = max(layer.intermediate_size for layer in config.layers)
        return fastest_options(config.hidden_size, inner, rows * block, clock=not self._fixed)
