"""What of the memory that rows share is held for whom, and who gives way where it runs out. Pure host code.

Before a request begins, pages are held for its prompt and for what its first steps are expected to commit; before every
visit, for what that one is. A row that commits more than was expected stops at the end of its pages until the next
visit. Where there are too few pages, the request that came last gives its own back, waits in its turn, and is read
again: what is not known beforehand, how long answers become, need not be held for them, and the first in turn always
goes on.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import jax

from dflash_jax.cache import KV, Pages, Windowed, pages, size_in_bytes
from dflash_jax.decoding.state import DraftModel, State, init_state
from dflash_jax.infer.engine.admission import Admission
from dflash_jax.infer.engine.pages import PageTable
from dflash_jax.infer.engine.params import STOP_WIDTH
from dflash_jax.infer.engine.prefixes import kept_of, shares
from dflash_jax.infer.engine.rows import ActiveRequest
from dflash_jax.infer.engine.slots import Slots
from dflash_jax.infer.engine.stats import Stats
from dflash_jax.mesh import HEADS, AnyMesh, entered, parts_of, rows_of
from dflash_jax.sharding import state_shardings
from dflash_jax.target import Target

SPARE = 1.25  # times the tokens that rows are expected to commit, for which pages are held
SHORT = 4  # pages of a row: where none is longer, rows do not share memory
MOST_ROWS = 64  # that are chosen for a server
ROWS_ON_CPU = 4  # the same where the memory says nothing: computing is what there is little of
RESERVE = 0.15  # of a device's memory that is left to programs, besides what they take for each row
COPIES = 4  # of the logits of a step, at a time
TABLE = 1 << 15  # entries of the table of pages, unless a length is given: a TPU core copies it for every layer
LITTLE_MORE = 1.1  # times the memory of rows of equal length that pages may take: one is nobody's, and one a row's own
WORTH = 0.75  # of the memory of rows of equal length: with less gain than that, rows do not share memory


def tokens_worth_sharing(
    target: Target, requests: Sequence[tuple[int, int]], slots: int, max_length: int
) -> int | None:
    """How many tokens the rows of these requests should have together, in pages that they share; None if rows of equal
    length would not need much more, or are short.

    A request is in a row for as long as it generates. So many tokens are there at a time as its rows would have if all
    had the mean length, where each request counts by the tokens that it generates; and no more than the longest
    requests have.

    Args:
        requests: tokens of the prompt, and to generate, of each.
        slots: rows that decode at the same time.
        max_length: of a row.
    """
    new, parts = sum(new for _, new in requests), rows_of(target.mesh)
    if max_length <= SHORT * pages.PAGE or not new:
        return None
    sizes = sorted((prompt + new for prompt, new in requests), reverse=True)
    mean = sum(new * (prompt + new) for prompt, new in requests) / new
    needed = min(slots * mean, sum(sizes[:slots])) + slots * pages.PAGE  # the last page of a row is not full
    tokens = max(-(-int(needed) // pages.PAGE) * pages.PAGE, parts * max_length)
    if tokens >= WORTH * slots * max_length:
        return None
    size = lambda room: size_in_bytes(jax.eval_shape(lambda: target.init_cache(slots, room).entries))
    with entered(target.mesh):  # not all that a target carries lies in pages
        return tokens if size(Pages.room(tokens, max_length, parts)) < WORTH * size(max_length) else None


def tokens_for_a_server(
    target: Target,
    drafter: DraftModel | None,
    slots: int,
    length: int,
    given: int | None,
    *,
    chunk: int,
    kept: int,
    draft_window: int | None,
) -> tuple[int, int] | None:
    """How many tokens the rows of a server have together, in pages that they share, and how long one of them may be;
    None if rows of equal length are as good. They take the memory of such rows and of the prompts kept beside them;
    more only if one row of the length that is given needs it.

    Args:
        slots: rows that decode at the same time.
        length: tokens of a row.
        given: how long a row may be, where somebody says so.
        chunk: tokens of a prompt that are read at once.
        kept: such chunks that are kept.
        draft_window: see `EngineConfig`.
    """
    parts, most = rows_of(target.mesh), target.config.most_positions

    def sizes(kept: int) -> tuple[int, int]:
        tokens = max(slots * length + kept * chunk, parts * (given or 0))
        return tokens, given or min(most or tokens, tokens // parts, TABLE // slots * pages.PAGE)

    def state(room: int | Pages) -> State:
        where = room if draft_window is None else Windowed(room, draft_window)
        return jax.eval_shape(lambda: init_state(target, drafter, slots, where, STOP_WIDTH, chunk))

    with entered(target.mesh):
        paged = state(Pages.room(*sizes(kept), parts))
        # What is kept takes memory besides the pages where it is copied, and for states and rings.
        in_pages = kept_of(paged, kept, chunk)[0] if kept and shares(paged, chunk) else 0
        tokens, longest = sizes(in_pages)
        alone, paged = state(length), state(Pages.room(tokens, longest, parts))
    pooled = any(isinstance(entry, KV) and entry.pooled for entry in paged.target_cache.entries)
    if longest <= SHORT * pages.PAGE or not pooled:
        return None
    size = lambda state: size_in_bytes((state.target_cache, state.draft))
    return (tokens, longest) if size(paged) <= LITTLE_MORE * size(alone) * tokens / (slots * length) else None


def rows_that_fit(
    target: Target, drafter: DraftModel | None, max_length: int, prefill_chunk: int, free: int | None = None
) -> int:
    """How many rows of so many tokens to decode together, where nobody says it: as many as the memory of the devices
    has room for, beside the weights that are there and as much for what is kept of prompts; a power of two for each
    part of the mesh.

    Args:
        free: bytes of a device; None asks the devices.
    """
    parts = rows_of(target.mesh)
    if (room := _free() if free is None else free) is None:
        return max(ROWS_ON_CPU, parts)
    carried, logits = row_bytes(target, drafter, max_length, prefill_chunk)
    rows = max(1, min(MOST_ROWS // parts, room // (2 * carried + logits)))
    return parts * (1 << (rows.bit_length() - 1))


def row_bytes(
    target: Target, drafter: DraftModel | None, slots: int | Windowed, prefill_chunk: int = 1
) -> tuple[int, int]:
    """Bytes of a device that one more row in each part of the mesh takes: what it carries from step to step, with
    room for so many tokens, and the logits of its steps. Nothing is allocated; the models may be shapes."""
    parts = rows_of(target.mesh)
    with entered(target.mesh):
        of_rows = lambda rows: jax.eval_shape(
            lambda: init_state(target, drafter, rows, slots, STOP_WIDTH, prefill_chunk, constraints=True)
        )
        carried = _bytes_on_device(of_rows(2 * parts), target.mesh) - _bytes_on_device(of_rows(parts), target.mesh)
    positions = 1 if drafter is None else 4 * drafter.config.block_size  # of the widest tree that `auto` tries
    return carried, COPIES * 4 * positions * target.config.vocab_size // parts_of(target.mesh, HEADS)


def _free() -> int | None:
    """Bytes of the fullest device that rows may take; None where it does not say."""
    if jax.default_backend() == "cpu":
        return None
    stats = [device.memory_stats() for device in jax.local_devices()]
    if not all(one and "bytes_limit" in one for one in stats):
        return None
    return min(int((1 - RESERVE) * one["bytes_limit"]) - one["bytes_in_use"] for one in stats if one)


def _bytes_on_device(state: State, mesh: AnyMesh | None) -> int:
    """Bytes that a state takes of each device."""
    if mesh is None:
        return size_in_bytes(state)
    of_leaf = lambda x, split: math.prod(split.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(jax.tree.leaves(jax.tree.map(of_leaf, state, state_shardings(state, mesh))))


class Memory:
    """The pages of an engine's rows.

    Args:
        width: most tokens that a step commits of a row.

    Attributes:
        waits: the request that has found no room just now; those that came later then wait, too.
    """

    def __init__(self, batch: Slots, admission: Admission, stats: Stats, width: int):
        self._batch, self._admission, self._stats, self._width = batch, admission, stats, width
        self.waits: ActiveRequest | None = None

    def admits(self, row: ActiveRequest, slot: int) -> bool:
        """Holds what a request needs to begin in a slot; false if there is no room, or was none for one before it."""
        if self.waits not in (None, row):
            return False
        config = self._batch.config
        more = row.budget if config.deterministic else self._likely(row, config.steps_per_visit)
        admitted = self._begins(row, slot, row.most(more))
        self.waits = None if admitted else row
        return admitted

    def _begins(self, row: ActiveRequest, slot: int, tokens: int) -> bool:
        """Holds pages for so many tokens of a request that is to begin: with those of what its prompt has in common
        with others, and only if what the rows of the same memory need for their next visit is left."""
        pages, prefixes = self._batch.pages, self._batch.prefixes
        if pages is None:
            return True
        shared = prefixes.shared(slot, row.prompt, row.keys)
        if not pages.fits(slot, tokens, [page for _, found in shared for page in found], self._soon(pages, slot)):
            return False
        for kept, found in shared:
            pages.share(slot, kept.end - prefixes.index.chunk, found)
        prefixes.found[slot] = [kept for kept, _ in shared]
        if held := pages.hold(slot, tokens):
            return held
        self._batch.drop(slot)
        return False

    def holds(
        self, decoding: Mapping[int, ActiveRequest], steps: int, give_back: Callable[[int], object] | None
    ) -> bool:
        """Holds pages for so many steps of these rows, by slot.

        Args:
            give_back: called with the slot of the request that came last where there are too few, to end it; None
                leaves it at that.

        Returns:
            Whether all rows that still are in their slots have what they need.
        """
        pages = self._batch.pages
        if pages is None:
            return True
        for slot, row in sorted(decoding.items(), key=lambda item: item[1].ticket):
            most = row.most(self._likely(row, steps))
            while self._admission.rows[slot] is row and not pages.hold(slot, most, reclaim=give_back is not None):
                if give_back is None:
                    return False
                sharing = [(other.ticket, at) for at, other in self._sharing(pages, slot)]
                give_back(max(sharing)[1])
        return True

    def _sharing(self, pages: PageTable, slot: int) -> list[tuple[int, ActiveRequest]]:
        """The requests, by slot, that have memory in common with a slot."""
        return [(at, row) for at, row in self._admission.taken if pages.part(at) == pages.part(slot)]

    def _soon(self, pages: PageTable, slot: int) -> int:
        """Pages that they will need for their next visit."""
        steps, rows = self._batch.config.steps_per_visit, self._sharing(pages, slot)
        return sum(pages.missing(at, row.most(self._likely(row, steps))) for at, row in rows)

    def _likely(self, row: ActiveRequest, steps: int) -> int:
        """Some more tokens than so many steps of a row are expected to commit."""
        tau = row.completion.tau or self._stats.tau or 1.0
        return min(steps * self._width, int(SPARE * tau * steps) + self._width)
