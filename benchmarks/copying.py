"""40 prompts whose answers repeat what they were given, and how much of them each way of proposing gets right.

Twenty ask for a change in a Python function, and twenty for a passage of a text that they hold. Without --target the
prompts are only written. See benchmarks.md.

    python -m benchmarks.copying SOURCES PROBLEMS copying.jsonl [--target DIR --drafter DIR]

SOURCES has lines with `text`, the source of a module; PROBLEMS has lines with `question` and `answer`.
"""

import argparse
import ast
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

EACH = 20
LINES = range(8, 30)  # of a function


def functions(path: Path) -> Iterator[str]:
    """Functions of some length, one of each module."""
    for line in path.read_text().splitlines():
        source = json.loads(line)["text"]
        try:
            body = ast.parse(source).body
        except SyntaxError:
            continue
        found = (node for node in body if isinstance(node, ast.FunctionDef))
        texts = (ast.get_source_segment(source, node) or "" for node in found)
        yield from itertools.islice((text for text in texts if text.count("\n") in LINES and '"""' not in text), 1)


def edits(path: Path) -> Iterator[str]:
    """Prompts that ask for a function with another name."""
    for function in functions(path):
        name = re.match(r"def (\w+)", function)
        if name:
            yield (
                f"Rename the function `{name[1]}` to `{name[1]}_new`. Change nothing else, and print the whole "
                f"function.\n\n{function}"
            )


def passages(path: Path) -> Iterator[str]:
    """Prompts that ask for one of several solutions, word for word."""
    problems = [json.loads(line) for line in path.read_text().splitlines()]
    plain = lambda text: re.sub(r"<<.*?>>", "", text).split("\n####")[0]
    for i in range(len(problems) // 4):
        few = problems[4 * i : 4 * i + 4]
        text = "\n\n".join(f"Solution {n}: {plain(one['answer'])}" for n, one in enumerate(few, 1))
        yield f"{text}\n\nRepeat solution {i % 4 + 1} of these word for word, and nothing else."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("problems", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--tree", type=int, default=0)
    options = parser.parse_args()
    kinds = {"editing": edits(options.sources), "retrieval": passages(options.problems)}
    asked = [(kind, prompt) for kind, made in kinds.items() for prompt in itertools.islice(made, EACH)]
    lines = [json.dumps({"id": f"{kind}-{i}", "question": prompt}) for i, (kind, prompt) in enumerate(asked)]
    options.output.write_text("\n".join(lines) + "\n")
    if options.target:
        report(options, asked)


def report(options: argparse.Namespace, asked: list[tuple[str, str]]) -> None:
    """Prints tokens per step, greedily, by kind of prompt and of drafter, with the standard error over prompts."""
    from dflash_jax import DraftModel, Engine, Mixture, Ngram, Request, SamplingParams, Text, load_drafter, load_target

    target, text = load_target(options.target), Text(options.target)
    params = SamplingParams(max_new_tokens=options.tokens, stop_token_ids=tuple(target.config.eos_token_ids))
    chat = lambda prompt: text.encode_chat([{"role": "user", "content": prompt}])
    encode = chat if text.has_chat_template else text.encode
    requests = [Request(encode(prompt), params, id=kind) for kind, prompt in asked]
    longest = max(len(request.prompt_token_ids) for request in requests) + options.tokens
    drafters: dict[str, DraftModel] = {"n-gram": Ngram()}
    if options.drafter:
        network = load_drafter(options.drafter, target=target.directory)
        drafters |= {"drafter": network, "mixture": Mixture(network)}
    answers = set()
    for name, drafter in drafters.items():
        engine = Engine(target, drafter, slots=4, max_length=longest, tree=options.tree)
        done = engine.generate(requests)
        answers.add(tuple(tuple(one.token_ids) for one in done))
        for kind in dict.fromkeys(kind for kind, _ in asked):
            taus = [one.tau or 1.0 for one, request in zip(done, requests, strict=True) if request.id == kind]
            print(f"{name:10} {kind:10} {np.mean(taus):5.2f} +- {np.std(taus) / len(taus) ** 0.5:.2f}", flush=True)
    print("all answers are the same" if len(answers) == 1 else "answers DIFFER")


if __name__ == "__main__":
    main()
