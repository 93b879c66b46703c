"""Tiny GGUF files, made with the `gguf` package."""

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, quantize

WIDTH, INNER, DEPTH, HEADS, KV_HEADS, VOCAB = 64, 128, 3, 4, 2, 64
WORDS = [*"abcdefghijklmnopqrstuvwxyz", "ab", "abc"]
TOKENS = [*WORDS, *(f"<{i}>" for i in range(VOCAB - 2 - len(WORDS))), "<begin>", "<end>"]


def permuted(weight, heads):
    """Rows of rotary heads as llama.cpp stores them: of both halves in turns."""
    rest = weight.shape[1:]
    return weight.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(weight.shape)


def write(
    path, *, settings=None, extra=None, kinds=(Kind.Q8_0, Kind.Q4_1, Kind.F16), tied=True, tokenizer=True, end=VOCAB - 1
):
    """A random llama in the names of GGUF; returns its tensors in those of Hugging Face, as they are stored.

    Args:
        settings: of `llama.*`, in place of the default ones; None leaves one out.
        extra: more tensors.
        end: id of the end token.
        kinds: of the matrices, in turns.
    """
    rng, writer, expected = np.random.default_rng(0), GGUFWriter(path, "llama"), {}
    own = {
        "block_count": DEPTH,
        "context_length": 256,
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": WIDTH // HEADS,
    } | (settings or {})
    for name, value in own.items():
        if isinstance(value, str):
            writer.add_string(f"llama.{name}", value)
        elif isinstance(value, list):
            writer.add_array(f"llama.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"llama.{name}", value)
        elif value is not None:
            writer.add_uint32(f"llama.{name}", value)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * (VOCAB - 2) + [3, 3])
        writer.add_token_merges(["a b", "ab c"])
        writer.add_bos_token_id(VOCAB - 2)
        writer.add_eos_token_id(end)
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}<end>{% endfor %}")
    turn = iter(kinds * 100)

    def add(name, theirs, value, heads=0):
        kind = Kind.F32 if value.ndim == 1 else next(turn)
        stored = quantize(permuted(value, heads) if heads else value, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        expected[theirs] = value

    def matrix(rows, width):
        return (rng.standard_normal((rows, width)) / width**0.5).astype(np.float32)

    def norm():
        return (1 + 0.2 * rng.standard_normal(WIDTH)).astype(np.float32)

    add("token_embd.weight", "model.embed_tokens.weight", matrix(VOCAB, WIDTH))
    add("output_norm.weight", "model.norm.weight", norm())
    if not tied:
        add("output.weight", "lm_head.weight", matrix(VOCAB, WIDTH))
    keys = WIDTH // HEADS * KV_HEADS
    for i in range(DEPTH):
        ours, theirs = f"blk.{i}", f"model.layers.{i}"
        add(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", norm())
        add(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", norm())
        add(f"{ours}.attn_q.weight", f"{theirs}.self_attn.q_proj.weight", matrix(WIDTH, WIDTH), HEADS)
        add(f"{ours}.attn_k.weight", f"{theirs}.self_attn.k_proj.weight", matrix(keys, WIDTH), KV_HEADS)
        add(f"{ours}.attn_v.weight", f"{theirs}.self_attn.v_proj.weight", matrix(keys, WIDTH))
        add(f"{ours}.attn_output.weight", f"{theirs}.self_attn.o_proj.weight", matrix(WIDTH, WIDTH))
        for part, name, shape in (
            ("ffn_gate", "gate_proj", (INNER, WIDTH)),
            ("ffn_up", "up_proj", (INNER, WIDTH)),
            ("ffn_down", "down_proj", (WIDTH, INNER)),
        ):
            add(f"{ours}.{part}.weight", f"{theirs}.mlp.{name}.weight", matrix(*shape))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected
