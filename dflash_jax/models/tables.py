"""Checkpoint tensors of what many families share: the decoder, and layers with attention and SwiGLU."""

from collections.abc import Callable

from dflash_jax.checkpoint import Leaf, Part, Section, Source, Stored, Table, copied, fused, stacked
from dflash_jax.config import ExpertsConfig, LayerConfig, TargetConfig
from dflash_jax.mesh import Layout


def decoder(config: TargetConfig, layer: Callable[[str, str, LayerConfig], Table], prefix: str = "model") -> Table:
    """Embedding, layers, final norm and head under Hugging Face's names.

    Args:
        layer: the table of a layer, given the paths of its parameters and of its tensors.
        prefix: of all tensors but the head's.
    """
    D = config.hidden_size
    table: Table = {
        "embed_tokens": copied(f"{prefix}.embed_tokens.weight", config.vocab_size, D),
        "norm/weight": copied(f"{prefix}.norm.weight", D),
    }
    if not config.tie_word_embeddings:
        table["lm_head"] = copied("lm_head.weight", config.vocab_size, D)
    for i, each in enumerate(config.layers):
        table |= layer(f"layers_{i}", f"{prefix}.layers.{i}", each)
    return table


def ignored(config: TargetConfig) -> tuple[str, ...]:
    """Endings of tensors that published checkpoints carry and nobody reads."""
    return ("rotary_emb.inv_freq", *(("lm_head.weight",) if config.tie_word_embeddings else ()))


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
) -> Table:
    """A pre-norm decoder layer with attention and SwiGLU under Hugging Face's names.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        width: of the model.
        bias: whether the projections of attention have one.
        qk_norm: whether query and key heads have a norm.
        mlp_bias: whether the products of the MLP have one.
        fuse_qkv: whether keys, values and their norm belong to the layer; else they live elsewhere.
    """
    c, inner = layer.mixer, layer.intermediate_size
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    heads = [("q_proj", queries, 1)]
    if fuse_qkv:
        heads += [(name, keys, layout.copies(c.num_kv_heads)) for name in ("k_proj", "v_proj")]
    projection = "qkv_proj" if fuse_qkv else "q_proj"

    def each(kind: str, *rest: int) -> list[Section]:
        return [Section(Stored(f"{attention}.{n}.{kind}", (size, *rest)), copies=times) for n, size, times in heads]

    def gate_up(kind: str, *rest: int) -> list[Section]:
        return [Section(Stored(f"{mlp}.{name}_proj.{kind}", (inner, *rest))) for name in ("gate", "up")]

    table: Table = {
        "input_layernorm/weight": copied(f"{prefix}.input_layernorm.weight", width),
        "post_attention_layernorm/weight": copied(f"{prefix}.post_attention_layernorm.weight", width),
        f"self_attn/{projection}/weight": fused(each("weight", width), layout.shards),
        "self_attn/o_proj/weight": copied(f"{attention}.o_proj.weight", width, queries),
        "mlp/gate_up_proj/weight": fused(gate_up("weight", width), layout.shards),
        "mlp/down_proj/weight": copied(f"{mlp}.down_proj.weight", width, inner),
    }
    for name in ("q_norm", "k_norm") if fuse_qkv else ("q_norm",):
        if qk_norm:
            table[f"self_attn/{name}/weight"] = copied(f"{attention}.{name}.weight", c.head_dim)
    if bias:
        table[f"self_attn/{projection}/bias"] = fused(each("bias"), layout.shards)
        table["self_attn/o_proj/bias"] = copied(f"{attention}.o_proj.bias", width)
    if mlp_bias:
        table["mlp/gate_up_proj/bias"] = fused(gate_up("bias"), layout.shards)
        table["mlp/down_proj/bias"] = copied(f"{mlp}.down_proj.bias", width)
    return {f"{path}/{name}": leaf for name, leaf in table.items()}


def experts(path: str, prefix: str, width: int, config: ExpertsConfig, layout: Layout) -> Table:
    """Router and experts that are stored one by one, under Hugging Face's names."""
    inner, every = config.intermediate_size, [f"{prefix}.experts.{e}" for e in range(config.num_experts)]

    def gate_up(expert: str) -> list[Section]:
        return [Section(Stored(f"{expert}.{name}_proj.weight", (inner, width))) for name in ("gate", "up")]

    return {
        f"{path}/router": copied(f"{prefix}.gate.weight", config.num_experts, width),
        f"{path}/gate_up_proj": stacked([fused(gate_up(expert), layout.shards) for expert in every]),
        f"{path}/down_proj": stacked([copied(f"{expert}.down_proj.weight", width, inner) for expert in every]),
    }


def alternating(source: Source, shape: tuple[int, ...], shards: int, axis: int = 1, dtype: str | None = None) -> Leaf:
    """Gate and up of all experts, [E, 2I, ...], from a tensor in which their rows take turns, as in gpt-oss.

    Args:
        shape: of the parameter.
        axis: of the tensor, along which they do; a last one becomes the second.
    """
    E, both, *rest = shape
    count, parts = both // 2 // shards, []
    for place in range(2 * shards):
        first = place % 2 + place // 2 * count * 2
        rows = slice(first, first + 2 * count, 2)
        take = [slice(None)] * len(shape)
        take[axis] = rows
        order = None if axis == 1 else (0, 2, 1)
        index = slice(0, E), slice(place * count, (place + 1) * count), *(slice(0, size) for size in rest)
        parts.append(Part(source, index, tuple(take), order))
    return Leaf(shape, tuple(parts), dtype)
