"""What quantization at load changes: the target's distribution, and how many drafted tokens are accepted.

    python benchmarks/quantisation.py TARGET DRAFTER QUESTIONS.jsonl [--texts 200] [--samples 24] [--tokens 160]

First table: the target with its layers and its head quantized, on its own greedy answers to so many questions. KL is
that of the next token's distribution to the unquantized one, in nats a token; agreement is the share of tokens whose
most likely one is the same. Second table: tau, with one of target, drafter and head quantized, and with all of them.
"""

import argparse
import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import Target, generate, load_drafter, load_target, spec_generate
from dflash_jax.data.datasets import load_dataset
from dflash_jax.infer.text import Text

FORMATS = "int8", "fp8", "int4"
ROWS = 8  # answered together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "drafter", "questions"):
        parser.add_argument(name)
    for name, default in (("texts", 200), ("samples", 24), ("tokens", 160)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    plain = load_target(given.target)
    text = Text(plain.directory)
    samples = load_dataset(given.questions, max(given.texts, given.samples))
    prompts = [text.encode_chat([{"role": "user", "content": sample.turns[0]}]) for sample in samples]
    if given.texts:
        answers = answered(plain, prompts[: given.texts], given.tokens)
        texts = [(len(prompt), [*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=False)]
        print("| target and head | KL, nats | agreement | perplexity |\n|---|---|---|---|")
        print(f"| as stored | 0 | 100% | {quality(plain, plain, texts)[2]:.4f} |", flush=True)
        for how in FORMATS:
            kl, same, perplexity = quality(plain, quantised(given.target, f"target={how},head={how}"), texts)
            print(f"| {how} | {kl:.5f} | {100 * same:.2f}% | {perplexity:.4f} |", flush=True)
    if given.samples:
        print("| quantized | int8 | fp8 | int4 |\n|---|---|---|---|")
        tau = partial(accepted, given.target, given.drafter, prompts[: given.samples], given.tokens)
        print(f"| nothing | {tau(''):.3f} |", flush=True)
        for keys in (["target"], ["drafter"], ["head"], ["drafter", "head"], ["target", "drafter", "head"]):
            found = [tau(",".join(f"{key}={how}" for key in keys)) for how in FORMATS]
            print(f"| {', '.join(keys)} | {' | '.join(f'{x:.3f}' for x in found)} |", flush=True)


def quantised(directory: str, how: str) -> Target:
    return load_target(directory, quantize=how or None)


def answered(target: Target, prompts: list[list[int]], tokens: int) -> Iterator[list[int]]:
    """Greedy answers."""
    for first in range(0, len(prompts), ROWS):
        yield from generate(target, prompts[first : first + ROWS], max_new_tokens=tokens, max_length=1024).tokens


def quality(plain: Target, other: Target, texts: list[tuple[int, list[int]]]) -> tuple[float, float, float]:
    """KL in nats and the share of equal most likely tokens, over all tokens of the answers, and the perplexity."""
    length = -(-max(len(tokens) for _, tokens in texts) // 64) * 64

    @jax.jit
    def compared(plain: Target, other: Target, tokens: jax.Array, answer: jax.Array) -> jax.Array:
        positions = jnp.arange(length)[None]
        scores = []
        for target in (plain, other):
            hidden, _, _ = target.forward(tokens, positions, None, target.init_cache(1, length))
            scores.append(jax.nn.log_softmax(target.unembed(hidden)[0, :-1]))
        ours, theirs = scores
        kl = jnp.sum(jnp.exp(ours) * (ours - theirs), axis=-1)
        same = jnp.argmax(ours, axis=-1) == jnp.argmax(theirs, axis=-1)
        surprise = -jnp.take_along_axis(theirs, tokens[0, 1:, None], axis=-1)[:, 0]
        return jnp.stack([jnp.sum(jnp.where(answer, x, 0.0)) for x in (kl, same, surprise, jnp.ones_like(kl))])

    total = np.zeros(4)
    for begin, tokens in texts:
        row = np.zeros((1, length), np.int32)
        row[0, : len(tokens)] = tokens
        at = np.arange(1, length)
        total += np.asarray(compared(plain, other, row, (at >= begin) & (at < len(tokens))), np.float64)
    kl, same, surprise, count = total
    return kl / count, same / count, math.exp(surprise / count)


def accepted(target: str, drafter: str, prompts: list[list[int]], tokens: int, how: str) -> float:
    """Tau of greedy answers."""
    first, second = quantised(target, how), load_drafter(drafter, target=target, quantize=how or None)
    steps: list[int] = []
    for at in range(0, len(prompts), ROWS):
        found = spec_generate(first, second, prompts[at : at + ROWS], max_new_tokens=tokens, max_length=1024)
        steps += [length for row in found.acceptance_lengths for length in row]
    return sum(steps) / len(steps)


if __name__ == "__main__":
    main()
