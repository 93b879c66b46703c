"""The whole recipe of the bundled pair, from text to exported target and drafter; also a worked example of the stages.

A directory holds every stage's result; the same command continues where it was interrupted.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dflash_jax import checkpoint, files, models
from dflash_jax.data.problems import Problem, problems
from dflash_jax.infer.interrupt import INTERRUPTED
from dflash_jax.infer.progress import progress_bar
from dflash_jax.infer.text import Text
from dflash_jax.train.arguments import PairOptions
from dflash_jax.train.config import StageError, make_config
from dflash_jax.train.data import Example
from dflash_jax.train.toy.pretrain import new_target, pretrain
from dflash_jax.train.toy.tokenizer import END, PAD, train_tokenizer

# Seeds of the generator. The held-out split shares no question with the others, whatever the seed.
PRETRAIN_SEED, PROMPT_SEED, SHARPNESS_SEED = 0, 1, 4
MOST_TOKENS = 160  # of an answer; the longest right one has about 110
Stage = Callable[[list[str]], int]  # runs a stage of the command line, and returns its exit status
Progress = Callable[[int, int, float], None]  # is told step, steps and loss


class Recipe(NamedTuple):
    """Sizes and settings; the defaults make the bundled pair.

    Attributes:
        problems: to train the target on, each seen once.
        tokenizer_problems: of these, how many the tokenizer is trained on.
        shape: fields of the target's `config.json`; Qwen3, tied head.
        pretrain: settings (see `TrainConfig`) of the target.
        prompts: problems the target answers for the drafter to learn from.
        drafter: settings of `fit`.
        held_out: problems of the benchmark that goes into the card.
        sharpness: held-out problems that teach how far the drafter's scores are to be trusted; other ones.
    """

    problems: int = 44000
    tokenizer_problems: int = 8000
    shape: Mapping[str, Any] = {
        "vocab_size": 768,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    pretrain: Mapping[str, Any] = {
        "length": 256,
        "batch_size": 8,
        "max_steps": 2000,
        "optimizer": "muon",
        "learning_rate": 5e-3,
        "schedule": "wsd",
        "warmup": 0.02,
        "weight_decay": 0.1,
        "save_every": 100,
    }
    prompts: int = 6000
    drafter: Mapping[str, Any] = {
        "num_layers": 2,
        "target_layer_ids": [1, 3, 5, 8, 10],
        "length": 256,
        "anchors": 24,
        "row_anchors": 64,
        "batch_size": 16,
        "optimizer": "muon",
        "learning_rate": 3e-3,
        "warmup": 0.05,
        "epochs": 4.0,
        "loss_chunk": 1024,
        "remat": False,
        "save_every": 200,
    }
    held_out: int = 200
    sharpness: int = 400


def build(directory: str | Path, recipe: Recipe, stage: Stage, progress: Progress) -> Path:
    """Makes the pair in `directory`, and returns where it lies: `pair/target` and `pair/drafter`.

    Args:
        stage: runs a stage of the command line, `python -m dflash_jax.train`.
        progress: of the target's training.

    Raises:
        ValueError: the directory was made by another recipe.
        StageError: a stage failed; it has said why.
        KeyboardInterrupt: a stage was interrupted.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path, fields = directory / "recipe.json", json.loads(json.dumps(recipe._asdict()))
    if path.exists() and checkpoint.read_json(path) != fields:
        raise ValueError(f"{directory} was made by another recipe; choose another directory")
    files.write_json(path, fields)
    target, drafter = directory / "pair" / "target", directory / "pair" / "drafter"
    if not target.exists():
        _make_target(directory, target, recipe, progress)
    answers, settings = prepare_drafter(directory, target, recipe, stage)
    _run(stage, "fit", target=target, data=answers, output=directory / "run", config=settings)
    if not drafter.exists():
        _run(stage, "export", run=directory / "run", output=drafter)
    if "proposal_sharpness" not in checkpoint.read_json(drafter / "config.json"):
        prompts = _write_prompts(
            directory / "sharpness.jsonl", problems(SHARPNESS_SEED, held_out=True), recipe.sharpness
        )
        settings = {"temperature": 1, "max_new_tokens": MOST_TOKENS, "store_sharpness": True}
        _run(stage, "evaluate", target=target, drafter=drafter, prompts=prompts, **settings)
    return directory / "pair"


