"""Jobs for measurements of the engine under load: `python -m benchmarks.loads OUT` writes them.

    target, drafter   a small pair with random weights and 32,768 positions
    long.jsonl        prompts of 400 to 1,500 tokens, answers of 16
    short.jsonl       prompts of 20 to 120 tokens, answers of 96
    mixed.jsonl       40 prompts as in short.jsonl and 12 of 800 to 1,500, answers of 32
    lengths.jsonl     38 requests of 512 + 512 tokens and 2 of 16,000 + 512
    alike.jsonl       40 requests of 1,536 + 512 tokens

The first three are for a pair with a vocabulary of at least 1,000 tokens, the last two for the pair written here.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from dflash_jax import checkpoint, drafters, models
from dflash_jax.benchmarks.presets import PAIRS
from dflash_jax.benchmarks.random_weights import random_pair
from dflash_jax.config import Raw
from dflash_jax.infer.interrupt import exit_quietly

VOCABULARY, MASK = 64, 63


def small_pair(layers: int, draft_layers: int, width: int, head_dim: int, positions: int) -> tuple[Raw, Raw]:
    """`config.json` of a Qwen3 of `width` with 4 query heads, and of its DFlash drafter with blocks of 8."""
    target, drafter = PAIRS["qwen3-4b"]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "eos_token_id": 1,
    }
    draft = {"num_hidden_layers": draft_layers, "num_target_layers": layers, "block_size": 8}
    tapped = {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]}}
    return {**target, **shape, "num_hidden_layers": layers}, {**drafter, **shape, **draft, **tapped}


def write_pair(directory: Path, pair: tuple[Raw, Raw]) -> None:
    """Writes `target` and `drafter` with random float32 weights; there is no tokenizer."""
    target, drafter = random_pair(*pair, dtype=jnp.float32)
    table = models.family(target.config.model_type).tensors(target.config)
    checkpoint.save(directory / "target", target.params, table, pair[0])
    table = drafters.KINDS[drafters.kind_of(pair[1])].tensors(drafter.config)
    checkpoint.save(directory / "drafter", drafter.params, table, pair[1])


def requests(sizes: Sequence[tuple[int, int]], vocabulary: int) -> list[Raw]:
    """An input line for each (tokens of the prompt, tokens of the answer), in random order."""
    rng = np.random.default_rng(0)
    made = []
    for i in rng.permutation(len(sizes)).tolist():
        prompt, answer = sizes[i]
        tokens = rng.integers(10, vocabulary, prompt).tolist()
        made.append({"id": f"{i}", "prompt_token_ids": tokens, "max_new_tokens": answer})
    return made


def between(low: int, high: int, count: int, answer: int) -> list[tuple[int, int]]:
    """Sizes of `count` requests whose prompts are evenly spread from `low` to `high` tokens."""
    return [(round(n), answer) for n in np.linspace(low, high, count)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.loads", description=__doc__)
    parser.add_argument("out", type=Path, help="a directory for the jobs, and a pair of models for them")
    out: Path = parser.parse_args(argv).out
    write_pair(out, small_pair(4, 2, width=128, head_dim=32, positions=32768))
    jobs = {
        "long": requests(between(400, 1500, 48, 16), 1000),
        "short": requests(between(20, 120, 96, 96), 1000),
        "mixed": requests(between(20, 120, 40, 32) + between(800, 1500, 12, 32), 1000),
        "lengths": requests([(512, 512)] * 38 + [(16000, 512)] * 2, 60),
        "alike": requests([(1536, 512)] * 40, 60),
    }
    for name, lines in jobs.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    exit_quietly(main())
