"""What a server tells of its work: figures for Prometheus, and a line in the log every few seconds."""

import logging
import time
from collections import Counter as Counts
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.engine.stats import Stats

_log = logging.getLogger("dflash_jax")
PAUSE = 5.0  # seconds between two lines of the log, while there is work
# Upper ends of buckets, in seconds: of waits and whole requests, and of single tokens.
SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5),
    *(10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 600.0),
)
TOKEN_SECONDS = 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5


class Figures:
    """Figures of an engine, which only its thread changes.

    Attributes:
        registry: that of `/metrics`.
    """

    def __init__(self, engine: Engine):
        self._engine, self.registry = engine, CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        seconds = partial(Histogram, registry=self.registry, buckets=SECONDS)
        self._requests = counter("dflash_requests", "Finished requests", ["finish_reason"])
        self._tokens = counter("dflash_generated_tokens", "Generated tokens")
        self._steps = counter("dflash_steps", "Decoding steps, counted per row")
        self._accepted = counter("dflash_step_tokens", "Tokens committed by those steps")
        self._drafted = counter("dflash_draft_steps", "Device steps, by block size (1 is no speculation)", ["draft"])
        self._read = counter("dflash_prompt_tokens", "Prompt tokens read")
        self._copied = counter("dflash_prompt_tokens_copied", "Of them, copied from earlier prompts")
        self._preempted = counter(
            "dflash_requests_preempted", "Requests that gave their memory back and were read again"
        )
        self._busy = gauge("dflash_slots_busy", "Slots in use")
        self._waiting = gauge("dflash_requests_waiting", "Requests without a slot")
        gauge("dflash_slots", "Slots").set(engine.slots)
        self._free = gauge("dflash_cache_tokens_free", "Free tokens of the paged KV cache")
        self._queued = seconds("dflash_queue_time_seconds", "From a request to its slot")
        self._first = seconds("dflash_time_to_first_token_seconds", "From a request to its first token")
        self._whole = seconds("dflash_e2e_request_latency_seconds", "From a request to its last token")
        self._each = Histogram(
            "dflash_time_per_output_token_seconds",
            "From the first token of a request to its last, for each after the first",
            registry=self.registry,
            buckets=TOKEN_SECONDS,
        )
        # Under these names `vllm bench serve` reads the acceptance of a server.
        self._drafts = counter("vllm:spec_decode_num_drafts", "Decoding steps, counted per row")
        self._proposed = counter("vllm:spec_decode_num_draft_tokens", "Tokens that those steps proposed")
        self._right = counter("vllm:spec_decode_num_accepted_tokens", "Proposed tokens that were accepted")
        self._places = counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Of each place", ["position"])
        self._before, self._drafts_before = Stats(), Counts[str]()

    @property
    def tau(self) -> float | None:
        """Mean number of tokens that the steps of finished answers committed; None before the first."""
        value = lambda name: self.registry.get_sample_value(f"dflash_{name}_total") or 0.0
        return value("step_tokens") / value("steps") if value("steps") else None

    def cancelled(self) -> None:
        """A request was given up."""
        self._requests.labels("cancelled").inc()

    def finished(self, done: Completion) -> None:
        """A request has ended."""
        lengths, after_first = done.acceptance_lengths, len(done.token_ids) - 1
        self._requests.labels(done.finish_reason).inc()
        self._tokens.inc(len(done.token_ids))
        self._steps.inc(len(lengths))
        self._accepted.inc(sum(lengths))
        self._drafts.inc(len(lengths))
        self._proposed.inc(done.proposed_tokens)
        self._right.inc(sum(lengths) - len(lengths))
        for place in range(max(lengths, default=1) - 1):
            self._places.labels(str(place)).inc(sum(length > place + 1 for length in lengths))
        self._queued.observe(done.started - done.submitted)
        self._first.observe(done.first_token - done.submitted)
        self._whole.observe(done.finished - done.submitted)
        if after_first > 0:
            self._each.observe((done.finished - done.first_token) / after_first)

    def worked(self) -> None:
        """The engine has made a step."""
        engine = self._engine
        now, before, self._before = engine.stats, self._before, replace(engine.stats)
        self._read.inc(now.prompt_tokens - before.prompt_tokens)
        self._copied.inc(now.prefix_tokens - before.prefix_tokens)
        self._preempted.inc(now.preempted - before.preempted)
        used = Counts(engine.steps_by_block_size)
        for draft, steps in (used - self._drafts_before).items():
            self._drafted.labels(draft).inc(steps)
        self._drafts_before = used
        if (pages := engine.batch.pages) is not None:
            self._free.set(pages.available)
        self._busy.set(engine.busy)
        self._waiting.set(engine.waiting)


class StatusLine:
    """Tells in the log what an engine does, every few seconds while it has work.

    Args:
        pause: seconds between two lines, at least.
    """

    def __init__(self, engine: Engine, pause: float = PAUSE, clock: Callable[[], float] = time.monotonic):
        self._engine, self._pause, self._clock = engine, pause, clock
        self._told = self._last = clock()
        self._before, self._drafts_before = Stats(), Counts[str]()
        self._worked = 0.0  # seconds of work that no line has told of

    def resumed(self) -> None:
        """There is work again."""
        self._last = self._clock()
        self._told = self._told if self._worked else self._last

    def worked(self) -> None:
        """The engine has made a step."""
        now = self._clock()
        self._worked, self._last = self._worked + now - self._last, now
        if now - self._told >= self._pause and self._worked:
            _log.info("%s", self._line())
            self._told, self._worked = now, 0.0
            self._before, self._drafts_before = replace(self._engine.stats), Counts(self._engine.steps_by_block_size)

    def _line(self) -> str:
        engine, now, before = self._engine, self._engine.stats, self._before
        read = now.prompt_tokens - now.prefix_tokens - before.prompt_tokens + before.prefix_tokens
        tokens, steps = now.decode_tokens - before.decode_tokens, now.row_steps - before.row_steps
        line = f"running {engine.busy}, waiting {engine.waiting}, prompts {read / self._worked:.1f} tokens/s, "
        line += f"answers {tokens / self._worked:.1f} tokens/s"
        if engine.drafter is None or not steps:
            return line
        used = Counts(engine.steps_by_block_size) - self._drafts_before
        draft = max(used, key=lambda name: used[name]) if used else "1"
        how = "no speculation" if draft == "1" else f"block size {draft}"
        return f"{line}, tau {tokens / steps:.2f}, {'auto runs ' if engine.drafts.auto else ''}{how}"
