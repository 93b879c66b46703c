"""The pair that is measured, and what it is asked."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import jax

from dflash_jax.benchmarks.arguments import Figures, PairOptions
from dflash_jax.cli import EngineOptions, GenerationOptions
from dflash_jax.data.datasets import Sample, load_dataset
from dflash_jax.data.problems import is_correct, problems
from dflash_jax.decoding.state import DraftModel
from dflash_jax.engines import engine_for, needs_of
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.requests import Request
from dflash_jax.infer.text import Text
from dflash_jax.loading import Loaded, load, pair_sources

PROBLEM_SEED = 2  # of the held-out problems; any other asks other questions


class Asked(NamedTuple):
    """A pair and what it is asked.

    Attributes:
        drafter: of `loaded`, which has one here.
        source: checkpoint of the drafter, as it was named.
        is_correct: whether a text answers the i-th sample; None where nobody knows.
        settings: what the figures say of the run.
    """

    loaded: Loaded
    drafter: DraftModel
    source: str
    samples: Sequence[Sample]
    requests: Sequence[Request]
    is_correct: Callable[[int, str], bool] | None
    settings: Figures

    def engine(self, generation: GenerationOptions, options: EngineOptions, *, speculative: bool = True) -> Engine:
        """An engine for the requests, with the drafter or without it."""
        loaded = self.loaded if speculative else self.loaded._replace(drafter=None)
        return engine_for(loaded, needs_of(loaded.target.config, self.requests, options), generation, options)


def ask(options: PairOptions) -> Asked:
    """Loads the pair that the options name, and makes requests of the samples.

    Raises:
        ValueError: there is no drafter, or another option is unusable.
        OSError: a file cannot be read.
    """
    generation = options.generation
    generation.sampling().check()
    source, draft_source = pair_sources(options.models)
    if not draft_source:
        raise ValueError("no drafter given: bench compares decoding with and without one; pass --drafter")
    samples, right = questions(options.questions, options.max_samples)
    loaded = load(replace(options.models, target=source, drafter=draft_source), generation)
    assert loaded.drafter is not None
    drafter = untrained(loaded.drafter) if options.untrained else loaded.drafter
    prompts = enumerate(encoded(loaded.text, samples))
    settings = {
        "dataset": options.questions,
        "samples": len(samples),
        "temperature": generation.temperature,
        "batch_size": generation.rows,
        "max_new_tokens": generation.max_new_tokens,
        "chat_template_kwargs": loaded.text.template_arguments,
    }
    requests = [Request(prompt, loaded.defaults, id=str(i)) for i, prompt in prompts]
    return Asked(loaded._replace(drafter=drafter), drafter, draft_source, samples, requests, right, settings)


def encoded(text: Text, samples: Sequence[Sample]) -> list[list[int]]:
    """The token ids of the first turn of each sample, as a chat where the tokenizer has a template for it."""
    first = (sample.turns[0] for sample in samples)
    if not text.has_chat_template:
        return [text.encode(turn) for turn in first]
    return [text.encode_chat([{"role": "user", "content": turn}]) for turn in first]


def untrained(drafter: DraftModel) -> DraftModel:
    """The drafter with random weights in the place of its matrices."""
    leaves, tree = jax.tree.flatten(drafter)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    noise = lambda x, key: jax.random.normal(key, x.shape, x.dtype) / x.shape[-1] ** 0.5 if x.ndim > 1 else x
    return jax.tree.unflatten(tree, map(noise, leaves, keys))


def questions(dataset: str, count: int) -> tuple[list[Sample], Callable[[int, str], bool] | None]:
    """Samples of a dataset, and, for made problems, whether a text answers the i-th."""
    if dataset != "problems":
        return load_dataset(dataset, count), None
    if count < 1:
        raise ValueError(f"max_samples must be at least 1, got {count}")
    chosen = list(islice(problems(PROBLEM_SEED, held_out=True), count))
    return [Sample([problem.question]) for problem in chosen], lambda i, text: is_correct(chosen[i], text)
