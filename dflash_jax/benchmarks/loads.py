"""Jobs for measurements of the engine under load: `python -m tests.loads OUT` writes a made pair and job files.

    long.jsonl      prompts of 400 to 1,500 tokens, answers of 16
    short.jsonl     prompts of 20 to 120 tokens, answers of 96
    mixed.jsonl     40 prompts as in short.jsonl and 12 of 800 to 1,500, answers of 32
    lengths.jsonl   38 requests of 512 + 512 tokens and 2 of 16,000 + 512
    alike.jsonl     40 requests of 1,536 + 512 tokens

The first three are for a pair of any vocabulary of at least 1,000 tokens; the made pair, whose weights are random and
which has 32,768 positions, is for the last two.
"""

import json
import sys
from pathlib import Path

import numpy as np

from tests import tiny

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
}


def rows(sizes: list[tuple[int, int]], vocab_size: int) -> list[dict]:
    """A line for each (tokens of the prompt, tokens of the answer), in an order of no meaning."""
    rng = np.random.default_rng(0)
    made = []
    for i in rng.permutation(len(sizes)).tolist():
        prompt, answer = sizes[i]
        tokens = rng.integers(10, vocab_size, prompt).tolist()
        made.append({"id": f"{i}", "prompt_token_ids": tokens, "max_new_tokens": answer})
    return made


def between(low: int, high: int, count: int, answer: int) -> list[tuple[int, int]]:
    """Prompts of evenly spread lengths."""
    return [(round(n), answer) for n in np.linspace(low, high, count)]


def main(place: Path) -> None:
    tiny.write_target(place / "target", tiny.target_config(**SHAPE, eos_token_id=1))
    tiny.write_drafter(place / "drafter", tiny.drafter_config(**SHAPE))
    jobs = {
        "long": rows(between(400, 1500, 48, 16), 1000),
        "short": rows(between(20, 120, 96, 96), 1000),
        "mixed": rows(between(20, 120, 40, 32) + between(800, 1500, 12, 32), 1000),
        "lengths": rows([(512, 512)] * 38 + [(16000, 512)] * 2, 60),
        "alike": rows([(1536, 512)] * 40, 60),
    }
    for name, lines in jobs.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