def _write_prompts(path: Path, asked: Iterable[Problem], count: int) -> Path:
    lines = (json.dumps({"id": str(i), "turns": [problem.question]}) for i, problem in enumerate(islice(asked, count)))
    files.write_text(path, "".join(line + "\n" for line in lines))
    return path


def prepare_drafter(directory: Path, target: Path, recipe: Recipe, stage: Stage) -> tuple[Path, Path]:
    """Writes what a drafter of the target is trained with: its answers, and settings. Arguments as of `build`."""
    prompts = _write_prompts(directory / "prompts.jsonl", problems(PROMPT_SEED), recipe.prompts)
    answers = directory / "answers.jsonl"
    settings = {"batch_size": 32, "max_new_tokens": MOST_TOKENS}
    _run(stage, "regenerate", target=target, input=prompts, output=answers, **settings)
    files.write_json(directory / "drafter.json", recipe.drafter)
    return answers, directory / "drafter.json"


def regenerate_half(directory: Path, target: Path, prompts: Path, drafter: Path, stage: Stage) -> Path:
    """Has the target answer half of these prompts with a drafter; the answers say where its steps began."""
    lines = prompts.read_text(encoding="utf-8").splitlines(keepends=True)
    files.write_text(directory / "half.jsonl", "".join(lines[: len(lines) // 2]))
    answers = directory / "decoded.jsonl"
    settings = {"drafter": drafter, "batch_size": 32, "max_new_tokens": MOST_TOKENS}
    _run(stage, "regenerate", target=target, input=directory / "half.jsonl", output=answers, **settings)
    return answers


def _run(stage: Stage, name: str, **options: Any) -> None:
    arguments = [name]
    for option, value in options.items():
        arguments += ["--" + option.replace("_", "-"), *([] if value is True else [str(value)])]
    status = stage(arguments)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise StageError(f"stage {name} failed; the same command continues from there")


def _make_target(directory: Path, out: Path, recipe: Recipe, progress: Progress) -> None:
    corpus = list(islice(problems(PRETRAIN_SEED), recipe.problems))
    texts = (f"{problem.question}\n{problem.working}" for problem in corpus[: recipe.tokenizer_problems])
    tokenizer = train_tokenizer(texts, recipe.shape["vocab_size"])
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
        **recipe.shape,
    }
    config = make_config(recipe.pretrain)
    with files.replacing(out) as beside:
        tokenizer.save_pretrained(beside)
        examples = conversations(corpus, Text(str(beside)), raw["eos_token_id"])
        target = pretrain(directory / "pretrain", new_target(raw, config.seed), examples, config, progress)
        # In bfloat16: every later stage reads these weights, so that it meets what is shipped.
        params = jax.tree.map(lambda x: np.asarray(x.astype("bfloat16")), target.params)
        table = models.family(target.config.model_type).tensors(target.config, target.layout)
        checkpoint.save(beside, params, table, raw | {"dtype": "bfloat16"})


def conversations(corpus: Sequence[Problem], text: Text, end: int) -> list[Example]:
    """Problems as the chat the target is served with: the question, then the worked answer and its end token."""
    examples = []
    for problem in corpus:
        prompt = text.encode_chat([{"role": "user", "content": problem.question}])
        answer = [*text.encode(problem.working), end]
        tokens = np.asarray([*prompt, *answer], np.int32)
        examples.append(Example(tokens, np.arange(len(tokens)) >= len(prompt)))
    return examples


def main(options: PairOptions, stage: Stage) -> int:
    """The stage `pair`; returns its exit status. `stage` is as in `build`."""
    recipe = Recipe()
    with progress_bar(recipe.pretrain["max_steps"], "step") as bar:

        def progress(step: int, steps: int, loss: float) -> None:
            bar.update(step - bar.n)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)

        pair = build(options.output, recipe, stage, progress)
    print(f"wrote {pair}")
    return 0
