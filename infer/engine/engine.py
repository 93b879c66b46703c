"""Slots, admission and the host side of decoding.

A fixed batch of slots decodes on the device for several steps per visit; whenever a row finishes, the next request
takes its slot, and its prompt is read in chunks between the visits. What a request gets back does not depend on
its neighbours.
"""

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash_jax.decoding.state import DraftModel
from dflash_jax.decoding.step import Committed, sizes_within
from dflash_jax.infer.engine.chooser import Chooser, Draft, Estimates, Seen, block_sizes, tree_sizes
from dflash_jax.infer.engine.engine_config import EngineConfig, check_block_size
from dflash_jax.infer.engine.requests import Completion, Request, RequestError
from dflash_jax.infer.engine.rows import ActiveRequest
from dflash_jax.infer.engine.slots import Slots
from dflash_jax.infer.engine.stats import Stats
from dflash_jax.kernels.block_attention.reference import CHUNK
from dflash_jax.mesh import rows_of
from dflash_jax.target import Target


class Visit(NamedTuple):
    """Steps that the device was asked for.

    Attributes:
        draft: what its steps propose.
        trace: tokens of each step; on the device, until it is looked at.
        rows: slot and request of each of its rows.
        begin: when it was asked for.
        chooser: who chose the draft; None if there was no choice.
        end: when the device was done, if somebody waited for that.
    """

    draft: Draft
    trace: Committed
    rows: list[tuple[int, ActiveRequest | None]]
    begin: float
    chooser: Chooser[Draft] | None
    end: float | None = None


PLAIN = Draft(0)  # a step without speculation
LANES = 16  # float32 numbers in the widest vector of a processor
STALL = 4.0  # visits, for which rows wait at most while prompts are read; less where few slots fill


