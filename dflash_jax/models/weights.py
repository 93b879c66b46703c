"""Weights of products as checkpoints store them: plain, or quantized and then kept so."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dflash_jax.checkpoint import (
    Columns,
    Leaf,
    Ordered,
    Packed,
    PackedZeros,
    PerOutput,
    QuantisedLeaf,
    Scaled,
    Section,
    Signed,
    Source,
    Stored,
    Turned,
    Unpacked,
    Words,
    Zeros,
    fused,
    fused_each,
    of_product,
)
from dflash_jax.quantised import EightBit, FourBit, Quantised
from dflash_jax.storage import Format

Formats = Callable[[str], Format | None]
plain: Formats = lambda name: None
DTYPES = {"fp8": ("F8_E4M3", "float8_e4m3fn"), "int8": ("I8", "int8")}  # in files, and of parameters
NUMBERS = 8  # of four bits, in a word
SCALES = "F32", "F16", "BF16", "F8_E8M0"


class Outputs(NamedTuple):
    """A layer whose outputs are a stretch of a weight's.

    Attributes:
        name: of the layer.
        size: how many there are.
        copies: how often they are there (see `Section`).
        order: in which they are, of those that are stored; None is as they are stored.
    """

    name: str
    size: int
    copies: int = 1
    order: Sequence[int] | None = None

    def section(self, source: Source) -> Section:
        """These outputs of a tensor that has one row for each."""
        return Section(source, self.order, self.copies)


def linear(
    layers: Sequence[Outputs], width: int, shards: int = 1, *, formats: Formats = plain, product: bool = True
) -> Leaf | QuantisedLeaf:
    """The weight of a product, whose outputs are those of several layers one after the other.

    Args:
        width: inputs.
        shards: see `fused`.
        formats: how the layers of these names are stored. They stay so if all are stored alike; else they are
            dequantized as they are read.
        product: whether a plain one may be quantized as it is loaded.
    """
    if (parts := _quantised(layers, width, shards, formats)) is None:
        found = fused([layer.section(source(layer, width, formats)) for layer in layers], shards)
        return of_product(found) if product else found
    split = lambda name: 1 if name == "order" else shards  # which is of inputs
    arrays = {name: fused(sections, split(name), parts.dtypes[name]) for name, sections in parts.arrays.items()}
    return QuantisedLeaf(arrays, parts.kind, parts.how)


def linears(
    each: Sequence[Sequence[Outputs]], width: int, shards: int = 1, *, formats: Formats = plain
) -> Leaf | QuantisedLeaf:
    """`linear` weights along a new first axis, as of experts. They stay quantized if all are stored alike."""
    found = [_quantised(layers, width, shards, formats) for layers in each]
    first = found[0]
    alike = [parts for parts in found if first is not None and parts is not None and parts[1:] == first[1:]]
    if first is None or len(alike) < len(found):
        read = lambda layers: [layer.section(source(layer, width, formats)) for layer in layers]
        return of_product(fused_each([read(layers) for layers in each], shards))
    split = lambda name: 1 if name == "order" else shards  # which is of inputs
    arrays = {
        name: fused_each([parts.arrays[name] for parts in alike], split(name), first.dtypes[name])
        for name in first.arrays
    }
    return QuantisedLeaf(arrays, first.kind, first.how)


def biases(layers: Sequence[Outputs], shards: int = 1) -> Leaf:
    """The biases of what has its weight from `linear`."""
    return fused([layer.section(Stored(f"{layer.name}.bias", (layer.size,))) for layer in layers], shards)


class _Parts(NamedTuple):
    """What a `QuantisedLeaf` is made of, as sections of its arrays."""

    arrays: dict[str, list[Section]]
    dtypes: dict[str, str | None]
    kind: type[Quantised]
    how: Mapping[str, object]


def _quantised(layers: Sequence[Outputs], width: int, shards: int, formats: Formats) -> _Parts | None:
    """The arrays of a weight that stays quantized; None if its layers are plain or stored in different ways."""
    found = {formats(layer.name) for layer in layers}
    # One scale for a weight becomes one for each output.
    alike = {None if form is None else replace(form, single=False) for form in found}
    (form, *_) = found
    if len(alike) > 1 or form is None:
        return None
    if form.numbers in DTYPES:
        return _eight(layers, width, shards, form, formats)
    return _four(layers, width, form)


def _eight(layers: Sequence[Outputs], width: int, shards: int, form: Format, formats: Formats) -> _Parts:
    """Eight bits. Where blocks end in the middle of what is joined, or outputs change their block, each output gets the
    scales of its block."""
    stored, dtype = DTYPES[form.numbers]
    values = [layer.section(_values(layer, width, stored, form)) for layer in layers]
    if form.block is None:
        scale = [layer.section(PerOutput(*_scale(layer, formats), single=_single(layer, formats))) for layer in layers]
        return _Parts({"values": values, "scale": scale}, {"values": dtype, "scale": "float32"}, EightBit, {})
    (height, _), sizes = form.block, [layer.size for layer in layers]
    ragged = len(sizes) > 1 and any(size % height for size in (sizes if shards > 1 else sizes[:-1]))
    moved = any(to // height != of // height for layer in layers for to, of in enumerate(layer.order or ()))
    scale = []
    for layer in layers:
        order = range(layer.size) if layer.order is None else layer.order
        rows = [of // height for of in order] if ragged or moved else None
        scale.append(Section(_blocks(layer, width, form), rows, layer.copies))
    block = (1 if ragged or moved else height, form.block[1])
    dtypes: dict[str, str | None] = {"values": dtype, "scale": "float32"}
    return _Parts({"values": values, "scale": scale}, dtypes, EightBit, {"block": block})


def _four(layers: Sequence[Outputs], width: int, form: Format) -> _Parts:
    """Four bits, in groups of inputs."""
    group = width if form.block is None else form.block[1]
    if (
        width % group
        or width % NUMBERS
        or any(layer.size % NUMBERS for layer in layers if form.packing not in ("packed", "gguf"))
    ):
        sizes = [layer.size for layer in layers]
        raise ValueError(
            f"{layers[0].name}: {width} inputs in groups of {group}, and {sizes} outputs, cannot be packed"
        )
    arrays: dict[str, list[Section]] = {"values": [], "scale": []}
    dtypes: dict[str, str | None] = {
        "values": "uint8",
        "scale": "stored",
        "zero": "uint8",
        "gain": "float32",
        "offset": "float32",
    }
    for layer in layers:
        for name, part in _packed(layer, width, group, form, layers[0].name).items():
            signed = name == "values" and form.numbers == "int4"
            arrays.setdefault(name, []).append(layer.section(Signed(part) if signed else part))
    if form.ordered:
        arrays["order"], dtypes["order"] = [Section(Ordered(layers[0].name, (width,), group))], "int32"
    if form.numbers == "nvfp4":
        dtypes["scale"] = "float8_e4m3fn"
    how = {} if form.numbers == "int4" else {"code": "e2m1"}
    return _Parts(arrays, {name: dtypes[name] for name in arrays}, FourBit, how)


def _packed(layer: Outputs, width: int, group: int, form: Format, first: str) -> dict[str, Source]:
    """The tensors of a layer's weight, by the names of the arrays that they become."""
    name, values, groups = layer.name, (layer.size, width // 2), (layer.size, width // group)
    weight = f"{name}.weight"
    if form.packing == "awq":
        found: dict[str, Source] = {
            "values": Columns(f"{name}.qweight", values),
            "scale": Turned(f"{name}.scales", groups),
        }
        return found | {"zero": Columns(f"{name}.qzeros", groups, zeros=True)}
    if form.packing == "gguf":
        found = {"values": Stored(f"{weight}_packed", values, ("U8",)), "scale": Stored(f"{weight}_scale", groups)}
        return found | ({"offset": Stored(f"{weight}_offset", groups, ("F32",))} if form.zeros else {})
    if form.packing in ("gptq", "gptq_v2"):
        zero = Zeros(f"{name}.qzeros", groups, added=int(form.packing == "gptq"))
        words = Words(name, values, group, first if form.ordered else None)
        return {"values": words, "scale": Turned(f"{name}.scales", groups), "zero": zero}
    if form.numbers == "nvfp4":
        own = form.packing == "modelopt"
        gain = PerOutput(
            f"{weight}_{'scale_2' if own else 'global_scale'}", (layer.size,), single=True, inverse=not own
        )
        scale = Stored(f"{weight}_scale", groups, ("F8_E4M3",))
        return {"values": Stored(weight if own else f"{weight}_packed", values, ("U8",)), "scale": scale, "gain": gain}
    if form.numbers == "mxfp4":
        scale = Stored(f"{weight}_scale", groups, ("U8",))
        return {"values": Stored(f"{weight}_packed", values, ("U8",)), "scale": scale}
    found = {"values": Packed(weight, values), "scale": Stored(f"{name}.{form.scale}", groups)}
    return found | ({"zero": PackedZeros(f"{weight}_zero_point", groups)} if form.zeros else {})


def _values(layer: Outputs, width: int, dtype: str, form: Format) -> Stored:
    return Stored(f"{layer.name}.weight{'_packed' * (form.packing == 'gguf')}", (layer.size, width), (dtype,))


def _blocks(layer: Outputs, width: int, form: Format) -> Stored:
    assert form.block is not None
    shape = tuple(-(-size // side) for size, side in zip((layer.size, width), form.block, strict=True))
    return Stored(f"{layer.name}.{form.scale}", shape, SCALES)


def _scale(layer: Outputs, formats: Formats) -> tuple[str, tuple[int]]:
    form = formats(layer.name)
    assert form is not None
    return f"{layer.name}.{form.scale}", (layer.size,)


def _single(layer: Outputs, formats: Formats) -> bool:
    form = formats(layer.name)
    return form is not None and form.single


def source(layer: Outputs, width: int, formats: Formats = plain) -> Source:
    """The plain weight of a layer, or one that becomes plain as it is read."""
    form = formats(layer.name)
    if form is None:
        return Stored(f"{layer.name}.weight", (layer.size, width))
    if form.numbers not in DTYPES:
        parts = _four([layer], width, form)
        arrays = tuple((name, sections[0].source) for name, sections in parts.arrays.items())
        return Unpacked((layer.size, width), arrays, str(parts.how.get("code", "int4")))
    values = _values(layer, width, DTYPES[form.numbers][0], form)
    if form.block is None:
        return Scaled(values, PerOutput(*_scale(layer, formats), single=form.single))
    return Scaled(values, _blocks(layer, width, form), form.block)
