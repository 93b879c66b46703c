"""Checkpoint tensors of what many families share: the decoder, attention, MLPs and experts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from dflash_jax.checkpoint import (
    BlockScaled,
    Leaf,
    Packed,
    Part,
    QuantisedLeaf,
    Section,
    Source,
    Stored,
    Table,
    copied,
    fused,
    fused_each,
)
from dflash_jax.config import AttentionConfig, ExpertsConfig, LayerConfig, TargetConfig
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.quantised import BLOCK, FP8, GROUP, INT4

Where = Callable[[str], bool]
nowhere: Where = lambda name: False


def decoder(
    config: TargetConfig,
    layer_table: Callable[[str, str, LayerConfig], Table],
    prefix: str = "model",
    head: str = "lm_head",
) -> Table:
    """Embedding, layers, final norm and head under Hugging Face's names.

    Args:
        layer_table: of one layer, given the paths of its parameters and of its tensors.
        prefix: of all tensors but the head's.
        head: name of that.
    """
    D = config.hidden_size
    table: Table = {
        "embed_tokens": copied(f"{prefix}.embed_tokens.weight", config.vocab_size, D),
        "norm/weight": copied(f"{prefix}.norm.weight", D),
    }
    if not config.tie_word_embeddings:
        table["lm_head"] = copied(f"{head}.weight", config.vocab_size, D)
    for i, layer in enumerate(config.layers):
        table |= layer_table(f"layers_{i}", f"{prefix}.layers.{i}", layer)
    return table


def uniform(config: TargetConfig, layout: Layout = WHOLE, *, qk_norm: bool, output_bias: bool | None = None) -> Table:
    """A decoder whose layers are all as `decoder_layer` has them, with an MLP or with experts.

    Args:
        qk_norm, output_bias: see `attention`.
    """

    def layer_table(path: str, prefix: str, layer: LayerConfig) -> Table:
        D, fp8, bias = config.hidden_size, config.in_fp8, config.attention_bias
        how = {"bias": bias, "qk_norm": qk_norm, "output_bias": output_bias, "mlp_bias": config.mlp_bias}
        table = decoder_layer(path, prefix, D, layer, layout, fp8=fp8, **how)
        if layer.experts:
            table |= experts(f"{path}/experts", f"{prefix}.mlp", D, layer.experts, layout, fp8=fp8)
        return table

    return decoder(config, layer_table)


def ignored(config: TargetConfig) -> tuple[str, ...]:
    """Patterns of the names of tensors that published checkpoints carry and nobody reads."""
    return ("*rotary_emb.inv_freq", *(("*lm_head.weight",) if config.tie_word_embeddings else ()))


def decoder_layer(
    path: str,
    prefix: str,
    width: int,
    layer: LayerConfig,
    layout: Layout,
    *,
    bias: bool,
    qk_norm: bool,
    output_bias: bool | None = None,
    mlp_bias: bool = False,
    fuse_qkv: bool = True,
    fp8: Where = nowhere,
) -> Table:
    """A pre-norm decoder layer under Hugging Face's names: attention, and SwiGLU unless the layer has experts.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        width: of the model.
        bias, qk_norm, output_bias, fuse_qkv: see `attention`.
        mlp_bias: whether the products of the MLP have one.
        fp8: which modules, by name, have weights in FP8 with block scales, which then stay so.
    """
    how = {"bias": bias, "output_bias": output_bias, "qk_norm": qk_norm, "fuse_qkv": fuse_qkv}
    table = norms(path, prefix, width, "input_layernorm", "post_attention_layernorm")
    table |= attention(f"{path}/self_attn", f"{prefix}.self_attn", width, layer.attention, layout, fp8=fp8, **how)
    if layer.experts is None:
        inner = layer.intermediate_size
        table |= swiglu(f"{path}/mlp", f"{prefix}.mlp", width, inner, layout, bias=mlp_bias, fp8=fp8)
    return table


def norms(path: str, prefix: str, size: int, *names: str) -> Table:
    """The weights of norms of these names."""
    return {f"{path}/{name}/weight": copied(f"{prefix}.{name}.weight", size) for name in names}


def attention(
    path: str,
    prefix: str,
    width: int,
    config: AttentionConfig,
    layout: Layout,
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    qk_norm: bool = False,
    values_are_keys: bool = False,
    gate: bool = False,
    fuse_qkv: bool = True,
    fp8: Where = nowhere,
) -> Table:
    """`models.attention.Attention` under Hugging Face's names.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        width: of the model.
        bias, output_bias, values_are_keys, gate: see `Attention`. The rows of a query head and of its gate are stored
            one after the other.
        qk_norm: whether every query and key head has a norm.
        fuse_qkv: whether keys, values and their norm belong to the layer; else they live elsewhere.
        fp8: see `decoder_layer`.
    """
    N, K, H, copies = config.num_heads, config.num_kv_heads, config.head_dim, layout.copies(config.num_kv_heads)
    outputs = [Outputs(f"{prefix}.q_proj", N * H)]
    if gate:
        halves = [[2 * H * head + H * half + i for head in range(N) for i in range(H)] for half in (0, 1)]
        outputs = [Outputs(f"{prefix}.q_proj", 2 * N * H, 1, rows) for rows in halves]
    if fuse_qkv:
        outputs += [Outputs(f"{prefix}.{x}_proj", K * H, copies) for x in ("k" if values_are_keys else "kv")]
    projection = f"{path}/qkv_proj" if fuse_qkv else f"{path}/q_proj"
    table: Table = {
        f"{projection}/weight": linear(outputs, width, layout.shards, fp8=fp8),
        f"{path}/o_proj/weight": linear([Outputs(f"{prefix}.o_proj", width)], N * H, fp8=fp8),
    }
    if qk_norm:
        table |= norms(path, prefix, H, *(("q_norm", "k_norm") if fuse_qkv else ("q_norm",)))
    if bias:
        biases = [Section(Stored(f"{x.name}.bias", (x.size,)), x.order, x.copies) for x in outputs]
        table[f"{projection}/bias"] = fused(biases, layout.shards)
    if bias if output_bias is None else output_bias:
        table[f"{path}/o_proj/bias"] = copied(f"{prefix}.o_proj.bias", width)
    return table


def swiglu(
    path: str, prefix: str, width: int, inner: int, layout: Layout, *, bias: bool = False, fp8: Where = nowhere
) -> Table:
    """An MLP of gate, up and down under Hugging Face's names.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        bias, fp8: see `decoder_layer`.
    """
    both = [(f"{prefix}.{name}_proj", inner, 1) for name in ("gate", "up")]
    table: Table = {
        f"{path}/gate_up_proj/weight": linear(both, width, layout.shards, fp8=fp8),
        f"{path}/down_proj/weight": linear([(f"{prefix}.down_proj", width, 1)], inner, fp8=fp8),
    }
    if bias:
        biases = [Section(Stored(f"{name}.bias", (size,))) for name, size, _ in both]
        table[f"{path}/gate_up_proj/bias"] = fused(biases, layout.shards)
        table[f"{path}/down_proj/bias"] = copied(f"{prefix}.down_proj.bias", width)
    return table


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


def linear(
    layers: Sequence[tuple[str, int, int] | Outputs], width: int, shards: int = 1, *, fp8: Where = nowhere
) -> Leaf | QuantisedLeaf:
    """The weight of a product, whose outputs are those of several layers one after the other.

    Args:
        width: inputs.
        shards: see `fused`.
        fp8: which layers are stored in FP8 with block scales. They stay so if all of them are; else they are
            dequantised as they are read.
    """
    every = [layer if isinstance(layer, Outputs) else Outputs(*layer) for layer in layers]
    if not all(fp8(layer.name) for layer in every):
        return fused(_plain(every, width, fp8), shards)
    values, scale = _in_fp8(every, width, shards)
    return QuantisedLeaf(fused(values, shards, "float8_e4m3fn"), fused(scale, shards, "float32"), FP8)


def _plain(layers: Sequence[Outputs], width: int, fp8: Where) -> list[Section]:
    def source(layer: Outputs) -> Source:
        name, shape = f"{layer.name}.weight", (layer.size, width)
        return BlockScaled(name, f"{name}_scale_inv", shape, (BLOCK, BLOCK)) if fp8(layer.name) else Stored(name, shape)

    return [Section(source(layer), layer.order, layer.copies) for layer in layers]


def _in_fp8(layers: Sequence[Outputs], width: int, shards: int) -> tuple[list[Section], list[Section]]:
    """Values and scales. Where blocks end in the middle of what is joined, or outputs change their block, each output
    gets the scales of its block."""
    sizes = [layer.size for layer in layers]
    ragged = len(sizes) > 1 and any(size % BLOCK for size in (sizes if shards > 1 else sizes[:-1]))
    moved = any(to // BLOCK != of // BLOCK for layer in layers for to, of in enumerate(layer.order or ()))
    values, scales = list[Section](), list[Section]()
    for layer in layers:
        name, order = f"{layer.name}.weight", range(layer.size) if layer.order is None else layer.order
        values.append(Section(Stored(name, (layer.size, width), ("F8_E4M3",)), layer.order, layer.copies))
        blocks = Stored(f"{name}_scale_inv", (-(-layer.size // BLOCK), -(-width // BLOCK)))
        scales.append(Section(blocks, [of // BLOCK for of in order] if ragged or moved else None, layer.copies))
    return values, scales


def _in_int4(layers: Sequence[Outputs], width: int) -> tuple[list[Section], list[Section]]:
    """Values and scales."""
    if width % GROUP:
        raise ValueError(f"{layers[0].name}: INT4 has groups of {GROUP} inputs, and {width} are no multiple")
    return (
        [Section(Packed(f"{layer.name}.weight", (layer.size, width // 8), 8)) for layer in layers],
        [Section(Stored(f"{layer.name}.weight_scale", (layer.size, width // GROUP))) for layer in layers],
    )


def experts(
    path: str,
    prefix: str,
    width: int,
    config: ExpertsConfig,
    layout: Layout,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    correction: str = "e_score_correction_bias",
    fp8: Where = nowhere,
    int4: bool = False,
) -> Table:
    """Router and experts that are stored one by one.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        names: of gate, up and down.
        correction: name of the bias to choose by.
        fp8: which modules, by name, have weights in FP8 with block scales. They stay so if all experts have.
        int4: whether the experts are stored in INT4, and stay so.
    """
    gate, up, down = names
    inner, every = config.intermediate_size, [f"{prefix}.experts.{e}" for e in range(config.num_experts)]

    def weight(names: tuple[str, ...], outputs: int, inputs: int, shards: int) -> Leaf | QuantisedLeaf:
        joined = [[Outputs(f"{expert}.{name}", outputs) for name in names] for expert in every]
        if not int4 and not all(fp8(layer.name) for layers in joined for layer in layers):
            return fused_each([_plain(layers, inputs, fp8) for layers in joined], shards)
        how = _in_int4 if int4 else partial(_in_fp8, shards=shards)
        values, scale = zip(*(how(layers, inputs) for layers in joined), strict=True)
        dtypes, kind = (("int32", None), INT4) if int4 else (("float8_e4m3fn", "float32"), FP8)
        return QuantisedLeaf(fused_each(values, shards, dtypes[0]), fused_each(scale, shards, dtypes[1]), kind)

    table: Table = {
        f"{path}/router": copied(f"{prefix}.gate.weight", config.num_experts, width),
        f"{path}/gate_up_proj": weight((gate, up), inner, width, layout.inner),
        f"{path}/down_proj": weight((down,), width, inner, 1),
    }
    if config.correction_bias:
        table[f"{path}/correction_bias"] = copied(f"{prefix}.{correction}", config.num_experts, dtype="float32")
    return table


def stored_together(path: str, prefix: str, width: int, config: ExpertsConfig, layout: Layout) -> Table:
    """Experts without their router: gate and up of all of them are one tensor, and down of all of them another.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
    """
    E, inner, parts, pieces = config.num_experts, config.intermediate_size, layout.inner, []
    source, count = Stored(f"{prefix}.gate_up_proj", (E, 2 * inner, width)), inner // layout.inner
    for place in range(2 * parts):  # gate and up of the first part, then of the next
        first = place % 2 * inner + place // 2 * count
        index = slice(0, E), slice(place * count, (place + 1) * count), slice(0, width)
        pieces.append(Part(source, index, (slice(None), slice(first, first + count))))
    down = copied(f"{prefix}.down_proj", E, width, inner)
    return {f"{path}/gate_up_proj": Leaf(source.shape, tuple(pieces)), f"{path}/down_proj": down}


def alternating(source: Source, shape: tuple[int, ...], parts: int, axis: int = 1, dtype: str | None = None) -> Leaf:
    """Gate and up of all experts, [E, 2I, ...], from a tensor in which their rows take turns, as in gpt-oss.

    Args:
        shape: of the parameter.
        parts: see `fused`.
        axis: of the tensor, along which they do; a last one becomes the second.
    """
    E, both, *rest = shape
    count, pieces = both // 2 // parts, []
    for place in range(2 * parts):
        first = place % 2 + place // 2 * count * 2
        rows = slice(first, first + 2 * count, 2)
        take = [slice(None)] * len(shape)
        take[axis] = rows
        order = None if axis == 1 else (0, 2, 1)
        index = slice(0, E), slice(place * count, (place + 1) * count), *(slice(0, size) for size in rest)
        pieces.append(Part(source, index, tuple(take), order))
    return Leaf(shape, tuple(pieces), dtype)