class Engine:
    """Generates for a stream of requests with one target, speculatively if there is a drafter.

    Args:
        target: the model that generates.
        drafter: its drafter; None decodes autoregressively.
        config: see `EngineConfig`.
        settings: fields of `EngineConfig` by name, which win over `config`.

    Raises:
        ValueError: a drafter of another target, or a setting out of range.
    """

    def __init__(
        self, target: Target, drafter: DraftModel | None = None, config: EngineConfig | None = None, **settings: Any
    ):
        config = replace(config or EngineConfig(), **settings)
        most = target.config.vocab_size
        if config.logprobs is not None and not 0 <= config.logprobs <= most:
            raise ValueError(f"logprobs must lie in 0..{most} or be None, got {config.logprobs}")
        if config.slots % (parts := rows_of(target.mesh)):
            raise ValueError(f"slots must be a multiple of {parts}, the mesh's parts of rows; got {config.slots}")
        if config.short_length is not None and config.long_slots % parts:
            raise ValueError(
                f"long_slots must be a multiple of {parts}, the mesh's parts of rows; got {config.long_slots}"
            )
        auto = config.block_size == "auto"
        self.block_size = 1
        if drafter is not None:
            drafter.config.check_pair(target.config)
            self.block_size = check_block_size(drafter, None if config.block_size == "auto" else config.block_size)
            if drafter.depth(self.block_size) == 0:
                drafter = None
        self.target, self.drafter, self.config = target, drafter, config
        self.max_length, self.slots = config.max_length, config.slots
        self.choosers: dict[int, Chooser[Draft]] = {}  # by rows of a program; none without a choice
        self._auto = auto and drafter is not None and not config.deterministic
        self.tree = self._tree_nodes() if drafter else 0
        self.stats = Stats()
        drafts = [self._program(draft) for draft in self._choices()]
        if config.plain and self.drafter and PLAIN not in drafts:
            drafts.append(PLAIN)
        self.batch = Slots(
            target,
            drafter,
            config,
            self._rows_on_device(),
            # A cache of a single chunk would be another program than a longer one, and might round differently.
            max(config.max_length, 2 * CHUNK) if config.deterministic else config.max_length,
            drafts,
        )
        self._tickets = itertools.count()
        self._waiting: deque[ActiveRequest] = deque()
        self._rows: list[ActiveRequest | None] = [None] * config.slots
        self._shortest_first = True
        self._turn = 1.0  # share that is left of the time in which prompts are read before rows decode again
        self._ahead: Visit | None = None  # asked for while the one before it was under way
        self._looked = 0.0  # when tokens last came from the device
        self._step_seconds = 0.0  # of the last visit

    def _rows_on_device(self) -> int:
        """The slots, and on CPU with `deterministic` some more that stay idle: there the last few of a block's
        positions may be computed by other instructions than the rest, if they do not fill the processor's vectors."""
        slots, width = self.config.slots, max(self.width, self.tree + 1)
        if not self.config.deterministic or slots == 1 or jax.default_backend() != "cpu":
            return slots
        step = math.lcm(LANES // math.gcd(LANES, width), rows_of(self.target.mesh))
        return -(-slots // step) * step

    def _tree_nodes(self) -> int:
        """Nodes of the tree to use; 0 where there is none, or where there is a choice."""
        given = self.config.tree
        return given if isinstance(given, int) and not self._auto else 0

    def _choices(self) -> tuple[Draft, ...]:
        if not self._auto:
            return (Draft(self.block_size, self.tree),)
        assert self.drafter is not None
        chains = tuple(map(Draft, block_sizes(self.block_size)))
        given, depth = self.config.tree, self.drafter.depth(self.block_size)
        if isinstance(given, int):
            sizes = (given,) if given else ()
        else:
            sizes = tree_sizes(depth, wide=jax.default_backend() != "cpu")
        return (*chains, *(Draft(self.block_size, nodes) for nodes in sizes))

    def _program(self, draft: Draft) -> Draft:
        """What `Slots.decode` is asked for: a block size of 1 is no speculation where there is a choice."""
        return PLAIN if self._auto and draft == Draft(1) else draft

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """Requests in a slot."""
        return sum(row is not None for row in self._rows)

    @property
    def width(self) -> int:
        """Most tokens a step can commit per row."""
        if not self.drafter:
            return 1
        depth = self.drafter.depth(self.block_size)
        return 1 + (min(depth, self.tree) if self.tree else depth)

    @property
    def steps_by_block_size(self) -> dict[str, int]:
        """Steps taken at each block size, and with each tree; 1 is no speculation."""
        used = [chooser.used for chooser in self.choosers.values()] or [
            {Draft(self.block_size, self.tree): self.stats.steps}
        ]
        return {draft.label: sum(one[draft] for one in used) for draft in used[0]}

    def warm_up(self, look: Callable[[], object] = lambda: None) -> None:
        """Compiles every program this engine will run; afterwards none is compiled any more.

        Args:
            look: called between programs; what it raises ends the work.

        Raises:
            ValueError: requests are in its slots.
        """
        if self.busy:
            raise ValueError(f"warm_up runs every program on idle slots, but {self.busy} are busy; call it first")
        begin = time.perf_counter()
        self.batch.warm_up(look)
        if self._auto:
            assert self.drafter is not None
            measured, depth = self.batch.step_seconds(look), self.drafter.depth
            proposed = lambda draft: depth(draft.block_size) if self._program(draft).block_size else 0
            estimates = Estimates(max(map(proposed, self._choices())))
            for width in self.batch.widths:
                seconds = {draft: measured[self._program(draft), width] for draft in self._choices()}
                self.choosers[width] = Chooser(seconds, proposed, estimates, lambda draft: draft.nodes)
        self.stats.compile_seconds += time.perf_counter() - begin

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Completions in the order of the requests; raises RequestError for one that cannot be served."""
        requests = list(requests)
        with contextlib.closing(self.stream(requests)) as completions:
            done = {index: completion for index, completion in completions if completion.finish_reason}
        return [done[index] for index in range(len(requests))]

    def stream(self, requests: Iterable[Request]) -> Generator[tuple[int, Completion], None, None]:
        """Yields (index of the request, its completion so far) whenever tokens arrived.

        The completion object of a request is the same each time; it is final once it has a finish
        reason. All requests are checked before the first starts.
        """
        requests = list(requests)
        for request in requests:
            self.check(request)
        index = {self.submit(request): i for i, request in enumerate(requests)}
        left = set(index)
        try:
            while left:
                for ticket, completion in self.step():
                    if ticket in index:  # others may have been submitted besides
                        left -= {ticket} if completion.finish_reason else set()
                        yield index[ticket], completion
        finally:  # a consumer that stops early
            self.cancel(*left)

    def submit(self, request: Request) -> int:
        """Queues a request for `step` and returns its ticket; raises RequestError if it cannot be served."""
        self.check(request)
        if self._auto and not self.choosers:
            self.warm_up()
        ticket = next(self._tickets)
        prompt = request.prompt_token_ids
        completion = Completion(prompt_tokens=len(prompt), sample=request.sample, submitted=time.perf_counter())
        budget = min(request.params.max_new_tokens, self.max_length - len(prompt))
        self._waiting.append(ActiveRequest(ticket, request, completion, budget, self.batch.keys(prompt)))
        return ticket

    def step(self, *, admit: bool = True) -> list[tuple[int, Completion]]:
        """One piece of work: prompts are read, or rows decode for some steps; in turns, if there are both, so that
        neither waits long.

        Args:
            admit: whether waiting requests may take free slots; without it the busy ones are finished.

        Returns:
            (ticket, completion so far) of the requests that got tokens; see `stream`.
        """
        self._place(admit)
        filling = [slot for slot, row in enumerate(self._rows) if row and row.left]
        decoding = any(row and row.decoding for row in self._rows)
        if not decoding:
            self._ahead = None  # its rows have all finished
        if filling and (not decoding or (not self._ahead and self._turn > 0)):
            events = self._read(filling)
        elif decoding:
            self._turn = 1.0
            events = self._advance(bool(filling), admit and bool(self._waiting))
        else:
            return []
        now = time.perf_counter()
        for row in events:
            row.completion.first_token = row.completion.first_token or now
            if row.completion.finish_reason:
                row.completion.finished = now
                self._rows[self._rows.index(row)] = None
        return [(row.ticket, row.completion) for row in events]

    def _place(self, admit: bool) -> None:
        """Gives free slots to rows that have outgrown theirs, and to waiting requests if they may have them."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        if not free:
            return
        long = deque(slot for slot in free if self.batch.lengths[slot] >= self.max_length)
        short = deque(slot for slot in free if self.batch.lengths[slot] < self.max_length)
        outgrown = [(row.ticket, slot, row) for slot, row in enumerate(self._rows) if row and row.outgrown]
        for _, slot, row in sorted(outgrown)[: len(long)]:
            to, request = long.popleft(), row.request
            left = request.params.on_device(request.id, request.sample, self.config.seed, row.budget - row.room)
            self.batch.move(slot, to, left)
            self._rows[slot], self._rows[to], row.room = None, row, row.budget
        for_long, passed = any(row and row.outgrown for row in self._rows), list[ActiveRequest]()
        while admit and self._waiting and (short or long):
            row = self._waiting.popleft()
            fits = self.config.short_length is not None and row.begins_in(self.config.short_length)
            if fits and short:
                self._begin(row, short.popleft())
            elif long and not (fits and for_long):
                self._begin(row, long.popleft())
            else:
                passed.append(row)
                for_long |= not fits
        self._waiting.extendleft(reversed(passed))

    def _begin(self, row: ActiveRequest, slot: int) -> None:
        self._rows[slot] = row
        row.completion.started = time.perf_counter()
        request, length = row.request, self.batch.lengths[slot]
        row.room = min(row.budget, length - len(request.prompt_token_ids))
        row.settings = request.params.on_device(request.id, request.sample, self.config.seed, row.room)
        self.batch.begin(slot)

    def wait(self) -> None:
        """Waits for the device: `step` may return while it still works."""
        self.batch.wait()
        if self._ahead and self._ahead.end is None:
            self._ahead = self._ahead._replace(end=time.perf_counter())

    def cancel(self, *tickets: int) -> None:
        """Drops requests, waiting or in a slot; nothing happens for one that is finished or unknown."""
        gone = set(tickets)
        self._waiting = deque(row for row in self._waiting if row.ticket not in gone)
        for slot, row in enumerate(self._rows):
            if row and row.ticket in gone:
                self._rows[slot] = None
                self.batch.release(slot)

    def check(self, request: Request) -> None:
        """Raises RequestError if this engine cannot serve the request."""
        request.check(self.target.config.vocab_size, self.max_length)
        if not request.speculative and self.drafter and not self.config.plain:
            raise RequestError(
                "invalid_parameter", "steps without speculation are not served: the engine was made with plain=False"
            )
        served, asked = self.config.logprobs, request.params.logprobs
        if asked is not None and asked not in range(0 if served is None else served + 1):
            raise RequestError(
                "invalid_parameter", f"logprobs {asked} is not served: the engine was made with logprobs={served}"
            )

    def _read(self, slots: Sequence[int]) -> list[ActiveRequest]:
        """Reads some of the prompts of these slots, until one ends; returns the rows that got a first token.

        Rows that decode wait for `STALL` visits, where all slots fill, and in proportion where few do; or for as many
        programs as there are prompts where their times are not known.
        """
        begin, filling = time.perf_counter(), {slot: row for slot in slots if (row := self._rows[slot])}
        visit_seconds, events = self.config.steps_per_visit * self._step_seconds, []
        while filling and not events:
            # The oldest and the shortest take turns: neither waits long for a lot of others.
            self._shortest_first = not self._shortest_first
            key = (lambda row: row.left) if self._shortest_first else (lambda row: row.ticket)
            in_order = sorted(filling.items(), key=lambda item: (key(item[1]), item[1].ticket))
            reads, first, seconds = self.batch.read([row.unread(slot) for slot, row in in_order])
            self.stats.prompt_programs += 1
            programs = len(slots) * (1.0 if seconds is None else STALL * visit_seconds / self.slots / seconds)
            self._turn -= 1 / programs if programs else 1.0
            for read in reads:
                row = filling[read.slot]
                self.stats.prefix_tokens += read.copied
                row.completion.cached_tokens += read.copied
                self.stats.prompt_tokens += read.filled - row.filled
                row.filled = read.filled
            for read in (one for one in reads if not filling[one.slot].left):
                row = filling.pop(read.slot)
                row.extend(jax.device_get(first), (read.place, slice(1)))
                if row.completion.finish_reason:
                    self.batch.release(read.slot)
                events.append(row)
            if self._turn <= 0:
                break
        self.stats.prefill_seconds += time.perf_counter() - begin
        return events

    def _advance(self, filling: bool, waiting: bool) -> list[ActiveRequest]:
        """One visit to the device; returns the rows that got tokens.

        Where the next visit depends on none of them, it begins before they are looked at.
        """
        rows = [row for row in self._rows if row and row.decoding]
        leave = len(rows) if filling or waiting or any(row.room < row.budget for row in rows) else 0
        visit, self._ahead = self._ahead, None
        twice = not filling and self._go_on(rows)
        # Two visits under way hold up a new request hardly longer than one does, if they are half as long: so where one
        # may come, or a slot may become free without the device knowing.
        soon = self.busy < self.slots or any(row.request.find_stop for row in rows)
        most = self.config.steps_per_visit
        most = -(-most // 2) if twice and soon else most
        if visit is None:
            begin = time.perf_counter()
            self.wait()
            self.stats.prefill_seconds += time.perf_counter() - begin
            visit = self._visit(rows, leave, most)
        if twice and not (visit.chooser and visit.chooser.trying):
            self._ahead = self._visit(rows, leave, most)
        return self._look(visit)

    def _go_on(self, rows: Sequence[ActiveRequest]) -> bool:
        """Whether rows whose ends the device finds by itself will need more visits than one. Further steps of rows that
        end on the host, at a stop string, are for nothing."""
        left = (row.room - len(row.completion.token_ids) for row in rows if not row.request.find_stop)
        return max(left, default=0) > self.config.steps_per_visit

    def _visit(self, rows: Sequence[ActiveRequest], leave_below: int, most: int) -> Visit:
        """Asks the device for at most so many steps."""
        draft = Draft(self.block_size, self.tree)
        slots = self.batch.some([slot for slot, row in enumerate(self._rows) if row in rows])
        chooser = self.choosers.get(len(slots))
        if self.drafter and not all(row.request.speculative for row in rows):
            draft, chooser = PLAIN, None
        if chooser:
            draft = chooser.choose(row.ticket for row in rows)
            most = min(chooser.try_steps, most) if chooser.trying else most
        begin = time.perf_counter()
        trace = self.batch.decode(self._program(draft), most, leave_below, slots)
        end = time.perf_counter() if _is_ready(trace) else None  # small programs on CPU may run at once
        of_slot = dict(enumerate(self._rows))
        return Visit(draft, trace, [(slot, of_slot.get(slot)) for slot in slots], begin, chooser, end)

    def _proposed(self, draft: Draft) -> int:
        """Tokens that a step with this draft proposes for a row."""
        drafter, block_size = self.drafter, self._program(draft).block_size
        return draft.nodes or (drafter.depth(block_size) if drafter and block_size else 0)

    def _look(self, visit: Visit) -> list[ActiveRequest]:
        """Waits for a visit and hands its tokens to the rows, which are returned."""
        timed = visit.end is not None or not _is_ready(visit.trace)  # or it has been done for who knows how long
        trace = jax.device_get(visit.trace)
        now = visit.end or time.perf_counter()
        seconds, self._looked = now - max(visit.begin, self._looked), now
        counts = trace.count
        steps = int(np.sum(counts.any(axis=1)))
        seconds = seconds if timed else min(seconds, steps * self._step_seconds)
        self._step_seconds = seconds / max(steps, 1)
        self.stats.decode_seconds += seconds
        self.stats.steps += steps
        committed = np.arange(trace.tokens.shape[2]) < counts[:, :, None]
        advanced, seen = [], {}
        for at, (slot, row) in enumerate(visit.rows):
            if row is None or row is not self._rows[slot] or not row.decoding:
                continue
            advanced.append(row)
            step, place = np.nonzero(committed[:, at])
            if not step.size:
                continue
            kept = row.extend(trace, (step, at, place))
            taken = np.bincount(step[:kept])  # of each step; the device runs on past a stop string
            taken = taken[taken > 0].tolist()
            self.stats.decode_tokens += kept
            self.stats.row_steps += len(taken)
            if self.drafter:
                row.completion.acceptance_lengths.extend(taken)
                row.completion.proposed_tokens += len(taken) * self._proposed(visit.draft)
            chain = None if trace.forecast is None else trace.forecast.chain[:, at].tolist()
            # What cut a row's last step was its end or that of its slot, not a wrong proposal.
            whole = slice(-1 if row.completion.finish_reason or row.outgrown else None)
            seen[row.ticket] = Seen(taken[whole], chain and chain[: len(taken)][whole])
            if row.completion.finish_reason and row.request.find_stop:
                self.batch.release(slot)
        if visit.chooser:
            visit.chooser.observe(visit.draft, steps, seconds if timed else None, seen, _expected(trace, visit.draft))
        return advanced


def _expected(trace: Committed, draft: Draft) -> dict[int, float]:
    """What the best nodes of a tree promised in a step of a row, by their number."""
    if trace.forecast is None:
        return {}
    busy = trace.count > 0
    sums = np.sum(trace.forecast.nodes[busy], axis=0) / max(1, np.sum(busy))
    return dict(zip(sizes_within(draft.nodes), sums.tolist(), strict=True))


def _is_ready(trace: Committed) -> bool:
    return trace.count.is_ready()  # pyright: ignore[reportAttributeAccessIssue] (which its stub lacks)
