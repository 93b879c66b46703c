"""AWQ, GPTQ and AutoRound: four bits in groups, with zero points."""

import re
from collections.abc import Mapping
from typing import Literal

from dflash_jax.storage.fields import Fields, mapping, size_of, strings
from dflash_jax.storage.format import EVERY, Format, Rules


def awq(given: Fields) -> Rules:
    """AutoAWQ's files."""
    bits, group, version = given.get("bits", 4), given.get("group_size", 128), given.get("version", "gemm")
    if bits != 4 or str(version).lower() != "gemm" or given.get("zero_point", True) is not True:
        raise ValueError(
            "config.json: quantization_config of AWQ must say bits 4, version gemm, zero_point true and a group_size; "
            f"got {dict(given)!r:.300}"
        )
    for pattern in strings(given, "modules_to_not_convert"):
        yield rf".*{re.escape(pattern)}.*", None
    yield r"(?:.*\.)?(?:lm_head|embed_tokens)", None
    yield EVERY, Format("int4", (1, size_of(group)), "scales", packing="awq", zeros=True)


def gptq(given: Fields) -> Rules:
    """Files of AutoGPTQ and GPTQModel."""
    form = given.get("checkpoint_format") or "gptq"
    bits, group, order = given.get("bits"), given.get("group_size", 128), bool(given.get("desc_act"))
    whole = group == -1
    if bits != 4 or form not in ("gptq", "gptq_v2"):
        raise ValueError(
            "config.json: quantization_config of GPTQ must say bits 4, checkpoint_format gptq or gptq_v2 and a "
            f"group_size; got {dict(given)!r:.300}"
        )
    packing: Literal["gptq", "gptq_v2"] = "gptq" if form == "gptq" else "gptq_v2"
    block = None if whole else (1, size_of(group))
    found = Format("int4", block, "scales", packing=packing, zeros=True, ordered=order and not whole)
    yield from _overridden(given, found)
    if not given.get("lm_head"):
        yield r"(?:.*\.)?lm_head", None
    yield from ((r"(?:.*\.)?embed_tokens", None), (EVERY, found))


def _overridden(given: Fields, found: Format) -> Rules:
    """What GPTQModel's `dynamic` leaves out (`-:`), or stores otherwise."""
    dynamic = given.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ValueError(f"config.json: dynamic must be an object, got {dynamic!r:.200}")
    for pattern, how in dynamic.items():
        if str(pattern).startswith("-:"):
            yield f"(?:{str(pattern)[2:]}).*", None
        elif isinstance(how, Mapping) and set(how) <= {"bits", "group_size", "desc_act", "sym"}:
            rules = list(gptq({**given, "dynamic": None, "lm_head": True, **how}))
            yield f"(?:{str(pattern).removeprefix('+:')}).*", rules[-1][1]
        else:
            raise ValueError(
                f"config.json: dynamic {pattern!r:.80} must give bits, group_size and so on, got {how!r:.80}"
            )


def auto_round(given: Fields) -> Rules:
    """AutoRound's files, which pack as GPTQ or AWQ do."""
    packing = str(given.get("packing_format") or "auto_round:auto_gptq")
    fields = {name: given[name] for name in ("bits", "group_size", "sym") if name in given}
    for layer, how in mapping(given, "extra_config").items():
        bits = how.get("bits") if isinstance(how, Mapping) else None
        if bits == 16:
            yield re.escape(layer), None
        elif bits != given.get("bits"):
            raise ValueError(
                f"config.json: extra_config of {layer!r:.80} must say 16 bits or those of all, got {bits!r:.40}"
            )
    blocks = given.get("block_name_to_quantize")
    if isinstance(blocks, str) and blocks:
        within = "|".join(re.escape(name.strip()) for name in blocks.split(","))
        yield rf"(?!(?:{within})\.).*", None
    if packing in ("auto_round:auto_gptq", "auto_round:gptq"):
        yield from gptq(fields)
    elif packing in ("auto_round:auto_awq", "auto_round:awq"):
        yield from awq(fields)
    else:
        raise ValueError(
            f"config.json: packing_format must be auto_round:auto_gptq or auto_round:auto_awq, got {packing!r:.80}"
        )
