"""FP8 as DeepSeek and transformers store it, and gpt-oss's MXFP4."""

import fnmatch
import re

from dflash_jax.quantised import BLOCK, GROUP
from dflash_jax.storage.fields import Fields, strings
from dflash_jax.storage.format import EVERY, Format, Rules


def fp8(given: Fields) -> Rules:
    """DeepSeek's and transformers' FP8: a scale for every block of 128 x 128, or one for a weight."""
    block, form = given.get("weight_block_size"), given.get("scale_fmt") or "float"
    if form not in ("float", "ue8m0") or given.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise ValueError(
            f"config.json: quantization_config of FP8 must say e4m3 and scale_fmt float, got {given!r:.300}"
        )
    if block is not None and block != [BLOCK, BLOCK]:
        raise ValueError(
            f"config.json: quantization_config of FP8 must say weight_block_size [{BLOCK}, {BLOCK}] or null, got "
            f"{block!r:.80}"
        )
    found = Format("fp8", None if block is None else (BLOCK, BLOCK), "weight_scale_inv", single=block is None)
    name = "modules_to_not_convert" if given.get("modules_to_not_convert") is not None else "ignored_layers"
    for pattern in strings(given, name):
        yield rf"(?:{pattern})(?:\..*)?|.*\.{re.escape(pattern)}", None
    yield from ((rf"(?:{pattern})(?:\..*)?", found) for pattern in strings(given, "modules_to_convert"))
    if not given.get("modules_to_convert"):
        yield from ((r"(?:.*\.)?(?:lm_head|embed_tokens)", None), (EVERY, found))


def mxfp4(given: Fields) -> Rules:
    """gpt-oss's experts."""
    for pattern in strings(given, "modules_to_not_convert"):
        yield fnmatch.translate(pattern) + r"(?:\..*)?", None
    yield r".*\.experts", Format("mxfp4", (1, GROUP))
