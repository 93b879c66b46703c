"""Checkpoint tensors of what many families share: the decoder, attention, MLPs and experts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from dflash_jax.checkpoint import (
    BlockScaled,
    Leaf,
    Part,
    QuantisedLeaf,
    Section,
    Source,
    Stored,
    Table,
    copied,
    fused,
    stacked,
)
from dflash_jax.config import ExpertsConfig, LayerConfig, TargetConfig
from dflash_jax.mesh import Layout
from dflash_jax.quantised import BLOCK, FP8

Where = Callable[[str], bool]
nowhere: Where = lambda name: False


def decoder(
    config: TargetConfig, layer: Callable[[str, str, LayerConfig], Table], prefix: str = "model", head: str = "lm_head"
) -> Table:
    """Embedding, layers, final norm and head under Hugging Face's names.

    Args:
        layer: the table of a layer, given the paths of its parameters and of its tensors.
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
    for i, each in enumerate(config.layers):
        table |= layer(f"layers_{i}", f"{prefix}.layers.{i}", each)
    return table


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
    mlp_bias: bool = False,
    fuse_qkv: bool = True,
    fp8: Where = nowhere,
) -> Table:
    """A pre-norm decoder layer under Hugging Face's names: attention, and SwiGLU unless the layer has experts.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        width: of the model.
        bias: whether the projections of attention have one.
        qk_norm: whether query and key heads have a norm.
        mlp_bias: whether the products of the MLP have one.
        fuse_qkv: whether keys, values and their norm belong to the layer; else they live elsewhere.
        fp8: which modules, by name, have weights in FP8 with block scales, which then stay so.
    """
    c = layer.attention
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention = f"{prefix}.self_attn"
    heads = [("q_proj", queries, 1)]
    if fuse_qkv:
        heads += [(name, keys, layout.copies(c.num_kv_heads)) for name in ("k_proj", "v_proj")]
    projection = "qkv_proj" if fuse_qkv else "q_proj"

    def each(kind: str, *rest: int) -> list[Section]:
        return [Section(Stored(f"{attention}.{n}.{kind}", (size, *rest)), copies=times) for n, size, times in heads]

    def weight(names: Sequence[tuple[str, int, int]], width: int) -> Leaf | QuantisedLeaf:
        return linear(names, width, layout.shards, fp8=fp8)

    table: Table = {
        "input_layernorm/weight": copied(f"{prefix}.input_layernorm.weight", width),
        "post_attention_layernorm/weight": copied(f"{prefix}.post_attention_layernorm.weight", width),
        f"self_attn/{projection}/weight": weight([(f"{attention}.{n}", size, c) for n, size, c in heads], width),
        "self_attn/o_proj/weight": linear([(f"{attention}.o_proj", width, 1)], queries, fp8=fp8),
    }
    if layer.experts is None:
        table |= swiglu("mlp", f"{prefix}.mlp", width, layer.intermediate_size, layout, bias=mlp_bias, fp8=fp8)
    for name in ("q_norm", "k_norm") if fuse_qkv else ("q_norm",):
        if qk_norm:
            table[f"self_attn/{name}/weight"] = copied(f"{attention}.{name}.weight", c.head_dim)
    if bias:
        table[f"self_attn/{projection}/bias"] = fused(each("bias"), layout.shards)
        table["self_attn/o_proj/bias"] = copied(f"{attention}.o_proj.bias", width)
    return {f"{path}/{name}": leaf for name, leaf in table.items()}


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


