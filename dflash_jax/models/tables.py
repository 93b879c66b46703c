"""Checkpoint tensors of what many families share: the decoder, attention, MLPs and experts."""

from collections.abc import Callable

from dflash_jax.checkpoint import Leaf, QuantisedLeaf, Section, Stored, Table, copied, fused, of_product
from dflash_jax.config import AttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, TargetConfig
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models.weights import Formats, Outputs, biases, linear, linears, plain

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
    D, V = config.hidden_size, config.vocab_size
    formats, tied = config.storage.of, config.tie_word_embeddings
    table: Table = {
        "embed_tokens": linear([Outputs(f"{prefix}.embed_tokens", V)], D, formats=formats, product=tied),
        "norm/weight": copied(f"{prefix}.norm.weight", D),
    }
    if not tied:
        table["lm_head"] = linear([Outputs(head, V)], D, formats=formats)
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
    D, formats = config.hidden_size, config.storage.of

    def layer_table(path: str, prefix: str, layer: LayerConfig) -> Table:
        table = decoder_layer(path, prefix, D, layer, layout, formats=formats)
        if layer.experts:
            table |= experts(
                f"{path}/experts", f"{prefix}.{moe}", D, layer.experts, layout, formats=formats, names=names
            )
        return table

    return decoder(config, layer_table)


def ignored(config: TargetConfig) -> tuple[str, ...]:
    """Patterns of the names of tensors that published checkpoints carry and nobody reads."""
    tied = ("*lm_head.weight",) if config.tie_word_embeddings else ()
    return ("*rotary_emb.inv_freq", *tied, *unread_scales(config))


def unread_scales(config: DecoderConfig) -> tuple[str, ...]:
    """Patterns of the names of scales of activations, and of keys and values in a cache, which are not quantized."""
    names = ("input", "activation", "output", "q", "k", "v", "kv")
    kinds = ("scale", "zero_point")
    return tuple(f"*.{name}_{kind}" for name in names for kind in kinds) if config.storage.rules else ()


def decoder_layer(
    path: str,
    prefix: str,
    width: int,
    layer: LayerConfig,
    layout: Layout,
    *,
    fuse_qkv: bool = True,
    formats: Formats = plain,
) -> Table:
    """A pre-norm decoder layer under Hugging Face's names: attention, and SwiGLU unless the layer has experts.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        width: of the model.
        fuse_qkv: see `attention`.
        formats: how the modules of these names are stored.
    """
    where, mlp = (f"{path}/self_attn", f"{prefix}.self_attn"), (f"{path}/mlp", f"{prefix}.mlp")
    table = norms(path, prefix, width, "input_layernorm", "post_attention_layernorm")
    table |= attention(*where, width, layer.attention, layout, fuse_qkv=fuse_qkv, formats=formats)
    if layer.experts is None:
        table |= swiglu(*mlp, width, layer.intermediate_size, layout, bias=layer.mlp_bias, formats=formats)
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
    formats: Formats = plain,
) -> Table:
    """`models.attention.Attention` under Hugging Face's names. The rows of a query head and of its gate are stored one
    after the other.

    Args:
        fuse_qkv: whether keys, values and their norm belong to the layer; else they live elsewhere.
        path, prefix, width, formats: see `decoder_layer`.
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
        f"{projection}/weight": linear(outputs, width, layout.shards, formats=formats),
        f"{path}/o_proj/weight": linear([Outputs(f"{prefix}.o_proj", width)], N * H, formats=formats),
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
    path: str, prefix: str, width: int, inner: int, layout: Layout, *, bias: bool = False, formats: Formats = plain
) -> Table:
    """An MLP of gate, up and down under Hugging Face's names.

    Args:
        bias: whether its products have one.
        path, prefix, width, formats: see `decoder_layer`.
    """
    both = [Outputs(f"{prefix}.{name}_proj", inner) for name in ("gate", "up")]
    table: Table = {
        f"{path}/gate_up_proj/weight": linear(both, width, layout.shards, formats=formats),
        f"{path}/down_proj/weight": linear([Outputs(f"{prefix}.down_proj", width)], inner, formats=formats),
    }
    if bias:
        table[f"{path}/gate_up_proj/bias"] = biases(both, layout.shards)
        table[f"{path}/down_proj/bias"] = copied(f"{prefix}.down_proj.bias", width)
    return table


def experts(
    path: str,
    prefix: str,
    width: int,
    config: ExpertsConfig,
    layout: Layout,
    *,
    names: tuple[str, str, str] = PROJECTIONS,
    correction: str = "e_score_correction_bias",
    formats: Formats = plain,
) -> Table:
    """Router and experts that are stored one by one.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        names: of gate, up and down.
        correction: name of the bias to choose by.
        formats: how the modules of these names are stored. Experts stay so if all are stored alike.
    """
    gate, up, down = names
    inner, every = config.intermediate_size, [f"{prefix}.experts.{e}" for e in range(config.num_experts)]

    def weight(names: tuple[str, ...], outputs: int, inputs: int, shards: int) -> Leaf | QuantisedLeaf:
        layers = [[Outputs(f"{expert}.{name}", outputs) for name in names] for expert in every]
        return linears(layers, inputs, shards, formats=formats)

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
        f"{path}/gate_up_proj": of_product(fused(halves, layout.inner, axis=1)),
        f"{path}/down_proj": of_product(copied(down, E, width, inner)),
    }
