"""A target that is trained by reinforcement, and its drafter: frozen, and learning from the rollouts.

Both engines answer the same prompts with the same weights in every step. Their samples are the same, so tau is paired.
The reward is for short answers, which moves the target away from what its drafter knows. See benchmarks.md.

    python -m benchmarks.online TARGET DRAFTER PROBLEMS [--steps 30 --seeds 3 --plot FILE.svg]

PROBLEMS has lines with `question`. The plot has tau of every step, its figures beside it in FILE.json.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflash_jax import Engine, SamplingParams, Target, Text, load_drafter, load_target, rollouts
from dflash_jax.benchmarks.plots import check_plot, new_figure
from dflash_jax.train.config import TrainConfig
from dflash_jax.train.online import DEFAULTS, OnlineDrafter

SAMPLES, WIDTH = 4, 256


def loss(params, target: Target, tokens, mask, advantages):
    """Policy gradient at temperature 1, mean over answer tokens."""
    model, (N, L) = target.replace(params=params), tokens.shape
    positions = jnp.broadcast_to(jnp.arange(L)[None], (N, L))
    hidden, _, _ = model.forward(tokens, positions, None, model.init_cache(N, 0))
    logprobs = jax.nn.log_softmax(model.unembed(hidden[:, :-1]))
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=2)[..., 0]
    return -jnp.sum(jnp.where(mask[:, 1:], chosen * advantages[:, None], 0.0)) / jnp.maximum(jnp.sum(mask), 1)


class Pair:
    """Two engines with the same target and drafter, of which one keeps features to learn from."""

    def __init__(self, options: argparse.Namespace):
        self.target = load_target(options.target, dtype="float32")
        self.drafter = load_drafter(options.drafter, dtype="float32", target=options.target)
        settings = {"slots": 8, "max_length": WIDTH, "logprobs": 0, "sampled_logprobs": True}
        make = lambda keep: Engine(self.target, self.drafter, **settings, keep_features=keep)
        self.frozen, self.learning = make(False), make(True)
        self.gradient = jax.jit(lambda params, *batch: jax.grad(loss)(params, self.target, *batch))

    def begin(self) -> None:
        """Puts both back to where they began."""
        for engine in (self.frozen, self.learning):
            engine.update(target=self.target.params, drafter=self.drafter.params)


def run(options: argparse.Namespace, pair: Pair, seed: int) -> np.ndarray:
    """Trains the target with one seed; returns of every step tau of both drafters, and seconds of learning."""
    pair.begin()
    text, ends = Text(options.target), tuple(pair.target.config.eos_token_ids)
    lines = [json.loads(line)["question"] for line in options.problems.read_text().splitlines()]
    asked = (text.encode_chat([{"role": "user", "content": line}]) for line in lines)
    every = [prompt for prompt in asked if len(prompt) + options.tokens <= WIDTH]
    rng, params, rows = np.random.default_rng(seed), pair.target.params, []
    settings = DEFAULTS | {"learning_rate": options.drafter_rate}
    online = OnlineDrafter(pair.learning, TrainConfig(block_size=pair.drafter.config.block_size, **settings))
    optimizer = optax.adam(options.rate)
    state = optimizer.init(params)
    sampling = SamplingParams(options.tokens, 1.0, eos_token_ids=ends)
    for step in range(options.steps):
        prompts = [every[i] for i in rng.choice(len(every), options.prompts, replace=False)]
        place = 1000 * seed + step
        both = pair.learning, pair.frozen
        ours, theirs = (rollouts(one, prompts, SAMPLES, sampling, step=place, width=WIDTH) for one in both)
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        answered = (ours.lengths - ours.prompt_lengths).astype(np.float32)
        groups = -answered.reshape(-1, SAMPLES)
        spread = groups - groups.mean(axis=1, keepdims=True)
        advantages = (spread / (groups.std(axis=1, keepdims=True) + 1e-6)).reshape(-1)
        changes, state = optimizer.update(pair.gradient(params, ours.tokens, ours.mask, advantages), state, params)
        params = optax.apply_updates(params, changes)
        begin = time.perf_counter()
        online.learn(ours)
        rows.append((theirs.stats.tau or 1.0, ours.stats.tau or 1.0, time.perf_counter() - begin))
        for engine in (pair.learning, pair.frozen):
            engine.update(target=params)
        taus = f"tau frozen {rows[-1][0]:.2f}, online {rows[-1][1]:.2f}"
        print(f"seed {seed}, step {step + 1}: {answered.mean():.0f} tokens, {taus}", flush=True)
    return np.asarray(rows)


def plot(figures: dict[str, list[list[float]]], path: Path) -> None:
    """Draws tau over the steps: thin lines for the seeds, a thick one for their mean."""
    figure = new_figure(7, 4)
    axes = figure.add_subplot()
    for color, (name, seeds) in zip(("#888888", "#1f6feb"), figures.items(), strict=True):
        steps = np.arange(1, len(seeds[0]) + 1)
        for taus in seeds:
            axes.plot(steps, taus, color=color, linewidth=0.8, alpha=0.5)
        axes.plot(steps, np.mean(seeds, axis=0), color=color, linewidth=2.5, label=f"{name} drafter")
    axes.set_xlabel("step of reinforcement learning")
    axes.set_ylabel("tau")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("problems", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rate", type=float, default=2e-4, help="of the target")
    parser.add_argument("--drafter-rate", type=float, default=3e-5)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.plot:
        check_plot(options.plot)
    last, pair = -(-options.steps // 3), Pair(options)
    every = np.stack([run(options, pair, seed) for seed in range(options.seeds)])
    if options.plot:
        figures = {name: every[..., i].round(4).tolist() for i, name in enumerate(("frozen", "online"))}
        options.plot.with_suffix(".json").write_text(json.dumps(figures) + "\n")
        plot(figures, options.plot)
    found = every[:, -last:]
    gain, seconds = (found[..., 1] - found[..., 0]).mean(axis=1), np.median(found[..., 2])
    error = gain.std(ddof=1) / len(gain) ** 0.5 if len(gain) > 1 else float("nan")
    print(f"last {last} steps: tau frozen {found[..., 0].mean():.2f}, online {found[..., 1].mean():.2f}")
    print(f"difference {gain.mean():+.2f} +- {error:.2f} over {len(gain)} seeds; {seconds:.2f} s a step to learn")


if __name__ == "__main__":
    main()
