"""GGUF: what an unpacked file says of its tensors (see `checkpoint.gguf`)."""

import re

from dflash_jax.storage.fields import Fields, mapping
from dflash_jax.storage.format import Format, Rules

FORMATS = {
    "Q4_0": Format("int4", (1, 32), packing="gguf"),
    "Q4_1": Format("int4", (1, 32), packing="gguf", zeros=True),
    "Q4_K": Format("int4", (1, 32), packing="gguf", zeros=True),
    "Q8_0": Format("int8", (1, 32), packing="gguf"),
    "Q6_K": Format("int8", (1, 16), packing="gguf"),
}


def gguf(given: Fields) -> Rules:
    """A kind of block for each module that stays packed."""
    for module, kind in mapping(given, "modules").items():
        if kind not in FORMATS:
            raise ValueError(f"config.json: {module} must be stored as one of {', '.join(FORMATS)}, got {kind!r:.40}")
        yield re.escape(module), FORMATS[str(kind)]
