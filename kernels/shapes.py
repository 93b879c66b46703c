"""The attention, in decoding and in training, and the experts of real models, for the conformance tests and the
hardware report."""

from typing import NamedTuple


class Shape(NamedTuple):
    """One call of `block_attention.attend`.

    Attributes:
        T, N, K, H: block positions, query heads, key-value heads, head dim.
        causal: whether the block is causal (targets) or sees all of itself (drafters).
        window: of a sliding layer.
        sinks: whether heads have an attention sink.
        softcap: of the scores.
        values: how many entries of the keys are values, the first ones (latent attention); None where values are apart.
    """

    T: int
    N: int
    K: int
    H: int
    causal: bool = True
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    values: int | None = None


SHAPES = {
    "qwen3-8b decode": Shape(1, 32, 8, 128),
    "qwen3-8b verify": Shape(16, 32, 8, 128),  # and Qwen3-4B
    "qwen3-8b draft": Shape(16, 32, 8, 128, causal=False),  # and Qwen3-4B, Qwen3.5-4B
    "qwen3-coder-30b-a3b verify": Shape(16, 32, 4, 128),  # and its drafter, Qwen3.5-35B-A3B's
    "llama-3.1-8b verify": Shape(10, 32, 8, 128),
    "gpt-oss decode": Shape(1, 64, 8, 64, sinks=True),
    "gpt-oss verify": Shape(8, 64, 8, 64, sinks=True),
    "gpt-oss verify, sliding": Shape(8, 64, 8, 64, sinks=True, window=128),
    "qwen3.5-9b verify": Shape(16, 16, 4, 256),
    "gemma-4-31b verify, sliding": Shape(16, 32, 16, 256, window=1024),
    "gemma-4-31b verify, global": Shape(16, 32, 4, 512),
    "gemma-4-31b draft, sliding": Shape(16, 64, 8, 128, causal=False, window=2048),
    "gemma-2-9b decode": Shape(1, 16, 8, 256, softcap=50.0),
    "kimi-k2.5 decode": Shape(1, 64, 1, 576, values=512),
    "kimi-k2.5 verify": Shape(8, 64, 1, 576, values=512),
    "qwen3-8b prefill": Shape(512, 32, 8, 128),
}


class Anchored(NamedTuple):
    """One call of `anchored_attention.attend_anchored`: a row of a batch in training.

    Attributes:
        A, T, F: blocks, and queries and keys of each.
        N, K, H: query heads, key-value heads, head dim.
        S: positions of the row.
        causal: whether the blocks are.
        window: of a sliding layer.
    """

    A: int
    T: int
    F: int
    N: int
    K: int
    H: int
    S: int
    causal: bool = False
    window: int | None = None


TRAINING = {
    "qwen3-8b": Anchored(512, 16, 16, 32, 8, 128, 3072),
    "qwen3-8b, long rows": Anchored(512, 16, 16, 32, 8, 128, 8192),
    "llama-3.1-8b": Anchored(512, 10, 10, 32, 8, 128, 3072),
    "gpt-oss-20b, sliding": Anchored(512, 8, 8, 64, 8, 64, 3072, window=128),
    "gemma-4-31b, sliding": Anchored(512, 16, 16, 64, 8, 128, 8192, window=2048),
    "causal blocks": Anchored(512, 7, 7, 32, 8, 128, 3072, causal=True),
    "a later pass": Anchored(3072, 1, 4, 32, 8, 128, 3072, causal=True),  # of EAGLE-3, in which every position is one
}


class Product(NamedTuple):
    """One product of experts: `grouped_matmul` of rows with the weights of their groups.

    Attributes:
        rows: of all groups together: tokens times the experts of each.
        groups, outputs, inputs: of the weights.
        stored: in what: "MXFP4", "FP8" (blocks of 128 x 128), "INT8" (a scale for each output); empty as plain numbers.
    """

    rows: int
    groups: int
    outputs: int
    inputs: int
    stored: str = ""


PRODUCTS = {
    "gpt-oss-20b up, decode": Product(4, 32, 5760, 2880, "MXFP4"),
    "gpt-oss-20b up, verify": Product(32, 32, 5760, 2880, "MXFP4"),
    "gpt-oss-20b down, verify": Product(32, 32, 2880, 2880, "MXFP4"),
    "qwen3-coder-30b-a3b up, decode": Product(8, 128, 1536, 2048),
    "qwen3-coder-30b-a3b up, verify": Product(128, 128, 1536, 2048),
    "qwen3-coder-30b-a3b down, verify": Product(128, 128, 2048, 768),
    "qwen3-coder-30b-a3b up, verify, int8": Product(128, 128, 1536, 2048, "INT8"),
    "minimax-m2 up, verify, one of 8 devices": Product(16, 32, 3072, 3072, "FP8"),
}
