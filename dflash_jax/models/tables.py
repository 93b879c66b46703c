"""Checkpoint tensors of the layers that many families share."""

from dflash_jax.checkpoint import Section, Stored, Table, copied, fused
from dflash_jax.config import LayerConfig
from dflash_jax.mesh import Layout


def decoder_layer(
    path: str,
    prefix: str,
    width: int,
    layer: LayerConfig,
    layout: Layout,
    *,
    bias: bool,
    qk_norm: bool,
    fuse_qkv: bool = True,
) -> Table:
    """A pre-norm decoder layer with attention and SwiGLU under Hugging Face's names.

    Args:
        path, prefix: of the parameters, and of the checkpoint tensors.
        width: of the model.
        bias: whether the projections of attention have one.
        qk_norm: whether query and key heads have a norm.
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

    gate_up = [Section(Stored(f"{mlp}.{name}_proj.weight", (inner, width))) for name in ("gate", "up")]
    table: Table = {
        "input_layernorm/weight": copied(f"{prefix}.input_layernorm.weight", width),
        "post_attention_layernorm/weight": copied(f"{prefix}.post_attention_layernorm.weight", width),
        f"self_attn/{projection}/weight": fused(each("weight", width), layout.shards),
        "self_attn/o_proj/weight": copied(f"{attention}.o_proj.weight", width, queries),
        "mlp/gate_up_proj/weight": fused(gate_up, layout.shards),
        "mlp/down_proj/weight": copied(f"{mlp}.down_proj.weight", width, inner),
    }
    for name in ("q_norm", "k_norm") if fuse_qkv else ("q_norm",):
        if qk_norm:
            table[f"self_attn/{name}/weight"] = copied(f"{attention}.{name}.weight", c.head_dim)
    if bias:
        table[f"self_attn/{projection}/bias"] = fused(each("bias"), layout.shards)
        table["self_attn/o_proj/bias"] = copied(f"{attention}.o_proj.bias", width)
    return {f"{path}/{name}": leaf for name, leaf in table.items()}
