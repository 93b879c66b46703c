"""The ablations of the paper on a small pair: one drafter per row, same seed and steps, tau by real decoding.

Results are JSON lines, one per evaluation; the same command continues what was interrupted.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dflash_jax.bundled import bundled_pair
from dflash_jax.cache import Block, Cache, row_lengths
from dflash_jax.checkpoint import read_json
from dflash_jax.drafters.dflash import Drafter
from dflash_jax.infer.requests import Request
from dflash_jax.infer.text import Text
from dflash_jax.models.layers import Pass
from dflash_jax.target import Target, load_target
from dflash_jax.train.config import TrainConfig, make_config
from dflash_jax.train.data import Example, read_examples
from dflash_jax.train.drafters import choose_mask_token, new_drafter
from dflash_jax.train.evaluate import evaluate
from dflash_jax.train.fit import Run
from dflash_jax.train.toy.pair import PROMPT_SEED, Recipe, conversations, prepare_drafter
from dflash_jax.train.toy.problems import problems

EVALUATION_SEED = 3  # of the held-out problems


class InputInjection(Drafter):
    """A drafter that gets target features at its input only: a position's fused features go through the layers like
    any hidden state, each position seeing those before it, instead of straight to every layer's keys and values."""

    def context(
        self,
        features: Float[Array, "B T FD"],
        positions: Int[Array, "B T"],
        cache: Cache | None = None,
        *,
        row: Int[Array, ""] | int = 0,
        starts: Int[Array, "B T"] | None = None,
    ) -> tuple[Block, ...]:
        """See `Drafter.context`; reads what is committed before."""
        assert cache is not None
        fused = self._apply("fuse", features.astype(self.dtype))
        rope = self._rope(positions if starts is None else positions - starts)
        row = jnp.asarray(row, jnp.int32)
        causal = jnp.tril(jnp.ones((positions.shape[1], positions.shape[1]), bool))
        at = Pass(positions, rope, causal, row_lengths(cache, row, features.shape[0]), row, starts)
        return self._apply("forward", fused, at, cache, False)[1]


@dataclass(frozen=True)
class Row:
    """One drafter of the table.

    Attributes:
        settings: what differs from the pair's own drafter with one layer.
        kind: its class.
        raw_answers: learn from the generator's answers instead of the target's.
        blocks: sizes to decode with; empty is the trained one.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    kind: type[Drafter] = Drafter
    raw_answers: bool = False
    blocks: tuple[int, ...] = ()


ROWS = {
    "KV injection": Row(blocks=(16, 8, 4)),  # the method, and trained at 16, decoded narrower
    "target features off": Row({"target_layer_ids": [-1]}),  # context keys and values of the text's embeddings
    "3 draft layers": Row({"num_layers": 3}),
    # With one layer the two injections are nearly the same, so this row is compared with the one above.
    "3 draft layers, input injection": Row({"num_layers": 3}, InputInjection),
    "fixed anchors": Row({"anchor_placement": "fixed"}),
    "block 8": Row({"block_size": 8}),
    "block 4": Row({"block_size": 4}),
    "2 draft layers": Row({"num_layers": 2}),
    "5 draft layers": Row({"num_layers": 5}),
    "no loss decay": Row({"gamma": 1e6}),
    "D-PACE": Row({"weighting": "dpace"}),
    "raw answers": Row(raw_answers=True),
}


def ablate(
    directory: str | Path,
    pair: str | Path | None,
    names: Sequence[str],
    *,
    steps: int,
    samples: int,
    stage: Callable[[list[str]], int],
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Trains and evaluates the named rows for `steps` steps each; what `results.jsonl` holds is not done again.

    Args:
        directory: of runs and results.
        pair: directory that `train pair` made; None takes the bundled target, and has it answer the prompts first.
        stage: runs a stage of the command line (see `pair.build`).
        samples: held-out problems to decode, greedily.
        report: called with each new result.

    Raises:
        ValueError: an unknown row, or results of another budget in the directory.
    """
    if unknown := [name for name in names if name not in ROWS]:
        raise ValueError(f"unknown rows {', '.join(unknown)}; known are {', '.join(ROWS)}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "results.jsonl"
    done = {(line["row"], line["decoded_block"]) for line in _read(results, steps, samples)}
    made = directory if pair is None else Path(pair)
    source = bundled_pair()[0] if pair is None else made / "pair" / "target"
    if pair is None:
        prepare_drafter(made, source, Recipe(), stage)
    target = load_target(source)
    text = Text(target.directory)
    asked = islice(problems(EVALUATION_SEED, held_out=True), samples)
    ends = target.config.eos_token_ids
    requests = [
        Request(tuple(text.encode_chat([{"role": "user", "content": p.question}])), stop_token_ids=ends, id=str(i))
        for i, p in enumerate(asked)
    ]
    for name in names:
        row = ROWS[name]
        settings = read_json(made / "drafter.json") | {"num_layers": 1} | row.settings
        config = make_config(settings | {"max_steps": steps, "epochs": 20.0})
        blocks = [block for block in row.blocks or (config.block_size,) if (name, block) not in done]
        if not blocks:
            continue
        drafter = _train(directory / name.replace(" ", "-"), target, config, row.kind, _data(row, made, target, config))
        for block in blocks:
            figures = evaluate(target, drafter, requests, max_new_tokens=160, block_size=block, baseline=True)
            taus = [tau for tau in figures["tau_per_prompt"] if tau]
            result = {
                "row": name,
                "decoded_block": block,
                "steps": steps,
                "samples": samples,
                "tau": figures["tau"],
                "tau_mean_of_prompts": statistics.fmean(taus),
                "tau_deviation_over_prompts": statistics.stdev(taus),
                "tau_standard_error": statistics.stdev(taus) / math.sqrt(len(taus)),
                "speedup": figures["speedup"],
                "settings": row.settings,
            }
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            report(result)


def _read(path: Path, steps: int, samples: int) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if (line["steps"], line["samples"]) != (steps, samples):
            raise ValueError(
                f"{path} holds results of {line['steps']} steps and {line['samples']} problems; "
                "choose another directory"
            )
        yield line


def _data(row: Row, made: Path, target: Target, config: TrainConfig) -> list[Example]:
    learnt = read_examples(made / "answers.jsonl", config.length, target.config.vocab_size).examples
    if not row.raw_answers:
        return learnt
    corpus = list(islice(problems(PROMPT_SEED), len(learnt)))
    return conversations(corpus, Text(target.directory), target.config.eos_token_ids[0])


def _train(directory: Path, target: Target, config: TrainConfig, kind: type[Drafter], data: list[Example]) -> Drafter:
    drafter, raw = new_drafter(target, config, choose_mask_token(target, None))
    run = Run(directory, target, kind(drafter.params, drafter.config), raw, data, config)
    if run.steps != config.max_steps:
        raise ValueError(f"the answers suffice for {run.steps} of {config.max_steps} steps; make more or lower --steps")
    run.fit()
    return run.trained()
