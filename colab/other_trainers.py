"""Parameters of other JAX trainers under the names that `Engine.update_from_tensors` takes, for dense Qwen3 models.

Both trainers keep the matrices of a checkpoint turned over, and those of attention with an axis of heads. Neither is
needed here: `params` is a nested dict of arrays, as `nnx.to_pure_dict(nnx.state(model, nnx.Param))` gives it for tunix.
"""

import re

import jax


def flat(params):
    """The arrays of a nested dict by their path."""
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def turned(x, inputs):
    """A matrix [outputs, inputs] of a kernel whose first `inputs` axes are what is summed over."""
    summed = 1
    for size in x.shape[:inputs]:
        summed *= size
    return x.reshape(summed, -1).T


TUNIX = {
    "embedder/input_embedding": "model.embed_tokens.weight",
    "final_norm/w": "model.norm.weight",
    "lm_head/w": "lm_head.weight",
}


def from_tunix(params):
    """Of `tunix.models.qwen3`."""
    tensors = {}
    for path, x in flat(params).items():  # layers/0/attn/q_proj/w, layers/0/mlp/up_proj/kernel, layers/0/attn/q_norm/w
        name = re.sub(r"/(w|kernel)$", ".weight", path).replace("/attn/", "/self_attn/").replace("/", ".")
        matrix = "_proj" in path or path == "lm_head/w"
        tensors[TUNIX.get(path, f"model.{name}")] = turned(x, 2 if "o_proj" in path else 1) if matrix else x
    return tensors


MAXTEXT = {
    "pre_self_attention_layer_norm/scale": "input_layernorm",
    "post_self_attention_layer_norm/scale": "post_attention_layernorm",
    "self_attention/query/kernel": "self_attn.q_proj",
    "self_attention/key/kernel": "self_attn.k_proj",
    "self_attention/value/kernel": "self_attn.v_proj",
    "self_attention/out/kernel": "self_attn.o_proj",
    "self_attention/query_norm/scale": "self_attn.q_norm",
    "self_attention/key_norm/scale": "self_attn.k_norm",
    "mlp/wi_0/kernel": "mlp.gate_proj",
    "mlp/wi_1/kernel": "mlp.up_proj",
    "mlp/wo/kernel": "mlp.down_proj",
}


def from_maxtext(params, vocab_size, scan_axis=1):
    """Of MaxText (`qwen3-0.6b` to `qwen3-14b`), given its `params`.

    Args:
        vocab_size: of the model; the table may be padded beyond it.
        scan_axis: of the layers, where they are stacked (`scan_layers=true`, `param_scan_axis`).
    """
    tensors = {}
    for path, x in flat(params).items():
        if path == "token_embedder/embedding":
            tensors["model.embed_tokens.weight"] = x[:vocab_size]
        elif path == "decoder/decoder_norm/scale":
            tensors["model.norm.weight"] = x
        elif path == "decoder/logits_dense/kernel":
            tensors["lm_head.weight"] = turned(x, 1)[:vocab_size]
        else:  # decoder/layers_0/mlp/wo/kernel, or decoder/layers/mlp/wo/kernel of all layers
            found = re.fullmatch(r"decoder/layers(?:_(\d+))?/(.+)", path)
            if not found or found[2] not in MAXTEXT:
                raise ValueError(f"no parameter of a dense Qwen3: {path}")
            layer, kind = found.groups()
            inputs = 2 if kind == "self_attention/out/kernel" else 1
            matrix = lambda x, inputs=inputs, kind=kind: turned(x, inputs) if kind.endswith("kernel") else x
            layers = {layer: x} if layer else {i: x.take(i, axis=scan_axis) for i in range(x.shape[scan_axis])}
            tensors |= {f"model.layers.{i}.{MAXTEXT[kind]}.weight": matrix(one) for i, one in layers.items()}
    return tensors
