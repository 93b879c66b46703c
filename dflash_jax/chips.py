"""Accelerators as published."""

import re
from typing import NamedTuple


class Chip(NamedTuple):
    """One device, as published.

    Attributes:
        memory: bytes.
        bandwidth: of the memory, bytes per second.
        flops: operations per second in bfloat16, or float16 where there is none.
        link: bytes per second to other devices, one direction, all links together.
    """

    memory: float
    bandwidth: float
    flops: float
    link: float


GIB, TERA = 2**30, 1e12
CHIPS = {
    "v4": Chip(16 * GIB, 0.61 * TERA, 137 * TERA, 0.15 * TERA),  # one of a chip's two cores
    "v5e": Chip(16 * GIB, 0.82 * TERA, 197 * TERA, 0.2 * TERA),
    "v5p": Chip(95 * GIB, 2.77 * TERA, 459 * TERA, 0.6 * TERA),
    "v6e": Chip(32 * GIB, 1.64 * TERA, 918 * TERA, 0.45 * TERA),
    "tpu7x": Chip(96 * GIB, 3.69 * TERA, 1153 * TERA, 0.6 * TERA),  # one of a chip's two cores
    "t4": Chip(15 * GIB, 0.32 * TERA, 65 * TERA, 0.016 * TERA),
    "l4": Chip(22.5 * GIB, 0.3 * TERA, 121 * TERA, 0.032 * TERA),
    "a100": Chip(80 * GIB, 2.04 * TERA, 312 * TERA, 0.3 * TERA),
    "h100": Chip(80 * GIB, 3.35 * TERA, 989 * TERA, 0.45 * TERA),
    "h200": Chip(141 * GIB, 4.8 * TERA, 989 * TERA, 0.45 * TERA),
    "b200": Chip(180 * GIB, 8.0 * TERA, 2250 * TERA, 0.9 * TERA),
}
# What a device calls itself, and its name here.
KINDS = {"v5 lite": "v5e", "v6 lite": "v6e", "v7": "tpu7x"} | {name: name for name in CHIPS} | {"v5": "v5p"}


def chip_of(kind: str) -> Chip | None:
    """The chip of a device by what it calls itself, or None."""
    return next((CHIPS[chip] for name, chip in KINDS.items() if re.search(rf"\b{name}\b", kind.lower())), None)
