"""How the weights of a checkpoint are stored: what a `quantization_config` says of every module.

Weights are multiplied as they are stored, and activations are not quantized, whatever a checkpoint says of them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from .compressed_tensors import compressed_tensors
from .fields import Fields
from .format import Format as Format
from .format import Rules
from .fp8 import fp8, mxfp4
from .gguf import gguf
from .gptq import auto_round, awq, gptq
from .modelopt import modelopt

BEGINNINGS = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",
)  # of the names of a text model's modules
METHODS: dict[str, Callable[[Fields], Rules]] = {
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "mxfp4": mxfp4,
    "awq": awq,
    "gptq": gptq,
    "auto-round": auto_round,
    "gguf": gguf,
}


@dataclass(frozen=True)
class Storage:
    """The formats of the modules of a checkpoint.

    Attributes:
        rules: patterns of modules' names, as regular expressions of all of a name, and their formats; None is plain.
            The first one that fits counts; what none fits is plain.
        method: of the quantization, as checkpoints call it; empty if there is none.
    """

    rules: tuple[tuple[str, Format | None], ...] = ()
    method: str = ""

    def of(self, module: str) -> Format | None:
        """The format of the module of this name, such as `model.layers.0.mlp.up_proj`."""
        named, patterns = _compiled(self.rules)
        names = _spellings(module)
        first = min(named.get(name, len(self.rules)) for name in names)
        for place, pattern in patterns:
            if place < first and any(pattern.fullmatch(name) for name in names):
                return self.rules[place][1]
        return self.rules[first][1] if first < len(self.rules) else None

    def unit_of(self, *modules: str) -> int:
        """Outputs, and inputs, of any of these modules that stay on one device."""
        return max(1 if (found := self.of(module)) is None else found.unit for module in modules)

    @property
    def unit(self) -> int:
        """Outputs, and inputs, of any weight that stay on one device."""
        return max((found.unit for _, found in self.rules if found is not None), default=1)


@lru_cache
def _compiled(rules: tuple[tuple[str, Format | None], ...]) -> tuple[dict[str, int], list[tuple[int, re.Pattern]]]:
    """The places of rules that are for one name, by that name, and the patterns of the others: files name thousands."""
    named, patterns = dict[str, int](), list[tuple[int, re.Pattern]]()
    for place, (pattern, _) in enumerate(rules):
        name = re.sub(r"\\(.)", r"\1", pattern)
        if re.escape(name) == pattern:
            named.setdefault(name, place)
        else:
            patterns.append((place, re.compile(pattern)))
    return named, patterns


def _spellings(module: str) -> list[str]:
    """The names of a module: drafters, and models inside others, have another beginning in some files."""
    first = next((beginning for beginning in BEGINNINGS if module.startswith(beginning)), "")
    bare = module.removeprefix(first)
    return list(dict.fromkeys([module, bare, *(f"{beginning}{bare}" for beginning in BEGINNINGS)]))


def storage(given: object) -> Storage:
    """What a `quantization_config` says; nothing if it is empty.

    Raises:
        ValueError: it is of an unknown method, needs what is not supported, or is misshapen.
    """
    if given is None:
        return Storage()
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json: quantization_config must be an object, got {given!r:.80}")
    if not given:
        return Storage()
    method = given.get("quant_method")
    for rotated in ("transform_config", "quarot_config"):
        if given.get(rotated):
            raise ValueError(
                f"config.json: quantization_config has a {rotated}: its weights are rotated, and so are the hidden "
                "states that a drafter reads, which then proposes nothing that is right. Load a checkpoint without "
                "rotations"
            )
    if not isinstance(method, str) or method not in METHODS:
        what = "an unknown quantization" if method is None else f"the quantization {method!r:.60}"
        raise ValueError(
            f"config.json: quantization_config asks for {what}; load the checkpoint that is not quantized (--quantize "
            f"quantizes it while loading), or one in {', '.join(METHODS)}"
        )
    rules = tuple(METHODS[method](given))
    for pattern, _ in rules:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"config.json: quantization_config must name modules, or patterns of names; {pattern!r:.200} is not a "
                f"regular expression: {error}"
            ) from error
    return Storage(rules, method)
