"""The ablations of the paper on a small pair: one drafter per row, same seed and steps, tau by real decoding.

Results are JSON lines, one per evaluation; the same command continues what was interrupted.
"""

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax import loading
from dflash_jax.bundled import bundled_pair
from dflash_jax.cache import Cache, Fresh, commit
from dflash_jax.checkpoint import read_json
from dflash_jax.data.problems import problems
from dflash_jax.decoding.state import Seen, TargetModel
from dflash_jax.drafters import base, dflash
from dflash_jax.files import read_json_lines
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Request
from dflash_jax.infer.text import Text
from dflash_jax.models.attention import Pass
from dflash_jax.target import Target, load_target
from dflash_jax.train.arguments import AblateOptions
from dflash_jax.train.config import TrainConfig, make_config
from dflash_jax.train.data import Example, read_examples
from dflash_jax.train.drafters import choose_mask_token, new_drafter
from dflash_jax.train.evaluate import evaluate
from dflash_jax.train.opening import open_run
from dflash_jax.train.plot import plot_ablations
from dflash_jax.train.toy.pair import PROMPT_SEED, Recipe, Stage, conversations, prepare_drafter, regenerate_half

EVALUATION_SEED = 3  # of the held-out problems


class InputInjection(dflash.Drafter):
    """A drafter that gets target features at its input only: a position's fused features go through the layers like
    any hidden state, each position seeing those before it, instead of straight to every layer's keys and values."""

    def context(
        self, features: Float[Array, "B J FD"], positions: Int[Array, "B J"], *, starts: Int[Array, "B J"] | None = None
    ) -> tuple[Fresh, ...]:
        """See `Drafter.context`; of positions with nothing before them."""
        rows = features.shape[0]
        at = Pass(positions, None, jnp.zeros(rows, jnp.int32), None, starts=starts)
        return self._behind(self.init_state(rows, 0), features, at)

    def commit(self, target: TargetModel, state: Cache, seen: Seen) -> Cache:
        """See `Drafter.commit`."""
        at = Pass(seen.positions, None, seen.lengths, seen.rows)
        return commit(state, self._behind(state, seen.features, at), seen.lengths, seen.kept, rows=seen.rows)

    def _behind(self, cache: Cache, features: Float[Array, "B J FD"], at: Pass) -> tuple[Fresh, ...]:
        """Keys and values of positions after a cache, by one causal pass of the layers."""
        fused = self._apply("fuse", features.astype(self.dtype))
        causal = jnp.tril(jnp.ones((features.shape[1], features.shape[1]), bool))
        return self.forward(fused, at.replace(visible=causal), cache)[1]


