"""What is read next of several prompts: which kept chunks are copied, and what one program reads of which rows.

Pure host code: `Slots.read` carries the plan out.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from dflash_jax.infer.engine.prefixes import KeptChunk, PrefixIndex
from dflash_jax.infer.engine.prompts import BesideShape, PrefillBatch, Prefills
from dflash_jax.infer.engine.rows import ActiveRequest


class PromptRead(NamedTuple):
    """The part of a prompt that is committed after a read.

    Attributes:
        filled: tokens that are committed now.
        copied: of them, copied from another prompt this time.
        place: of its row in the program; None if it was not read.
        awaited: whether other prompts, too, will go on from here (see `PrefixIndex.keep`).
    """

    slot: int
    filled: int
    copied: int
    place: int | None
    awaited: bool


class ReadPlan(NamedTuple):
    """Copies of kept chunks, then a program, then what is kept of the rows that it read.

    Attributes:
        copies: kept chunks to commit.
        batch: what the program reads.
        reads: how far each prompt has come then.
        seconds: that the program takes, if that was measured.
    """

    copies: list[KeptChunk]
    batch: PrefillBatch
    reads: list[PromptRead]
    seconds: float | None


def plan_reads(prompts: Mapping[int, ActiveRequest], programs: Prefills, prefixes: PrefixIndex) -> ReadPlan:
    """Plans to read some of these prompts, of the first one at least, up to the end of a chunk or of the prompt.

    Where several go on with the same chunk, one reads it, and the others copy it when it is there.

    Args:
        prompts: by slot, of rows that were begun; the first in turn first.
        programs: of which the cheapest for its tokens is chosen.
        prefixes: the index of kept chunks; those found are marked as used.
    """
    prompts, chunk = dict(list(prompts.items())[: 1 if programs.fixed else None]), programs.chunk
    copies = {slot: prefixes.find(slot, row.filled, row.prompt, row.keys) for slot, row in prompts.items()}
    start = {slot: row.filled + chunk * len(copies[slot]) for slot, row in prompts.items()}
    end = {slot: min(len(row.prompt), (start[slot] // chunk + 1) * chunk) for slot, row in prompts.items()}
    readers, awaited = _readers(prompts, start, chunk)
    parts: list[list[int]] = [[] for _ in range(programs.parts)]
    for slot in readers:
        parts[programs.part(slot)].append(slot)
    shape, seconds = programs.choose([[(start[slot], end[slot] - start[slot]) for slot in part] for part in parts])
    taken = [[(slot, prompts[slot].prompt[start[slot] : end[slot]]) for slot in part] for part in parts]
    batch = programs.batch(shape, taken)
    place = {slot: i for i, slot in enumerate(batch.rows.tolist()) if batch.counts[i]}
    reads: list[PromptRead] = []
    for slot in sorted(prompts, key=lambda slot: place.get(slot, len(batch.rows))):
        row, at = prompts[slot], place.get(slot)
        filled = start[slot] if at is None else start[slot] + int(batch.counts[at])
        reads.append(PromptRead(slot, filled, start[slot] - row.filled, at, slot in awaited))
        if at is not None:
            batch.last[at] = filled == len(row.prompt)
    return ReadPlan([chunk for found in copies.values() for chunk in found], batch, reads, seconds)


def plan_steps(
    prompts: Mapping[int, ActiveRequest], programs: Prefills, shape: BesideShape, steps: int, *, at_ends: bool
) -> list[ReadPlan]:
    """Plans what each of some steps of other rows reads of these prompts.

    A chunk that several begin with is read once; the others copy it after the visit.

    Args:
        prompts: by slot, of rows that were begun; the first in turn first. What is kept of others was copied to them.
        shape: of the program.
        steps: at most.
        at_ends: whether a chunk can be kept only while its row ends with it. The last step is then the first one after
            which a chunk is complete.
    """
    chunk, plans, filled = programs.chunk, list[ReadPlan](), {slot: row.filled for slot, row in prompts.items()}
    complete, kept = set[bytes](), False  # chunks that are read in this visit
    while len(plans) < steps and not (kept and at_ends):
        left = {slot: row for slot, row in prompts.items() if filled[slot] < len(row.prompt)}
        readers, awaited = _readers(left, filled, chunk, complete)
        room, taken = [shape.total] * programs.parts, [list[tuple[int, Sequence[int]]]() for _ in range(programs.parts)]
        for slot in readers:
            part, start, prompt = programs.part(slot), filled[slot], left[slot].prompt
            end = min(len(prompt), (start // chunk + 1) * chunk, start + min(room[part], shape.tokens))
            if end > start and len(taken[part]) < shape.rows:
                taken[part].append((slot, prompt[start:end]))
                room[part] -= end - start
                filled[slot] = end
        if not any(taken):
            break
        batch, reads = programs.batch(shape.block, taken), list[PromptRead]()
        for place, slot in enumerate(batch.rows.tolist()):
            if not batch.counts[place]:
                continue
            end, row = filled[slot], prompts[slot]
            reads.append(PromptRead(slot, end, 0, place, slot in awaited))
            batch.last[place] = end == len(row.prompt)
            if row.keys and end % chunk == 0:
                complete.add(row.keys[end // chunk - 1])
                kept = True
        plans.append(ReadPlan([], batch, reads, None))
    return plans


def _readers(
    prompts: Mapping[int, ActiveRequest], filled: Mapping[int, int], chunk: int, complete: Collection[bytes] = ()
) -> tuple[list[int], set[int]]:
    """Which of these rows read on: where several go on with the same chunk, one does, and the others copy it later.

    Args:
        filled: tokens of each that are there.
        complete: chunks that are read already, and can be copied soon.

    Returns:
        Slots in order, and those of them, and of others, with whose chunk more than one goes on.
    """
    key = {slot: _chunk_key(slot, row, filled[slot], chunk) for slot, row in prompts.items()}
    counts = Counter(key.values())
    inside = {slot for slot in prompts if filled[slot] % chunk}  # a chunk that is there in part is not copied any more
    begun, readers = {*complete, *(key[slot] for slot in inside)}, list[int]()
    for slot in prompts:
        if slot in inside or key[slot] not in begun:
            readers.append(slot)
            begun.add(key[slot])
    return readers, {slot for slot in prompts if counts[key[slot]] > 1}


def _chunk_key(slot: int, row: ActiveRequest, filled: int, chunk: int) -> bytes:
    """The key of the chunk of a prompt that is read next; one that only this row has where it could not be copied."""
    at = filled // chunk
    if row.keys and (at + 1) * chunk < len(row.prompt):
        return row.keys[at]
    return slot.to_bytes(4)
