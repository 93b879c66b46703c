"""compressed-tensors (Red Hat's and vLLM's files)."""

from collections.abc import Mapping

from dflash_jax.quantised import BLOCK, GROUP
from dflash_jax.storage.fields import Fields, named, size_of, strings
from dflash_jax.storage.format import NVFP4_GROUP, Format, Rules

SERVED = (
    "supported are float-quantized (FP8 with scales of tensors, channels or blocks of 128 x 128), int-quantized (8 "
    "bits, tensors or channels, symmetric), pack-quantized (4 bits, groups or channels), nvfp4- and "
    "mxfp4-pack-quantized"
)


def compressed_tensors(given: Fields) -> Rules:
    """compressed-tensors: groups of modules, each with its scheme."""
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(g, Mapping) for g in groups.values()):
        raise ValueError(
            f"config.json: a quantization_config of compressed-tensors must have config_groups, got {groups!r:.200}"
        )
    yield from ((named(pattern), None) for pattern in strings(given, "ignore"))
    last: list[tuple[str, Format | None]] = []
    for group in groups.values():
        scheme, form = group.get("weights"), group.get("format") or given.get("format")
        found = None if scheme is None else _scheme(scheme, form)
        for target in strings(group, "targets"):
            if target == "Linear":
                last.append((r"(?!(?:.*\.)?embed_tokens$).*", found))
            elif target == "Embedding":
                last.append((r"(?:.*\.)?embed_tokens", found))
            else:
                yield named(target), found
    yield from last


def _scheme(scheme: object, form: object) -> Format:
    """The format of weights by what compressed-tensors says of them."""
    if not isinstance(scheme, Mapping):
        raise ValueError(f"config.json: the weights of a quantization group must be an object, got {scheme!r:.200}")
    bits, kind, strategy = (scheme.get(name) for name in ("num_bits", "type", "strategy"))
    symmetric, order, group = scheme.get("symmetric", True), scheme.get("actorder"), scheme.get("group_size")
    if kind == "float" and bits == 8 and form in ("float-quantized", "naive-quantized", None) and symmetric:
        if strategy == "tensor":
            return Format("fp8", single=True)
        if strategy == "channel":
            return Format("fp8")
        if strategy == "block" and scheme.get("block_structure") == [BLOCK, BLOCK]:
            return Format("fp8", (BLOCK, BLOCK))
    whole = kind == "int" and bits == 8 and form in ("int-quantized", "naive-quantized", None) and symmetric
    if whole and strategy in ("tensor", "channel"):
        return Format("int8", single=strategy == "tensor")
    packed = kind == "int" and bits == 4 and form == "pack-quantized" and strategy in ("group", "channel")
    if packed and order in (None, False, "weight", "static"):  # of which the last two leave no trace in the file
        block = (1, size_of(group)) if strategy == "group" else None
        return Format("int4", block, packing="packed", zeros=not symmetric)
    if kind == "float" and bits == 4 and strategy == "tensor_group" and group == NVFP4_GROUP:
        return Format("nvfp4", (1, NVFP4_GROUP), packing="packed")
    if kind == "float" and bits == 4 and form == "mxfp4-pack-quantized" and group == GROUP:
        return Format("mxfp4", (1, GROUP), packing="packed")
    raise ValueError(
        f"config.json: weights that compressed-tensors stores as {form!r:.40} with {dict(scheme)!r:.400} are not "
        f"supported; {SERVED}"
    )