def linear(
    names: Sequence[tuple[str, int, int]],
    width: int,
    shards: int = 1,
    *,
    fp8: Where = nowhere,
    packed: bool = True,
) -> Leaf | QuantisedLeaf:
    """The weight of a product, whose outputs are those of several layers one after the other.

    Args:
        names: of each layer: its name, its outputs, and how often they are there (see `Section`).
        width: inputs.
        shards: see `fused`.
        fp8: which layers are stored in FP8 with block scales.
        packed: whether they stay so if all of them are; else they are dequantised as they are read.
    """
    weight, scale = "{}.weight", "{}.weight_scale_inv"
    if not packed or not all(fp8(name) for name, _, _ in names):

        def source(name: str, *shape: int) -> Source:
            if fp8(name):
                return BlockScaled(weight.format(name), scale.format(name), shape, (BLOCK, BLOCK))
            return Stored(weight.format(name), shape)

        return fused([Section(source(name, size, width), copies=times) for name, size, times in names], shards)
    # Where blocks end in the middle of what is joined, each output gets the scales of its block.
    joined = len(names) > 1 and any(size % BLOCK for _, size, _ in names)
    values, scales = list[Section](), list[Section]()
    for name, size, times in names:
        values.append(Section(Stored(weight.format(name), (size, width), ("F8_E4M3",)), copies=times))
        blocks = Stored(scale.format(name), (-(-size // BLOCK), -(-width // BLOCK)))
        rows = [row // BLOCK for row in range(size)] if joined else None
        scales.append(Section(blocks, rows, times))
    of = lambda sections, dtype: replace(fused(sections, shards), dtype=dtype)
    return QuantisedLeaf(of(values, "float8_e4m3fn"), of(scales, "float32"), FP8)


def experts(
    path: str,
    prefix: str,
    width: int,
    config: ExpertsConfig,
    layout: Layout,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    fp8: Where = nowhere,
) -> Table:
    """Router and experts that are stored one by one.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        names: of gate, up and down.
        fp8: which modules, by name, have weights in FP8 with block scales. They stay so if all experts have.
    """
    gate, up, down = names
    inner, every = config.intermediate_size, [f"{prefix}.experts.{e}" for e in range(config.num_experts)]

    def stack(names: Sequence[str], outputs: int, inputs: int, shards: int = 1) -> Leaf | QuantisedLeaf:
        """The weights of all experts, each that of some layers one after the other."""
        layers = [[(f"{expert}.{name}", outputs, 1) for name in names] for expert in every]
        packed = all(fp8(name) for each in layers for name, _, _ in each)
        return _stacked([linear(each, inputs, shards, fp8=fp8, packed=packed) for each in layers])

    table: Table = {
        f"{path}/router": copied(f"{prefix}.gate.weight", config.num_experts, width),
        f"{path}/gate_up_proj": stack((gate, up), inner, width, layout.inner),
        f"{path}/down_proj": stack((down,), width, inner),
    }
    if config.correction_bias:
        name = f"{prefix}.e_score_correction_bias"
        table[f"{path}/correction_bias"] = copied(name, config.num_experts, dtype="float32")
    return table


def stored_together(prefix: str, width: int, config: ExpertsConfig, layout: Layout) -> Table:
    """Gate and up, and down, of all experts, each one tensor; without the experts' path.

    Args:
        prefix: of the tensors.
    """
    E, inner, parts, pieces = config.num_experts, config.intermediate_size, layout.inner, []
    source, count = Stored(f"{prefix}.gate_up_proj", (E, 2 * inner, width)), inner // layout.inner
    for place in range(2 * parts):  # gate and up of the first part, then of the next
        first = place % 2 * inner + place // 2 * count
        index = slice(0, E), slice(place * count, (place + 1) * count), slice(0, width)
        pieces.append(Part(source, index, (slice(None), slice(first, first + count))))
    down = copied(f"{prefix}.down_proj", E, width, inner)
    return {"gate_up_proj": Leaf(source.shape, tuple(pieces)), "down_proj": down}


def _stacked(leaves: Sequence[Leaf | QuantisedLeaf]) -> Leaf | QuantisedLeaf:
    packed = [leaf for leaf in leaves if isinstance(leaf, QuantisedLeaf)]
    if packed:
        values, scale = stacked([leaf.values for leaf in packed]), stacked([leaf.scale for leaf in packed])
        return QuantisedLeaf(values, scale, packed[0].kind)
    return stacked([leaf for leaf in leaves if isinstance(leaf, Leaf)])


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
