"""Visits of the device: what was asked for, and what of it is known."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dflash_jax.decoding.forecast import sizes_within
from dflash_jax.decoding.step import Committed
from dflash_jax.infer.engine.chooser import Chooser, Draft
from dflash_jax.infer.engine.reads import ReadPlan
from dflash_jax.infer.engine.rows import ActiveRequest


class Visit(NamedTuple):
    """Steps that the device was asked for.

    Attributes:
        trace: tokens of each step; on the device, until they are collected.
        rows: slot and request of each of its rows.
        begin: when it was asked for.
        chooser: who chose the draft; None if there was no choice.
        steps: that it may take.
        end: when the device was done, if somebody waited for that.
        reads: what each of its steps reads of prompts.
    """

    draft: Draft
    trace: Committed
    rows: list[tuple[int, ActiveRequest | None]]
    begin: float
    chooser: Chooser[Draft] | None
    steps: int
    end: float | None = None
    reads: Sequence[ReadPlan] = ()


def expected(trace: Committed, draft: Draft) -> dict[int, float]:
    """Tokens that the best nodes of a tree promised in a step of a row, by their number."""
    if trace.forecast is None:
        return {}
    busy = trace.count > 0
    sums = np.sum(trace.forecast.nodes[busy], axis=0) / max(1, np.sum(busy))
    return dict(zip(sizes_within(draft.nodes), sums.tolist(), strict=True))


def is_ready(trace: Committed) -> bool:
    return trace.count.is_ready()  # pyright: ignore[reportAttributeAccessIssue] (which its stub lacks)
