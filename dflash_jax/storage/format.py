"""How the weight of a module is stored."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

NVFP4_GROUP = 16  # inputs that share a scale in NVFP4


@dataclass(frozen=True)
class Format:
    """How the weight of a module is stored.

    Attributes:
        numbers: what it is made of.
        block: outputs and inputs that share a scale; None is a scale for each output, or `single`.
        scale: the last part of the name of the scale's tensor.
        single: whether there is one scale for all of the weight.
        packing: whose tensors they are, of four bits and of GGUF.
        zeros: whether groups have zero points, or offsets.
        ordered: whether inputs are sorted by groups of their own.
    """

    numbers: Literal["fp8", "int8", "int4", "mxfp4", "nvfp4"]
    block: tuple[int, int] | None = None
    scale: str = "weight_scale"
    single: bool = False
    packing: Literal["", "packed", "awq", "gptq", "gptq_v2", "modelopt", "gguf"] = ""
    zeros: bool = False
    ordered: bool = False

    @property
    def unit(self) -> int:
        """Outputs, and inputs, that stay on one device."""
        return 1 if self.block is None else max(self.block)


EVERY = ".*"  # a pattern of every module
Rules = Iterable[tuple[str, Format | None]]  # patterns of modules' names, and how those are stored; None is plain
