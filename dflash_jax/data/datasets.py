"""Benchmark prompts, formatted and ordered as in the official benchmark (`dflash/benchmark.py` 0.1.0)."""

import io
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from dflash_jax.files import one_line
from dflash_jax.infer.jobs.inputs import input_lines

_MATH = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


# What a row of SPEED-Bench holds until NVIDIA's script has fetched it from its source.
_PLACEHOLDER = "SHOULD BE FETCHED FROM THE SOURCE"


class Sample(NamedTuple):
    """User turns of a conversation, and what kind of task it is, if the dataset says so."""

    turns: list[str]
    category: str = ""


class Published(NamedTuple):
    """Where a benchmark lives on the hub, which field holds the question, and how it is asked."""

    path: tuple[str, ...]
    split: str
    field: str
    template: str = "{}"

    def sample(self, row: Mapping[str, Any]) -> Sample:
        """A row as it is asked; raises ValueError if it has no question."""
        turns = row.get("turns")
        if turns is None and isinstance(row.get("messages"), list):
            turns = [message["content"] for message in row["messages"] if message["role"] == "user"]
        if turns is None:
            turns = next((row[name] for name in (self.field, "question", "problem", "prompt") if name in row), [])
        turns = [turns] if isinstance(turns, str) else list(turns)
        if not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError("no question found")
        if any(_PLACEHOLDER in turn for turn in turns):
            raise ValueError("the text is still to be fetched: prepare the file with NVIDIA's script")
        return Sample([self.template.format(turn) for turn in turns], str(row.get("category") or ""))


SOURCES = {
    "gsm8k": Published(("openai/gsm8k", "main"), "test", "question", _MATH),
    "math500": Published(("HuggingFaceH4/MATH-500",), "test", "problem", _MATH),
    "aime25": Published(("math-ai/aime25",), "test", "problem", _MATH),
    "humaneval": Published(("openai/openai_humaneval",), "test", "prompt", _CODE),
    "mbpp": Published(("google-research-datasets/mbpp", "sanitized"), "test", "prompt"),
    "livecodebench": Published(("livecodebench/code_generation_lite",), "test", "question_content"),
    "mt-bench": Published(("HuggingFaceH4/mt_bench_prompts",), "train", "prompt"),
}
# The same sets, questions to train on.
TRAINING = {"gsm8k": SOURCES["gsm8k"]._replace(split="train")}


def training_prompts(name: str) -> io.BufferedIOBase:
    """Prompts, a JSON object a line: of a file, as `serve` reads it, or the training questions of a named set.

    Raises:
        ValueError: `datasets` is missing for a named set, or the hub cannot be reached.
        OSError: the file cannot be read.
    """
    if name not in TRAINING:
        return io.BytesIO(b"".join(input_lines([name])))
    chats = ([{"role": "user", "content": sample.turns[0]}] for sample in _from_hub(TRAINING[name]))
    return io.BytesIO("".join(json.dumps({"messages": chat}) + "\n" for chat in chats).encode())


def load_dataset(name: str, max_samples: int | None = None) -> list[Sample]:
    """The samples of a named set, or of a local JSONL file.

    A local row is `{"turns": [...]}`, `{"messages": [...]}` or `{"question" | "problem" | "prompt": str}`, with an
    optional `category`, as SPEED-Bench has it (arXiv 2604.09557; prepared by NVIDIA's own script, for most of its
    texts are only fetched then). The file's name decides the prompt format: `gsm8k.jsonl` is asked like gsm8k, an
    unknown name is asked as it is.

    Args:
        name: one of `SOURCES`, or a path ending in .jsonl.
        max_samples: the first so many after the official shuffle (seed 42); None takes all, shuffled.

    Raises:
        ValueError: an unknown name, an unreadable file or row, a row of SPEED-Bench that is not prepared, or
            `datasets` missing for a named set.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples must be at least 1, got {max_samples}")
    if name.endswith(".jsonl"):
        rows = _local(Path(name))
    elif name in SOURCES:
        rows = _from_hub(SOURCES[name])
    else:
        raise ValueError(f"dataset must be a path ending in .jsonl or one of {', '.join(SOURCES)}; got {name!r}")
    if not rows:
        raise ValueError(f"dataset {name} has no rows")
    random.Random(42).shuffle(rows)
    return rows[:max_samples]


def _local(path: Path) -> list[Sample]:
    if not path.is_file():
        raise ValueError(f"dataset file {path} does not exist")
    source, rows = SOURCES.get(path.stem, Published((), "", "prompt")), []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(source.sample(json.loads(line)))
        except Exception as error:  # values of any other type
            expected = '{"turns": [...]}, {"messages": [...]} or {"question" | "problem" | "prompt": str}'
            raise ValueError(one_line(f"{path}, line {number}: a row must be {expected}; {error!r:.100}")) from error
    return rows


def _from_hub(source: Published) -> list[Sample]:
    try:
        from datasets import load_dataset as load
    except ImportError as error:
        raise ValueError("named datasets need `pip install datasets`; or pass a local .jsonl file") from error
    try:
        data = load(*source.path, split=source.split)
    except Exception as error:  # the hub client raises many kinds
        raise ValueError(
            f"{source.path[0]} could not be loaded from the hub ({type(error).__name__}); pass a local .jsonl file"
        ) from error
    return [source.sample(row) for row in cast(Iterable[Mapping[str, Any]], data)]
