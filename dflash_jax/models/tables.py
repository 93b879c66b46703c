"""Checkpoint tensors of what many families share: the decoder, attention, MLPs and experts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from dflash_jax.checkpoint import (
    BlockScaled,
    Leaf,
    Packed,
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
PROJECTIONS = "gate_proj", "up_proj", "down_proj"


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


def uniform(
    config: TargetConfig, layout: Layout = WHOLE, *, moe: str = "mlp", names: tuple[str, str, str] = PROJECTIONS
) -> Table:
    """A decoder whose layers are all as `decoder_layer` has them, with an MLP or with experts.

    Args:
        moe: name of the experts' module.
        names: see `experts`.
    """
    D, fp8 = config.hidden_size, config.in_fp8

    def layer_table(path: str, prefix: str, layer: LayerConfig) -> Table:
        table = decoder_layer(path, prefix, D, layer, layout, fp8=fp8)
        if layer.experts:
            table |= experts(f"{path}/experts", f"{prefix}.{moe}", D, layer.experts, layout, fp8=fp8, names=names)
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
    fuse_qkv: bool = True,
    fp8: Where = nowhere,
) -> Table:
    """A pre-norm decoder layer under Hugging Face's names: attention, and SwiGLU unless the layer has experts.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        width: of the model.
        fuse_qkv: see `attention`.
        fp8: which modules, by name, have weights in FP8 with block scales, which then stay so.
    """
    where, mlp = (f"{path}/self_attn", f"{prefix}.self_attn"), (f"{path}/mlp", f"{prefix}.mlp")
    table = norms(path, prefix, width, "input_layernorm", "post_attention_layernorm")
    table |= attention(*where, width, layer.attention, layout, fuse_qkv=fuse_qkv, fp8=fp8)
    if layer.experts is None:
        table |= swiglu(*mlp, width, layer.intermediate_size, layout, bias=layer.mlp_bias, fp8=fp8)
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
    fuse_qkv: bool = True,
    fp8: Where = nowhere,
) -> Table:
    """`models.attention.Attention` under Hugging Face's names. The rows of a query head and of its gate are stored one
    after the other.

    Args:
        fuse_qkv: whether keys, values and their norm belong to the layer; else they live elsewhere.
        path, prefix, width, fp8: see `decoder_layer`.
    """
    N, K, H, copies = config.num_heads, config.num_kv_heads, config.head_dim, layout.copies(config.num_kv_heads)
    outputs = [Outputs(f"{prefix}.q_proj", N * H)]
    if config.gate:
        halves = [[2 * H * head + H * half + i for head in range(N) for i in range(H)] for half in (0, 1)]
        outputs = [Outputs(f"{prefix}.q_proj", 2 * N * H, 1, rows) for rows in halves]
    if fuse_qkv:
        outputs += [Outputs(f"{prefix}.{x}_proj", K * H, copies) for x in ("k" if config.values_are_keys else "kv")]
    projection = f"{path}/qkv_proj" if fuse_qkv else f"{path}/q_proj"
    table: Table = {
        f"{projection}/weight": linear(outputs, width, layout.shards, fp8=fp8),
        f"{path}/o_proj/weight": linear([Outputs(f"{prefix}.o_proj", width)], N * H, fp8=fp8),
    }
    if config.qk_norm and config.qk_norm_per_head:
        table |= norms(path, prefix, H, *(("q_norm", "k_norm") if fuse_qkv else ("q_norm",)))
    elif config.qk_norm:
        keys = Section(Stored(f"{prefix}.k_norm.weight", (K * H,)), copies=copies)
        table |= norms(path, prefix, N * H, "q_norm") | {f"{path}/k_norm/weight": fused([keys], layout.shards)}
    if config.bias:
        table[f"{projection}/bias"] = biases(outputs, layout.shards)
        if config.output_bias:
            table[f"{path}/o_proj/bias"] = copied(f"{prefix}.o_proj.bias", width)
    if config.sinks:
        table[f"{path}/sinks"] = copied(f"{prefix}.sinks", N)
    return table


def swiglu(
    path: str, prefix: str, width: int, inner: int, layout: Layout, *, bias: bool = False, fp8: Where = nowhere
) -> Table:
    """An MLP of gate, up and down under Hugging Face's names.

    Args:
        bias: whether its products have one.
        path, prefix, width, fp8: see `decoder_layer`.
    """
    both = [Outputs(f"{prefix}.{name}_proj", inner) for name in ("gate", "up")]
    table: Table = {
        f"{path}/gate_up_proj/weight": linear(both, width, layout.shards, fp8=fp8),
        f"{path}/down_proj/weight": linear([Outputs(f"{prefix}.down_proj", width)], inner, fp8=fp8),
    }
    if bias:
        table[f"{path}/gate_up_proj/bias"] = biases(both, layout.shards)
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


def linear(layers: Sequence[Outputs], width: int, shards: int = 1, *, fp8: Where = nowhere) -> Leaf | QuantisedLeaf:
    """The weight of a product, whose outputs are those of several layers one after the other.

    Args:
        width: inputs.
        shards: see `fused`.
        fp8: which layers are stored in FP8 with block scales. They stay so if all of them are; else they are
            dequantised as they are read.
    """
    if not all(fp8(layer.name) for layer in layers):
        return fused(_plain(layers, width, fp8), shards)
    values, scale = _in_fp8(layers, width, shards)
    return QuantisedLeaf(fused(values, shards, "float8_e4m3fn"), fused(scale, shards, "float32"), FP8)


def biases(layers: Sequence[Outputs], shards: int) -> Leaf:
    """The biases of what has its weight from `linear`."""
    return fused([Section(Stored(f"{x.name}.bias", (x.size,)), x.order, x.copies) for x in layers], shards)


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
    names: tuple[str, str, str] = PROJECTIONS,
    correction: str = "e_score_correction_bias",
    fp8: Where = nowhere,
) -> Table:
    """Router and experts that are stored one by one.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        names: of gate, up and down.
        correction: name of the bias to choose by.
        fp8: which modules, by name, have weights in FP8 with block scales. They stay so if all experts have.
    """
    (gate, up, down), int4 = names, config.stored == "INT4"
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
    E, inner = config.num_experts, config.intermediate_size
    both, down = Stored(f"{prefix}.gate_up_proj", (E, 2 * inner, width)), f"{prefix}.down_proj"
    halves = [Section(both, range(first, first + inner)) for first in (0, inner)]
    return {
        f"{path}/gate_up_proj": fused(halves, layout.inner, axis=1),
        f"{path}/down_proj": copied(down, E, width, inner),
    }
