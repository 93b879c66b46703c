"""What the text of a compiled program says: its collectives, what it moves in a TPU's memory, what a GPU starts."""

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import jax
from jax.stages import Compiled

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.train.memory import peak_bytes

_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
_BITS = {"pred": 8, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s64": 64, "u64": 64, "f64": 64}
_BITS |= {"f8e4m3fn": 8, "f8e8m0fnu": 8, "s4": 4, "u4": 4}
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{[^{}]*?(S\(\d\))?\})?")  # type, shape, and a mark if it is on the chip
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\(([^()]*)\)(.*)")
_ALIASED = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
_BEGINNING = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")  # of a computation
_CALLED = re.compile(r"(?:to_apply|body|branch_computations=\{)=?%([\w.\-]+)")  # of several branches, the first
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_UNMOVED = """
    get-tuple-element bitcast tuple parameter constant after-all opt-barrier
    copy-done slice-done async-update async-done
""".split()
_CALLS = "call", "conditional", "while"
_THUNK = re.compile(r"( *)\d+: k(\w+) ")  # what a program for a GPU does, one after the other: a kernel, or a group
_GROUPS = "CommandBuffer", "Conditional", "While", "Sequential"


def measured(compiled: Compiled) -> Figures:
    """Per device, what the compiler says of a program."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}  # CUDA's tells none
    assert memory is not None
    text = text_of(compiled)
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "updated_in_place_bytes": memory.alias_size_in_bytes,
        "peak_bytes": peak_bytes(compiled),
        "collectives": None if text is None else collectives(text),
        "memory_bytes": None if text is None else memory_bytes(text),
    } | {name.replace(" ", "_"): cost[name] for name in ("flops", "bytes accessed") if name in cost}


def text_of(compiled: Compiled) -> str | None:
    """The program as text, or None of one that jax cannot write down."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:  # some programs of v5p and v6e, with jax 0.10
        return None


def collectives(text: str) -> list[Figures]:
    """Collectives of a compiled program: kind, shape, bytes, and how often it stands there, largest first.

    One that runs beside other work stands in the fusions that begin it, go on with it and end it; its channel tells.
    """
    found: dict[tuple[str, str], Figures] = {}
    begun = set()
    for result, kind, rest in re.findall(rf"= (\S.*?) ({_COLLECTIVES})(?:-start)?\((.*)", text):
        channel = re.search(r"channel_id=\d+", rest)
        plain = re.sub(r"\{[^}]*\}", "", result)
        if channel:
            if (kind, plain, channel[0]) in begun:
                continue
            begun.add((kind, plain, channel[0]))
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", plain)
        if "(" in result and len(shapes) % 2 == 0 and f"{kind}-start(" in text:
            shapes = shapes[len(shapes) // 2 :]  # operands, then results
        size = sum(_bytes(*shape) for shape in shapes)
        shape = " ".join(f"{kind_}[{dims}]" for kind_, dims in shapes)
        entry = found.setdefault((kind, shape), {"kind": kind, "shape": shape, "bytes": size, "count": 0})
        entry["count"] += 1
    return sorted(found.values(), key=lambda c: -c["bytes"])


def memory_bytes(text: str, counted: Callable[[str, int], bool] = lambda kind, size: True) -> int:
    """What a TPU program reads from and writes to the chip's own memory, per device.

    The compiler's own count also has what moves inside the chip, and counts a weight that is fetched before its use
    twice. Here an array counts whole wherever an instruction reads or writes it in the chip's memory, however little of
    it is needed: also a cache that attention reads, and an embedding table. What a kernel updates in place does not
    count. Of a condition the first branch counts, which in a step is that of rows that ask for nothing
    (`sampling.if_any`); a loop counts as often as the program says that it runs, or once.

    Args:
        text: of the compiled program.
        counted: whether arrays of this type ("bf16") and of this many bytes count.
    """
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if begun := _BEGINNING.match(line):
            lines = computations[begun[2]] = []
            entry = begun[2] if begun[1] else entry
        lines.append(line)

    @cache
    def moved(name: str) -> int:
        sizes, total = {}, 0
        for found in filter(None, map(_INSTRUCTION.match, computations[name])):
            name, result, operation, given, rest = found.groups()
            arrays = [(kind, _bytes(kind, dims), on_chip) for kind, dims, on_chip in _ARRAY.findall(result)]
            arrays = [(size, on_chip) for kind, size, on_chip in arrays if counted(kind, size)]
            sizes[name] = sum(size for size, on_chip in arrays if not on_chip)
            operands = [operand.split()[-1].lstrip("%") for operand in given.split(",") if operand.strip()]
            if operation in _CALLS:
                trips = _TRIPS.search(rest)
                total += (int(trips[1]) if trips else 1) * sum(map(moved, _CALLED.findall(rest)))
            elif operation.endswith("-start"):  # from one memory to the other, of which one counts
                total += min((size for size, _ in arrays if size > 64), default=0)  # smaller ones are flags
            elif operation not in _UNMOVED:
                total += sizes[name] + sum(sizes.get(operand, 0) for operand in operands)
                for pairs in _ALIASED.findall(rest):
                    total -= 2 * sum(sizes.get(operands[int(at)], 0) for at in re.findall(r"\((\d+), \{", pairs))
        return total

    return moved(entry)


def _bytes(kind: str, dims: str) -> int:
    return math.prod(map(int, filter(None, dims.split(",")))) * _BITS.get(kind, 32) // 8


def launches(dump: Path) -> Figures | None:
    """What a GPU starts for a program that XLA has written to a folder (`xla_dump_to`); None if there is none.

    `kernels` are kernels and copies, those of a loop's body once; `conditional_kernels` are those under conditions.
    `graphs` are CUDA graphs, and `host_decisions` conditions and loops between them, for which the host waits.
    """
    found = sorted(dump.glob("*.thunk_sequence_after_thunk_passes.txt"))
    if not found:
        return None
    counts: Figures = dict.fromkeys(("kernels", "conditional_kernels", "graphs", "host_decisions"), 0)
    conditions: list[int] = []  # how far those are indented that what follows is under
    graph = -1  # the same of the graph that it is in, or -1
    for line in found[0].read_text().splitlines():
        if not (thunk := _THUNK.match(line)):
            continue
        depth, kind = len(thunk[1]), thunk[2]
        while conditions and depth <= conditions[-1]:
            conditions.pop()
        if depth <= graph:
            graph = -1
        if kind not in _GROUPS:
            counts["conditional_kernels" if conditions else "kernels"] += 1
        elif graph < 0 and kind == "CommandBuffer":
            counts["graphs"], graph = counts["graphs"] + 1, depth
        elif graph < 0 and kind != "Sequential":
            counts["host_decisions"] += 1
        if kind == "Conditional":
            conditions.append(depth)
    return counts
