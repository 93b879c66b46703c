"""Real speculative decoding of held-out prompts: the only number a checkpoint is chosen by."""

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from dflash_jax import loading
from dflash_jax.decoding.step import Proposals
from dflash_jax.drafters.base import Drafter
from dflash_jax.drafters.loading import load_drafter
from dflash_jax.files import check_writable, reading, write_json
from dflash_jax.infer.engine.engine import Engine
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Request, RequestError
from dflash_jax.infer.jobs.inputs import input_lines
from dflash_jax.infer.jobs.lines import read_lines
from dflash_jax.infer.jobs.records import acceptance_summary
from dflash_jax.infer.progress import progress_bar, warm_up
from dflash_jax.infer.text import Text
from dflash_jax.loading import choose_mesh, models_on_mesh, target_config, use_kernels
from dflash_jax.mesh import rows_of, spread
from dflash_jax.sharding import shardings
from dflash_jax.target import Target, load_target
from dflash_jax.train.arguments import EvaluateOptions
from dflash_jax.train.drafters import cast, store_sharpness
from dflash_jax.train.metrics import Metrics
from dflash_jax.train.run import load_run


def read_prompts(
    path: str | Path,
    target: Target,
    max_samples: int | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> list[Request]:
    """Prompts of a JSON lines file, in every form `serve` takes.

    Args:
        template_arguments: of the chat template, where a line gives no others.

    Raises:
        ValueError: a line that is no prompt, with its number, or no prompts.
    """
    text = Text(target.directory, template_arguments)
    stops = target.config.eos_token_ids or ((text.end_token,) if text.end_token is not None else ())
    with reading(Path(path)):
        lines = read_lines(input_lines([str(path)]), text, SamplingParams(eos_token_ids=tuple(stops)))
    for number, line in enumerate(lines, 1):
        try:
            if line.error is not None:
                raise line.error
            if line.request is not None:
                line.request.check(target.config.vocab_size, 2**31)
        except RequestError as error:
            raise ValueError(f"{path}, prompt {number}: {error}") from error
    requests = [line.request for line in lines[:max_samples] if line.request is not None]
    if not requests:
        raise ValueError(f"{path} has no prompts")
    return requests


def evaluate(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    params: SamplingParams,
    block_size: int | Literal["auto"] | None = None,
    tree: int | Literal["auto"] | None = None,
    proposals: Proposals = "calibrated",
    batch_size: int = 8,
    baseline: bool = False,
    show: bool = False,
) -> Metrics:
    """Decodes all prompts speculatively and returns tau and how the steps went.

    Args:
        params: how tokens are chosen; each prompt keeps its own stop tokens, too. Noise follows from the prompt's id.
        block_size, tree, proposals: as in `EngineConfig`.
        batch_size: rows at a time.
        baseline: also decode autoregressively, taking turns, for `speedup` and `equal_outputs`.
        show: say on stderr how far it is.

    Returns:
        Figures; at a temperature also the sharpness of proposals that these prompts taught, which may be stored with
        the drafter (`proposal_sharpness` of its `config.json`).
    """
    ends = lambda asked: {
        "eos_token_ids": asked.eos_token_ids,
        "stop_token_ids": params.stop_token_ids + asked.stop_token_ids,
    }
    requests = [replace(request, params=replace(params, **ends(request.params))) for request in requests]
    longest = max(len(r.prompt_token_ids) for r in requests) + params.max_new_tokens
    parts = rows_of(target.mesh)
    slots, max_length = -(-min(batch_size, len(requests)) // parts) * parts, -(-longest // 256) * 256
    drafting: dict[str, Any] = {"block_size": block_size, "tree": tree, "proposals": proposals}
    engines = [Engine(target, drafter, slots=slots, max_length=max_length, **drafting)]
    if baseline:
        engines.append(Engine(target, None, slots=slots, max_length=max_length))
    for engine in engines:
        warm_up(engine) if show else engine.warm_up()
    answers: list[list[Any]] = [[] for _ in engines]
    with progress_bar(len(engines) * len(requests), "answer") if show else contextlib.nullcontext() as bar:
        for start in range(0, len(requests), slots):
            asked = requests[start : start + slots]
            for engine, done in zip(engines, answers, strict=True):
                done += engine.generate(asked)
                if bar is not None:
                    bar.update(len(asked))
    lengths = Counter(n for completion in answers[0] for n in completion.acceptance_lengths)
    figures = acceptance_summary(lengths, engines[0].width) | {
        "samples": len(requests),
        "tau_per_prompt": [completion.tau for completion in answers[0]],
        "tokens": sum(len(completion.token_ids) for completion in answers[0]),
        "temperature": params.temperature,
        "block_size": engines[0].block_size,
        "tree": engines[0].tree,
    }
    learnt = engines[0].batch.state.calibration
    if learnt is not None and params.temperature > 0 and proposals == "calibrated":
        figures["proposal_sharpness"] = learnt.sharpness
    if baseline:
        speeds = [engine.stats.tokens_per_second or 0.0 for engine in engines]
        figures["tokens_per_second"] = {"speculative": speeds[0], "autoregressive": speeds[1]}
        figures["speedup"] = speeds[0] / speeds[1] if speeds[1] else None
        figures["equal_outputs"] = sum(a.token_ids == b.token_ids for a, b in zip(*answers, strict=True))
    return figures


def main(options: EvaluateOptions) -> int:
    """The stage `evaluate`; returns its exit status."""
    _check(options)
    generation = options.generation
    target, drafter = _pair(options)
    figures = evaluate(
        target,
        drafter,
        read_prompts(options.prompts, target, options.max_samples, generation.chat_template_kwargs),
        params=generation.sampling(),
        block_size=generation.block_size,
        tree=generation.tree,
        proposals=generation.proposals,
        batch_size=generation.rows,
        baseline=True,
        show=True,
    )
    figures["chat_template_kwargs"] = dict(generation.chat_template_kwargs)
    rates = " ".join(f"{rate:.2f}" for rate in figures["acceptance_per_position"])
    if figures["tau"] is None:
        print(f"no steps were taken: every answer to the {figures['samples']} prompts ended with its first token")
    else:
        speedup = "not known" if figures["speedup"] is None else f"{figures['speedup']:.2f}"
        print(f"tau {figures['tau']:.3f}   speedup {speedup}   over {figures['samples']} prompts")
    print(f"acceptance per position   {rates}")
    if options.json:
        write_json(Path(options.json), figures)
    if options.store_sharpness:
        store_sharpness(Path(options.models.drafter or ""), figures["proposal_sharpness"])
        print("sharpness by depth   " + " ".join(f"{c:g}" for c in figures["proposal_sharpness"]))
    return 0


def _check(options: EvaluateOptions) -> None:
    """Raises ValueError for options that do not go together, and OSError for a file that cannot be written."""
    drafter, params = options.models.drafter, options.generation.sampling()
    if bool(options.run) == bool(drafter):
        raise ValueError("give either --run or --drafter")
    if options.step is not None and not options.run:
        raise ValueError("--step needs --run")
    params.check()
    if options.json:
        check_writable(Path(options.json))
    if options.store_sharpness:
        if not drafter or not Path(drafter).is_dir():
            raise ValueError("--store-sharpness needs --drafter, a directory whose config.json it may change")
        if params.temperature == 0 or options.generation.proposals != "calibrated":
            raise ValueError("--store-sharpness needs a --temperature above 0, and --proposals calibrated")


def _pair(options: EvaluateOptions) -> tuple[Target, Drafter]:
    """The target, and the drafter that the options name or that a run has."""
    models = options.models
    use_kernels(models.kernels)
    loading.enable_compilation_cache()
    described = target_config(models.target, models.target_config)
    mesh = choose_mesh(models.mesh, models_on_mesh(models, described))
    how = {"dtype": models.dtype, "mesh": mesh, "quantize": models.quantize}
    target = load_target(models.target, overrides=models.target_config, **how)
    if options.run:
        drafter, _ = load_run(options.run, options.step)
        drafter = drafter.replace(params=cast(drafter.params, target.dtype))
        if mesh is not None:
            drafter = spread(drafter, shardings(drafter, mesh)).replace(mesh=mesh)
    else:
        assert models.drafter
        where = {"num_target_layers": target.config.num_hidden_layers, "target": target.directory}
        drafter = load_drafter(models.drafter, overrides=models.drafter_config, **how, **where)
    drafter.config.check_pair(target.config)
    return target, drafter
