"""NVIDIA's ModelOpt."""

import fnmatch
from collections.abc import Mapping

from dflash_jax.storage.fields import Fields, named, strings
from dflash_jax.storage.format import EVERY, NVFP4_GROUP, Format, Rules


def modelopt(given: Fields) -> Rules:
    """NVIDIA's ModelOpt, from `config.json` or `hf_quant_config.json`."""
    inside = given.get("quantization")
    fields = inside if isinstance(inside, Mapping) else given
    name = "exclude_modules" if fields.get("exclude_modules") is not None else "ignore"
    yield from ((fnmatch.translate(pattern) + r"|" + named(pattern), None) for pattern in strings(fields, name))
    algorithm = fields.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = fields.get("quantized_layers")
        if not isinstance(layers, Mapping) or not all(isinstance(how, Mapping) for how in layers.values()):
            raise ValueError(f"config.json: MIXED_PRECISION must have quantized_layers, got {layers!r:.200}")
        for layer, how in layers.items():
            yield named(str(layer)), _algorithm(how.get("quant_algo"))
        return
    found = _algorithm(algorithm)
    yield from ((r"(?:.*\.)?embed_tokens", None), (EVERY, found))


def _algorithm(name: object) -> Format:
    nvfp4 = Format("nvfp4", (1, NVFP4_GROUP), packing="modelopt")
    known = {"FP8": Format("fp8", single=True), "FP8_PER_CHANNEL_PER_TOKEN": Format("fp8")}
    known |= {"NVFP4": nvfp4, "W4A16_NVFP4": nvfp4}
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"config.json: quantization {name!r:.60} of ModelOpt is not supported; supported are {', '.join(known)}, "
            "and MIXED_PRECISION of these"
        )
    return known[name]
