"""Tokens a step on long prompts, by what the drafter sees: `python -m benchmarks.draft_window TARGET DRAFTER`.

    python -m benchmarks.draft_window TARGET DRAFTER --code FILE.jsonl --questions FILE.jsonl
        [--lengths 1024 4096] [--windows 256 1024] [--count N]

Three kinds of prompts, as long as asked: code (files of {"text": ...}, the last of which goes on), a conversation
(questions with their answers, then one more), and a needle (a number that is said in a long text, and asked for).
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_jax import Engine, Request, SamplingParams, Text, load_drafter, load_target


def texts(path: Path, *names: str) -> list[list[str]]:
    """These fields of each line; a field that is a list gives its first."""
    first = lambda value: value[0] if isinstance(value, list) else value
    lines = map(json.loads, path.read_text().splitlines())
    return [[first(line[name]) for name in names] for line in lines if all(name in line for name in names)]


def code(files: Sequence[Sequence[str]], encode: Callable[[str], list[int]], length: int, turn: int) -> list[int]:
    """Files one after the other, cut at the length."""
    ids, at = list[int](), turn * 7
    while len(ids) < length:
        ids += encode(files[at % len(files)][0] + "\n\n")
        at += 1
    return ids[:length]


def conversation(
    turns: Sequence[Sequence[str]], chat: Callable[[list[dict[str, str]]], list[int]], length: int, turn: int
) -> list[int]:
    """Questions and answers until there is no room for more, and a last question."""
    messages, at = list[dict[str, str]](), turn * 11
    last = [{"role": "user", "content": turns[at % len(turns)][0]}]
    while len(chat([*messages, *last])) < length:
        at += 1
        question, answer = turns[at % len(turns)]
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return chat([*messages[2:], *last])[-length:]


def needle(
    turns: Sequence[Sequence[str]], chat: Callable[[list[dict[str, str]]], list[int]], length: int, turn: int
) -> list[int]:
    """A number in the first third of a text, which is asked for and to be repeated."""
    number, at, parts = 7919 * (turn + 3) % 100000, turn * 5, list[str]()
    asked = "What is the secret number? Say it, then repeat the first sentence of the text."
    made = lambda: [{"role": "user", "content": " ".join(parts) + "\n\n" + asked}]
    while len(chat(made())) < length:
        at += 1
        parts.append(turns[at % len(turns)][1])
        if len(parts) == 3:
            parts.append(f"The secret number is {number}.")
    parts.pop()
    return chat(made())[-length:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--code", type=Path)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--windows", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--count", type=int, default=3, help="prompts of each kind and length")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    target, drafter, text = load_target(options.target), load_drafter(options.drafter), Text(options.target)
    chat = text.encode_chat if text.has_chat_template else lambda messages: text.encode(messages[-1]["content"])
    turns = texts(options.questions, "question", "answer")
    kinds = {
        "conversation": lambda n, i: conversation(turns, chat, n, i),
        "needle": lambda n, i: needle(turns, chat, n, i),
    }
    if options.code:
        files = texts(options.code, "text")
        kinds["code"] = lambda n, i: code(files, text.encode, n, i)
    ends = tuple(target.config.eos_token_ids)
    for length in options.lengths:
        asked = {
            kind: [
                Request(make(length, i), SamplingParams(options.tokens, eos_token_ids=ends))
                for i in range(options.count)
            ]
            for kind, make in kinds.items()
        }
        answers = {}
        for window in [None, *(n for n in options.windows if n < length)]:
            given = {"slots": 1, "max_length": length + options.tokens, "draft_window": window}
            taus = {}
            for kind, requests in asked.items():
                engine = Engine(target, drafter, **given)
                found = [done.token_ids for done in engine.generate(requests)]
                assert answers.setdefault(kind, found) == found, "the window changed an answer"
                taus[kind] = engine.stats.tau
            said = ", ".join(f"{kind} {tau:.3f}" for kind, tau in taus.items())
            print(f"{length} tokens, the drafter sees {window or 'all'}: tau {said}", flush=True)


if __name__ == "__main__":
    main()