@dataclass(frozen=True)
class Ablation:
    """One drafter of the table.

    Attributes:
        settings: what differs from the pair's own drafter with one layer.
        kind: its class; None is that of its settings.
        raw_answers: learn from the generator's answers instead of the target's.
        continued: what differs in the second half of the steps, a run of its own with a learning-rate schedule of its
            own; the answers to half of the prompts are regenerated with what the first half made. None is one run.
        blocks: sizes to decode with; empty is the trained one.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    kind: type[base.Drafter] | None = None
    raw_answers: bool = False
    continued: dict[str, Any] | None = None
    blocks: tuple[int, ...] = ()


ROWS = {
    "KV injection": Ablation(blocks=(16, 8, 4)),  # the method, and trained at 16, decoded narrower
    "target features off": Ablation({"target_layer_ids": [-1]}),  # context keys and values of the text's embeddings
    "3 draft layers": Ablation({"num_layers": 3}),
    # With one layer the two injections are nearly the same, so this row is compared with the one above.
    "3 draft layers, input injection": Ablation({"num_layers": 3}, InputInjection),
    "fixed anchors": Ablation({"anchor_placement": "fixed"}),
    "block 8": Ablation({"block_size": 8}),
    "block 4": Ablation({"block_size": 4}),
    "2 draft layers": Ablation({"num_layers": 2}),
    "5 draft layers": Ablation({"num_layers": 5}),
    "no loss decay": Ablation({"gamma": 1e6}),
    "D-PACE": Ablation({"weighting": "dpace"}),
    "raw answers": Ablation(raw_answers=True),
    "KL divergence": Ablation({"cross_entropy": 0.0, "kl": 1.0}),
    "total variation": Ablation({"cross_entropy": 0.0, "total_variation": 1.0}),
    "negative log acceptance": Ablation({"cross_entropy": 0.0, "negative_log_acceptance": 1.0}),
    "LK hybrid": Ablation({"cross_entropy": 0.0, "lk_hybrid": 1.0}),
    "two halves": Ablation(continued={}),
    "two halves, the second on-policy": Ablation(continued={"anchor_placement": "decoded"}),
}


def main(options: AblateOptions, stage: Stage) -> int:
    """The stage `ablate`: trains and evaluates the rows that are named; what `results.jsonl` holds is not done again.
    Returns its exit status. `stage` is as in `pair.build`.

    Raises:
        ValueError: an unknown row, or results of another budget in the directory.
    """
    loading.enable_compilation_cache()
    names = [name.strip() for name in options.rows.split(";")] if options.rows else list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        raise ValueError(f"unknown rows: {'; '.join(unknown)}; known are: {'; '.join(ROWS)}")
    directory, steps, samples = Path(options.output), options.steps, options.samples
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "results.jsonl"
    done = {(line["row"], line["decoded_block"]) for line in read_results(results, steps, samples)}
    if options.pair is None:
        made, source = directory, bundled_pair()[0]
        prepare_drafter(made, source, Recipe(), stage)
    else:
        made = Path(options.pair)
        source = made / "pair" / "target"
    target = load_target(source)
    requests = _requests(target, samples)
    for name in names:
        row = ROWS[name]
        settings = read_json(made / "drafter.json") | {"num_layers": 1} | row.settings
        config = make_config(settings | {"max_steps": steps, "epochs": 20.0})
        blocks = [block for block in row.blocks or (config.block_size,) if (name, block) not in done]
        if not blocks:
            continue
        drafter = _train(directory / name.replace(" ", "-"), target, config, row, made, stage)
        for block in blocks:
            figures = evaluate(target, drafter, requests, params=SamplingParams(160), block_size=block, baseline=True)
            taus = [tau for tau in figures["tau_per_prompt"] if tau]
            tau, mean, deviation = figures["tau"], statistics.fmean(taus), statistics.stdev(taus)
            result = {
                "row": name,
                "decoded_block": block,
                "steps": steps,
                "samples": samples,
                "tau": tau,
                "tau_mean_of_prompts": mean,
                "tau_deviation_over_prompts": deviation,
                "tau_standard_error": deviation / math.sqrt(len(taus)),
                "speedup": figures["speedup"],
                "settings": row.settings,
            }
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            shown = f"tau {tau:.3f}   per prompt {mean:.3f} +- {deviation:.3f}"
            print(f"{name:22} decoded at {block:2}   {shown}", flush=True)
    if options.plot:
        plot_ablations(list(read_results(results, steps, samples)), options.plot)
    return 0


def _requests(target: Target, samples: int) -> list[Request]:
    """Held-out problems to decode, greedily."""
    text, params = Text(target.directory), SamplingParams(stop_token_ids=target.config.eos_token_ids)
    asked = islice(problems(EVALUATION_SEED, held_out=True), samples)
    chats = ([{"role": "user", "content": problem.question}] for problem in asked)
    return [Request(text.encode_chat(chat), params, id=str(i)) for i, chat in enumerate(chats)]


def read_results(path: Path, steps: int, samples: int) -> Iterator[dict[str, Any]]:
    """The lines of `results.jsonl`; raises ValueError for those of another budget."""
    if not path.exists():
        return
    for _, (line, _) in read_json_lines(path, lambda line: (line, (line["steps"], line["samples"]))):
        if (line["steps"], line["samples"]) != (steps, samples):
            raise ValueError(
                f"{path} holds results of {line['steps']} steps and {line['samples']} problems; "
                "choose another directory"
            )
        yield line


def _data(row: Ablation, made: Path, target: Target, config: TrainConfig) -> list[Example]:
    learnt = read_examples(made / "answers.jsonl", config.length, target.config.vocab_size).examples
    if not row.raw_answers:
        return learnt
    corpus = list(islice(problems(PROMPT_SEED), len(learnt)))
    return conversations(corpus, Text(target.directory), target.config.eos_token_ids[0])


def _train(
    directory: Path, target: Target, config: TrainConfig, row: Ablation, made: Path, stage: Stage
) -> base.Drafter:
    drafter, raw = new_drafter(target, config, choose_mask_token(target, None))
    if row.kind is not None:
        drafter = row.kind(drafter.params, drafter.config)

    def fit(place: Path, drafter: base.Drafter, data: list[Example], config: TrainConfig) -> base.Drafter:
        run = open_run(place, target, drafter, raw, data, config)
        if run.steps != config.max_steps:
            raise ValueError(
                f"the answers suffice for {run.steps} of {config.max_steps} steps; make more or lower --steps"
            )
        run.fit()
        return run.trained()

    data = _data(row, made, target, config)
    if row.continued is None:
        return fit(directory, drafter, data, config)
    half = replace(config, max_steps=config.max_steps // 2)
    drafter = fit(directory, drafter, data, half)
    decoded = regenerate_half(directory, Path(target.directory), made / "prompts.jsonl", directory / "last", stage)
    data = read_examples(decoded, config.length, target.config.vocab_size).examples
    return fit(directory / "second", drafter, data, replace(half, **row.continued))
