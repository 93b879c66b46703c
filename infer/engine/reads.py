"""What is read next of several prompts: which kept chunks are copied, and what one program reads of which rows.

Pure host code: `Slots.read` carries the plan out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dflash_jax.infer.engine.prefixes import KeptChunk, PrefixIndex
from dflash_jax.infer.engine.prompts import PrefillBatch, Prefills, PrefillShape
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
    key = {slot: _next_key(slot, row, start[slot], chunk) for slot, row in prompts.items()}
    awaited = Counter(key.values())
    reader = {key[slot]: slot for slot in reversed(prompts)}  # the first of those with the same chunk
    parts: list[list[int]] = [[] for _ in range(programs.parts)]
    for slot in prompts:
        if reader[key[slot]] == slot:
            parts[programs.part(slot)].append(slot)
    shape, seconds = programs.choose([[(start[slot], end[slot] - start[slot]) for slot in part] for part in parts])
    taken = [[(slot, prompts[slot].prompt[start[slot] : end[slot]]) for slot in part] for part in parts]
    batch = programs.batch(shape, taken)
    place = {slot: i for i, slot in enumerate(batch.rows.tolist()) if batch.counts[i]}
    reads: list[PromptRead] = []
    for slot in sorted(prompts, key=lambda slot: place.get(slot, len(batch.rows))):
        row, at = prompts[slot], place.get(slot)
        filled = start[slot] if at is None else start[slot] + int(batch.counts[at])
        reads.append(PromptRead(slot, filled, start[slot] - row.filled, at, awaited[key[slot]] > 1))
        if at is not None:
            batch.last[at] = filled == len(row.prompt)
    return ReadPlan([chunk for found in copies.values() for chunk in found], batch, reads, seconds)


def plan_steps(
    prompts: Mapping[int, ActiveRequest], programs: Prefills, shape: PrefillShape, prefixes: PrefixIndex, steps: int
) -> list[ReadPlan]:
    """Plans what each of some steps of other rows reads of these prompts: in each part of the mesh at most as many
    tokens as the shape has, and of as many rows.

    The last step is the one after which a chunk is complete that is to be kept, since its row must end there then.

    Args:
        prompts: by slot, of rows that were begun; the first in turn first. What is kept of others was copied to them.
        shape: of the program.
        steps: at most.
    """
    chunk, plans, filled = programs.chunk, list[ReadPlan](), {slot: row.filled for slot, row in prompts.items()}
    while len(plans) < steps and not any(at.filled % chunk == 0 and prompts[at.slot].keys for at in _last(plans)):
        left = {slot: row for slot, row in prompts.items() if filled[slot] < len(row.prompt)}
        key = {slot: _next_key(slot, row, filled[slot], chunk) for slot, row in left.items()}
        awaited, reader = Counter(key.values()), {key[slot]: slot for slot in reversed(left)}
        room, taken = (
            [shape.tokens] * programs.parts,
            [list[tuple[int, Sequence[int]]]() for _ in range(programs.parts)],
        )
        for slot, row in left.items():
            part, start = programs.part(slot), filled[slot]
            end = min(len(row.prompt), (start // chunk + 1) * chunk, start + room[part])
            if end > start and reader[key[slot]] == slot and len(taken[part]) < shape.rows:
                taken[part].append((slot, row.prompt[start:end]))
                room[part] -= end - start
                filled[slot] = end
        if not any(taken):
            break
        batch, reads = programs.batch(shape, taken), list[PromptRead]()
        for place, slot in enumerate(batch.rows.tolist()):
            if batch.counts[place]:
                reads.append(PromptRead(slot, filled[slot], 0, place, awaited[key[slot]] > 1))
                batch.last[place] = filled[slot] == len(prompts[slot].prompt)
        plans.append(ReadPlan([], batch, reads, None))
    return plans


def _last(plans: Sequence[ReadPlan]) -> list[PromptRead]:
    return plans[-1].reads if plans else []


def _next_key(slot: int, row: ActiveRequest, start: int, chunk: int) -> bytes:
    """The key of the chunk of a prompt that is read next; one that only this row has where it could not be copied."""
    if row.keys and start % chunk == 0 and start + chunk < len(row.prompt):
        return row.keys[start // chunk]
    return slot.to_bytes(4)
