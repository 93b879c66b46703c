"""Requests in, completions out: the host side of decoding.

A fixed batch of slots decodes on the device for several steps per visit; whenever a row finishes, the next request
takes its slot, and its prompt is read in chunks between the visits. What a request gets back does not depend on
its neighbors.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any, Literal

from jaxtyping import PyTree

from dflash_jax.checkpoint.memory import Named
from dflash_jax.decoding.state import DraftModel
from dflash_jax.drafters.around import Keeping
from dflash_jax.drafters.function import check_protocol
from dflash_jax.infer.engine import timing
from dflash_jax.infer.engine.admission import Admission
from dflash_jax.infer.engine.compiling import Progress
from dflash_jax.infer.engine.constraints import Constraints, Ready
from dflash_jax.infer.engine.decoding import Decoding
from dflash_jax.infer.engine.drafts import Drafts
from dflash_jax.infer.engine.engine_config import EngineConfig
from dflash_jax.infer.engine.memory import Memory
from dflash_jax.infer.engine.pacing import Pacing
from dflash_jax.infer.engine.reading import Reading
from dflash_jax.infer.engine.requests import Completion, Request, invalid
from dflash_jax.infer.engine.rows import ActiveRequest
from dflash_jax.infer.engine.slots import Slots
from dflash_jax.infer.engine.stats import Stats
from dflash_jax.infer.engine.weights import Weights
from dflash_jax.mesh import rows_of
from dflash_jax.target import Target


class Engine:
    """Generates for a stream of requests with one target, speculatively if there is a drafter.

    The loop's invariant: between two calls of `step` at most one visit is in flight; its rows are the requests that had
    the slots when it began, and what it brings for one that has left its slot since is dropped.

    Args:
        drafter: of the target; None decodes autoregressively.
        settings: fields of `EngineConfig` by name, which win over `config`.

    Raises:
        ValueError: a drafter of another target, or a setting out of range.
    """

    def __init__(
        self, target: Target, drafter: DraftModel | None = None, config: EngineConfig | None = None, **settings: Any
    ):
        config = replace(config or EngineConfig(), **settings)
        config.check(target.config.vocab_size, rows_of(target.mesh))
        if drafter is not None:
            check_protocol(drafter)
            drafter.config.check_pair(target.config)
        if config.keep_features:
            if drafter is None or not drafter.taps:
                raise ValueError("keep_features needs a drafter that reads features of its target")
            if config.block_size == 1 and drafter.depth(1) == 0:
                raise ValueError("keep_features needs a drafter that proposes something; block_size is 1")
            width = len(drafter.taps) * target.config.hidden_size
            drafter = Keeping(drafter, width=width, dtype=target.dtype)
        if config.cache_dtype is not None:
            target = target.replace(cache_dtype=config.cache_dtype)
        self.config = config
        self.max_length, self.slots = config.max_length, config.slots
        self.drafts = Drafts(drafter, config)
        self.block_size, self.tree = self.drafts.block_size, self.drafts.tree
        self.choosers = self.drafts.choosers
        self.stats = Stats()
        bare = target.replace(params={})  # weights may be others later
        self.constraints = Constraints(bare, config.constraint_states) if config.constraints else None
        self.batch = Slots(target, config, self.drafts, self.constraints)
        self.weights = Weights(self.batch)
        self._tickets = itertools.count()
        self._admission = Admission(config.slots)
        self._pacing = Pacing(config.slots, config.steps_per_visit)
        self._reading = Reading(self.batch, self._admission, self._pacing, self.stats)
        self._memory = Memory(self.batch, self._admission, self.stats, self.width)
        self._decoding = Decoding(
            self.batch,
            self.drafts,
            self._admission,
            self._pacing,
            self._memory,
            self._reading,
            self.stats,
            self._preempt,
        )
        self._no_room = False  # whether a constraint has found no room just now

    @property
    def target(self) -> Target:
        return self.batch.calls.target

    @property
    def drafter(self) -> DraftModel | None:
        drafter = self.batch.calls.drafter
        return drafter.drafter if isinstance(drafter, Keeping) else drafter

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._admission.waiting)

    @property
    def busy(self) -> int:
        """Requests in a slot."""
        return self._admission.busy

    @property
    def width(self) -> int:
        """Most tokens a step can commit per row."""
        return self.drafts.width

    @property
    def steps_by_block_size(self) -> dict[str, int]:
        """Steps taken at each block size, and with each tree; 1 is no speculation."""
        return self.drafts.used(self.stats.steps)

    def warm_up(
        self,
        check_interrupt: Callable[[], object] = lambda: None,
        progress: Progress = lambda done: None,
        *,
        first: bool = False,
    ) -> None:
        """Compiles every program this engine will run; afterwards none is compiled any more.

        Args:
            check_interrupt: called between programs; what it raises ends the work.
            progress: called with the number of programs that are compiled, of `programs(first)`.
            first: only those with which every request can be answered, and no others are used until this is called
                again. In between `compile_rest` may be called from another thread.

        Raises:
            ValueError: requests are in its slots.
        """
        if self.busy:
            raise ValueError(f"warm_up runs every program on idle slots, but {self.busy} are busy; call it first")
        begin, batch = time.perf_counter(), self.batch
        took = batch.warm_up(batch.calls.first if first else batch.calls.names, check_interrupt, progress)
        for shape, cost in timing.prefill_costs(batch, took, check_interrupt, brief=first):
            batch.calls.prefills.costs[shape] = cost
        if self.drafts.auto or batch.to_measure:
            seconds = timing.step_seconds(batch, check_interrupt, brief=first)
            if self.drafts.auto:
                self.drafts.measured(seconds)
        self.stats.compile_seconds += time.perf_counter() - begin

    def programs(self, *, first: bool = False) -> int:
        """How many programs `warm_up` compiles."""
        return self.batch.programs(self.batch.calls.first if first else self.batch.calls.names)

    @property
    def left(self) -> int:
        """Large programs that are not used yet, after a `warm_up` of the first ones."""
        return len(self.batch.calls.names) - len(self.batch.used)

    def compile_rest(self, check_interrupt: Callable[[], object] = lambda: None) -> None:
        """Compiles what is left, one program at a time, while another thread may use the engine."""
        left = [name for name in self.batch.calls.names if name not in self.batch.used]
        self.batch.compile(left, check_interrupt, at_once=1)

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
        constraint = self.check(request)
        if self.drafts.auto and not self.choosers:
            self.warm_up()
        ticket = next(self._tickets)
        prompt = request.prompt_token_ids
        completion = Completion(prompt_tokens=len(prompt), sample=request.sample, submitted=time.perf_counter())
        budget = min(request.params.max_new_tokens, self.max_length - len(prompt))
        row = ActiveRequest(ticket, request, completion, budget, self.batch.keys(prompt), constraint=constraint)
        self._admission.waiting.append(row)
        return ticket

    def step(self, *, admit: bool = True) -> list[tuple[int, Completion]]:
        """One piece of work: prompts are read, or rows decode for some steps; in turns, if there are both, so that
        neither waits long.

        Args:
            admit: whether waiting requests may take free slots; without it the busy ones are finished, but for those
                that have to give back memory that they share, or leave their slots for new weights.

        Returns:
            (ticket, completion so far) of the requests that got tokens; see `stream`.
        """
        renewed = not self.weights.waiting or self._renew()
        if admit:
            self._place(begun=not renewed)
        filling, decoding = self._admission.filling, self._admission.decoding
        if not decoding:
            self._decoding.ahead = None  # its rows have all finished
        ahead, beside = self._decoding.ahead is not None, self.batch.reads_beside
        if self._pacing.reads(filling, decoding, ahead=ahead, beside=beside):
            events = self._reading.alone(filling)
        elif decoding:
            waiting, free = admit and self.waiting > 0, self.busy < self.slots
            rows = decoding.values()
            how = self._pacing.next_visit(rows, filling=bool(filling), waiting=waiting, free=free)
            how = how._replace(overlap=how.overlap and not self.weights.now)
            events = self._decoding.advance(decoding, how)
        else:
            return []
        now = time.perf_counter()
        for row in events:
            row.completion.first_token = row.completion.first_token or now
            if row.completion.finish_reason:
                row.completion.finished, slot = now, self._admission.finish(row)
                if self.config.keep_features:
                    self._decoding.wait()  # for the visit in flight, whose state has the features, too
                    committed = len(row.request.prompt_token_ids) + len(row.completion.token_ids) - 1
                    row.completion.features = self.batch.features(slot, committed)
                self._ended(row, slot)
        if self.weights.waiting:
            self._renew()
        return [(row.ticket, row.completion) for row in events]

    def _place(self, *, begun: bool = False) -> None:
        """Begins waiting requests on the device, where there are slots for them; only those that have been in a slot
        before, if so asked."""
        self._no_room, self._memory.waits = False, None
        ready = lambda row, slot: (row.left_slots > 0 or not begun) and self._ready(row, slot)
        for row, slot in self._admission.place(ready, lambda: self._memory.waits is not None):
            row.settings = row.on_device(self.config.seed)
            row.completion.started = row.completion.started or time.perf_counter()
            row.completion.begin_part(self.weights.version)
            self._reading.copied(row, self.batch.begin(slot, row.prompt))

    def _ready(self, row: ActiveRequest, slot: int) -> bool:
        """Holds pages for a request and places its constraint; false if there is no room for one of them yet, nor for
        that of a request that came before it."""
        if not self._memory.admits(row, slot):
            return False
        if not self._constrained(row):
            self.batch.drop(slot)
            return False
        return True

    def _constrained(self, row: ActiveRequest) -> bool:
        if self.constraints is None:
            return True
        taken = row.constraint is not None and self._no_room
        read = row.completion.token_ids[: row.read]
        row.walk = None if taken else self.constraints.place(row.constraint, read)
        self._no_room |= row.walk is None
        return row.walk is not None

    def _ended(self, row: ActiveRequest, slot: int) -> None:
        """A request has left its slot."""
        self.batch.drop(slot)
        if self.constraints is not None:
            self.constraints.release(row.constraint)

    def _preempt(self, slot: int) -> None:
        """A request gives its slot back for want of memory, and waits for one."""
        self._leave(slot)
        self.stats.preempted += 1

    def _leave(self, slot: int) -> None:
        """A request gives its slot back, and waits for one, to be read again."""
        row = self._admission.put_back(slot)
        self.batch.release(slot)
        self._ended(row, slot)
        row.leave()
        row.keys = self.batch.keys(row.prompt)

    def _renew(self) -> bool:
        """Puts new weights in use once no request is in a slot; until then false. Where these cannot wait, requests
        leave their slots, and what they have got so far is read again."""
        if self.weights.now and self._decoding.ahead is None:
            for slot, _ in self._admission.taken:
                self._leave(slot)
        begun = not self.weights.now and any(row.left_slots for row in self._admission.waiting)
        if self.busy or begun:
            return False
        self._decoding.ahead = None
        self.weights.take()
        return True

    def update(
        self,
        target: Target | PyTree | None = None,
        drafter: DraftModel | PyTree | None = None,
        *,
        when: Literal["idle", "now"] = "idle",
        check: bool = False,
        donate: bool = False,
    ) -> int:
        """Puts other weights of the same shapes, dtypes and configuration in use, without compiling anything.

        What was kept of prompts is dropped, and what was learned of proposals begins again.

        Args:
            target, drafter: a loaded model, or its parameters alone, where no mesh splits heads or experts; None stays.
                They may lie on other devices, and may be plain where those in use were quantized as they were loaded:
                they are then quantized in the same way.
            when: "idle" lets requests in progress end first; until then no other begins. "now" reads what these have
                got so far again, with the new weights, and they go on with those.
            check: whether numbers that are infinite or NaN are refused.
            donate: whether the engine may use the given arrays themselves: it copies them otherwise. Do not give
                them to a program that donates them, too.

        Returns:
            The number of this version; the weights that the engine was made with are version 0. Completions list
            the versions that they come from (`Completion.versions`).

        Raises:
            ValueError: they do not fit: the message lists the first ten differences. The engine keeps what it has.
        """
        if when not in ("idle", "now"):
            raise ValueError(f'when must be "idle" or "now", got {when!r}')
        version = self.weights.offer(target, drafter, now=when == "now", check=check, donate=donate)
        if not self.busy:
            self._renew()
        return version

    def update_from_tensors(
        self,
        target: Named | None = None,
        drafter: Named | None = None,
        *,
        when: Literal["idle", "now"] = "idle",
    ) -> int:
        """`update` with the tensors of checkpoints, by the names that these have for them (`model.layers.0...`)."""
        return self.update(*self.weights.read(target, drafter), when=when, donate=True)

    def wait(self) -> None:
        """Waits for the device: `step` may return while it still works."""
        self._decoding.wait()

    def cancel(self, *tickets: int) -> None:
        """Drops requests, waiting or in a slot; nothing happens for one that is finished or unknown."""
        of_slot = dict(enumerate(self._admission.rows))
        for slot in self._admission.cancel(tickets):
            self.batch.release(slot)
            if row := of_slot[slot]:
                self._ended(row, slot)
        if self.weights.waiting:
            self._renew()

    def check(self, request: Request) -> Ready | None:
        """Raises RequestError if this engine cannot serve the request; returns its constraint, prepared."""
        self.check_settings(request)
        return self.constraints.check(request.params) if self.constraints else None

    def check_settings(self, request: Request) -> None:
        """Raises RequestError for settings that this engine cannot serve; does not prepare a constraint."""
        request.check(self.target.config.vocab_size, self.max_length)
        self.drafts.check_limit(request.max_block_size)
        served, asked = self.config.logprobs, request.params.logprobs
        if asked is not None and asked not in range(0 if served is None else served + 1):
            raise invalid(f"logprobs {asked} is not available: the engine was made with logprobs={served}")
        if self.constraints is not None:
            self.constraints.check_settings(request.params)
        elif (constraint := request.params.constraint) is not None:
            name = constraint.name or "constraint"
            raise invalid(f"{name} is not available: the engine was made with constraints=False", name)
