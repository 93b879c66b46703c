"""The slots of an engine on the device: their state, and the compiled programs that change it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from dflash_jax.cache import Pages, Windowed, with_pages
from dflash_jax.decoding.state import DraftModel, RowSettings, State, init_state
from dflash_jax.decoding.step import Committed
from dflash_jax.drafters.around import Kept
from dflash_jax.infer.engine.calls import Beside, Calls, Decode, Name
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.compiling import Progress, compile_all
from dflash_jax.infer.engine.constraints import Constraints
from dflash_jax.infer.engine.drafts import Drafts
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.pages import PageTable
from dflash_jax.infer.engine.params import STOP_WIDTH
from dflash_jax.infer.engine.prefixes import PrefixCache
from dflash_jax.infer.engine.programs import begin, release
from dflash_jax.infer.engine.prompts import PrefillBatch, PrefillShape
from dflash_jax.infer.engine.reads import ReadPlan, plan_reads, plan_steps
from dflash_jax.infer.engine.rows import ActiveRequest
from dflash_jax.infer.engine.widths import filled
from dflash_jax.kernels import dispatch, verify
from dflash_jax.kernels.block_attention.reference import CHUNK
from dflash_jax.mesh import entered, rows_of
from dflash_jax.sharding import pin
from dflash_jax.target import Target

LANES = 16  # float32 numbers in the widest vector of a processor


class Slots:
    """Rows that decode together. Which requests they belong to is the engine's business.

    Args:
        drafts: what `decode` may be asked for.
        constraints: those that rows may have; None is none.

    Attributes:
        state: consumed and replaced by every call.
        count: rows.
        max_length: tokens that a row can hold.
        pages: of rows that share memory; None where each has its own.
        prefixes: what is kept of prompts for those that begin alike.
        used: the programs that may be used.
        beside: whether it pays to read prompts beside rows that decode.
        calls: the large programs.
    """

    def __init__(self, target: Target, config: EngineConfig, drafts: Drafts, constraints: Constraints | None = None):
        self.config, self.drafts = config, drafts
        self._fixed = config.deterministic
        self.count = slots = self._rows_on_device(rows_of(target.mesh))
        self.calls = Calls(target, config, drafts, slots, constraints)
        # A cache of a single chunk would be another program than a longer one, and might round differently.
        self.max_length = max(config.max_length, 2 * CHUNK) if self._fixed else config.max_length
        chunk = config.prefill_chunk
        room: int | Pages | Windowed = self.max_length
        self.pages = None
        if config.cache_tokens is not None:
            room = Pages.room(config.cache_tokens, self.max_length, self.calls.parts)
            self.pages = PageTable(room, slots, self.calls.parts)
        if config.draft_window is not None:
            room = Windowed(room, config.draft_window)
        self.beside = self.calls.beside is not None and config.prefill_budget != "auto"
        self.used, self._warm = self.calls.names, False
        state = partial(init_state, target, drafts.drafter, slots, room, STOP_WIDTH, chunk)
        make = jax.jit(lambda: pin(state(constraints=constraints is not None)))
        with self._on_mesh():
            if dispatch.checks():  # while there is memory
                self.state = jax.eval_shape(make)
                self._check_kernels()
            made = make()
            if self._fixed and made.calibration is not None:
                made = made.replace(calibration=made.calibration.replace(frozen=True))
            if target.mesh is None:  # what programs from disk return is bound to its device, and so are weights
                made = jax.device_put(made, made.anchor.sharding)
            self._calibration = jax.device_get(made.calibration)
            self.state = jax.block_until_ready(made)  # if there is no memory, say so here
            self._layout = jax.tree.map(lambda x: x.sharding, made)
            self.prefixes = PrefixCache(self.state, config.prefix_chunks, chunk, self.pages)

    def _rows_on_device(self, parts: int) -> int:
        """The slots, and on CPU with `deterministic` some more that stay idle: there the last few of a block's
        positions may be computed by other instructions than the rest, if they do not fill the processor's vectors."""
        slots = self.config.slots
        if not self._fixed or slots == 1 or jax.default_backend() != "cpu":
            return slots
        step = math.lcm(LANES // math.gcd(LANES, *map(self.drafts.positions, self.drafts.programs)), parts)
        return -(-slots // step) * step

    @property
    def widths(self) -> tuple[int, ...]:
        """How many rows `decode` may be asked to advance."""
        return tuple(sorted({width for _, width in self._decoding}))

    def programs(self, names: Sequence[Name]) -> int:
        """How many programs `warm_up` compiles: these, and small ones for a row's beginning and end, and kept
        prefixes."""
        return len(names) + 2 + self.prefixes.programs

    def keys(self, prompt: Sequence[int]) -> list[bytes]:
        """Keys of the prompt's chunks, for `read`."""
        return self.prefixes.index.keys(prompt)

    def compile(
        self,
        names: Sequence[Name],
        check_interrupt: Callable[[], object] = lambda: None,
        progress: Progress = lambda done: None,
        *,
        at_once: int | None = None,
    ) -> None:
        """Compiles these programs, so many at a time. Another thread may use others meanwhile."""
        with self._on_mesh():
            compile_all((self.calls.work(name, self._shapes) for name in names), check_interrupt, progress, at_once)

    def _shapes(self) -> State:
        """What programs are compiled for. Nothing is read from the device or changed, whatever another thread does."""
        if self.calls.target.mesh is None:
            return self.state
        weak = lambda x: getattr(x, "weak_type", False)  # random keys have none
        shape = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where, weak_type=weak(x))
        return jax.tree.map(shape, self.state, self._layout)

    def _check_kernels(self) -> None:
        """Checks the kernels of the first programs, before there are caches."""
        missing = [name for name in self.calls.first if not self.calls.is_on_disk(name, self.state)]
        calls = [self.calls.empty(name, self.state) for name in missing]
        verify.side_by_side(partial(call.program.trace, *call.arguments) for call in calls)

    def warm_up(
        self,
        names: Sequence[Name],
        check_interrupt: Callable[[], object] = lambda: None,
        progress: Progress = lambda done: None,
    ) -> dict[Name, float]:
        """Compiles these programs and the small ones, and runs each once; from now on these are used. All rows must be
        idle. Returns the seconds of these runs."""
        self.compile(names, check_interrupt, progress)
        self.begin(0)
        if not self._warm:
            self._change(self.prefixes.warm_up)
            if self.config.keep_features:
                self.features(0, 0)
            self._warm = True
        seconds = {}
        for name in names:
            check_interrupt()
            self.wait()
            since = time.perf_counter()
            if isinstance(name, PrefillShape):
                self.prefill(*self.calls.nothing(name))
            else:
                self.decode(name.draft, 0, 0, self.idle(name.rows), Beside([], {}) if name.reads else None)
            self.wait()
            seconds[name] = time.perf_counter() - since
        self.release(0)
        jax.block_until_ready(self.state)
        self.used = list(names)
        return seconds

    def begin(self, slot: int, prompt: Sequence[int] = ()) -> int:
        """Makes a row ready for a prompt; returns how many of its tokens are there already (see `admit`)."""
        self._change(begin, np.int32(slot), np.int32(0))
        copied = 0
        for kept in self.prefixes.found.pop(slot, []):
            self._change(self.prefixes.copy, kept, prompt)
            copied = kept.end
        return copied

    def read(self, prompts: Mapping[int, ActiveRequest]) -> tuple[ReadPlan, Committed]:
        """Commits the next tokens of some of these prompts (see `reads.plan_reads`); after its last one a row decodes.

        Returns:
            What was read, and the first new tokens [B, 1] of the rows whose prompt ended.
        """
        plan = plan_reads(prompts, self.calls.prefills, self.prefixes.index)
        for kept in plan.copies:
            self._change(self.prefixes.copy, kept, prompts[kept.row].prompt)
        rows = zip(plan.batch.rows.tolist(), plan.batch.counts.tolist(), strict=True)
        settings = tuple(prompts[row].settings if count else self.calls.neutral for row, count in rows)
        first = self.prefill(plan.batch, settings)
        self.keep(plan, prompts)
        return plan, first

    def keep(self, plan: ReadPlan, prompts: Mapping[int, ActiveRequest]) -> None:
        """Keeps chunks that these prompts have completed, for those that begin alike."""
        with self._on_mesh():
            for slot, end, _, place, awaited in plan.reads:
                if place is not None and slot in prompts:
                    kept = self.prefixes.index.keep(slot, end, prompts[slot].keys, awaited=awaited)
                    self.prefixes.keep(self._current(), kept)

    @property
    def reads_beside(self) -> bool:
        """Whether `decode` may be given prompts."""
        return self.beside and self._reads

    @property
    def _reads(self) -> bool:
        return any(isinstance(name, Decode) and name.reads for name in self.used)

    @property
    def to_measure(self) -> bool:
        """Whether `timing.step_seconds` finds out if it pays to read prompts beside rows that decode."""
        return self._reads and self.config.prefill_budget == "auto"

    def copy(self, prompts: Mapping[int, ActiveRequest]) -> dict[int, int]:
        """Copies what is kept of other prompts to these; returns how many tokens, by slot."""
        found = {slot: self.prefixes.index.find(slot, p.filled, p.prompt, p.keys) for slot, p in prompts.items()}
        for kept in (one for of_row in found.values() for one in of_row):
            self._change(self.prefixes.copy, kept, prompts[kept.row].prompt)
        return {slot: len(of_row) * self.config.prefill_chunk for slot, of_row in found.items()}

    def plan(self, prompts: Mapping[int, ActiveRequest], steps: int) -> list[ReadPlan]:
        """What each of so many steps of `decode` may read of these prompts (see `reads.plan_steps`)."""
        assert self.calls.beside is not None
        return plan_steps(prompts, self.calls.prefills, self.calls.beside, steps, at_ends=self.prefixes.at_ends)

    @property
    def _decoding(self) -> list[tuple[Draft, int]]:
        """Draft and rows of each program that only decodes, of those that are used."""
        return [name[:2] for name in self.used if isinstance(name, Decode) and not name.reads]

    def some(self, busy: Sequence[int]) -> list[int]:
        """The rows of the narrowest program that advances these, as many of each part of the mesh."""
        of_part = self.count // self.calls.parts
        busy_of = [[slot for slot in busy if slot // of_part == part] for part in range(self.calls.parts)]
        most = max(map(len, busy_of)) * self.calls.parts
        return filled(self.count, busy_of, next(width for width in self.widths if width >= most))

    def idle(self, width: int) -> list[int]:
        """Rows of a program of that width, whichever."""
        return self.calls.idle(width)

    def decode(
        self, draft: Draft, max_steps: int, leave_below: int, slots: Sequence[int], beside: Beside | None = None
    ) -> Committed:
        """One visit to the device (see `decoding.step.run`) that advances these rows (see `some`): the tokens of each
        step, not waited for.

        Args:
            beside: what its steps read of prompts; all rows are advanced then.
        """
        call = self.calls.decode(self._current(), draft, max_steps, leave_below, slots, beside)
        program, arguments = self.calls.asked(Decode(draft, len(slots), beside is not None), call)
        with self._on_mesh():
            self.state, trace = program(*arguments)
        return trace

    def release(self, slot: int) -> None:
        self._change(release, np.int32(slot))

    def features(self, slot: int, count: int) -> np.ndarray:
        """Those that were kept of the first positions of a row."""
        assert isinstance(self.state.draft, Kept)
        return np.asarray(_row(self.state.draft.features, np.int32(slot)))[:count].copy()

    def drop(self, slot: int) -> None:
        """Gives back the memory of a row."""
        if self.pages is not None:
            self.pages.drop(slot)
            self.prefixes.found.pop(slot, None)

    def renew(self, target: Target, drafter: DraftModel | None) -> None:
        """Goes on with other models, like those so far: what was kept of prompts, and learned of proposals, is
        forgotten. All rows must be idle."""
        self.calls.target, self.drafts.drafter = target, drafter
        self.prefixes.forget()
        old = self.state.calibration
        where = jax.tree.map(lambda x: x.sharding, old)
        self.state = self.state.replace(calibration=jax.device_put(self._calibration, where))
        self.drafts.forget()

    def _current(self) -> State:
        """The state with the table of pages as it is now. On a mesh a program may give the layout of an array another
        name, for which jax would compile the next program again."""
        if self.calls.target.mesh is not None:
            named = lambda x, where: x if x.sharding == where else jax.device_put(x, where)
            self.state = jax.tree.map(named, self.state, self._layout)
        if self.pages is not None and self.pages.changed:
            table = partial(jax.device_put, self.pages.on_device(), self.state.anchor.sharding)
            caches = (self.state.target_cache, self.state.draft)
            target_cache, draft = (with_pages(carried, table) for carried in caches)
            self.state, self.pages.changed = self.state.replace(target_cache=target_cache, draft=draft), False
        return self.state

    def wait(self) -> None:
        """Waits for the device: `read` returns before it has."""
        jax.block_until_ready(self.state.anchor)

    def place(self, slot: int, length: int) -> None:
        """Begins a row as if so many tokens were committed; what the caches hold there is of no interest."""
        self._change(begin, np.int32(slot), np.int32(length))

    def _change(self, program: Callable[..., State], *arguments: Any, **given: Any) -> None:
        with self._on_mesh():
            self.state = program(self._current(), *arguments, **given)

    def _on_mesh(self) -> Any:
        return entered(self.calls.target.mesh)

    def prefill(self, selected: PrefillBatch, settings: tuple[RowSettings, ...]) -> Committed:
        """Runs the program of this batch; not waited for."""
        call = self.calls.prefill(self._current(), selected, settings)
        program, arguments = self.calls.asked(self.calls.prefills.shape(selected), call)
        with self._on_mesh():
            self.state, first = program(*arguments)
        return first


@jax.jit
def _row(x: Float[Array, "R S FD"], row: Int[Array, ""]) -> Float[Array, "S FD"]:
    return jax.lax.dynamic_index_in_dim(x, row, keepdims=False)
