"""Malformed lines between good ones: each has one record, and no good one suffers."""

import json
import random
from typing import Any

from tests.soak.runs import Bench, answers, expect, good_line, same

JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**400, -0.5, 1e308, float("nan"), float("inf"), "", "\ud800", "a\x00b",
    "x" * 5000,
    [], {}, [[]], [None], ["\udfff"], [2**40], [-1], [1.5], {"a": {"b": []}}, [{"role": "user"}], [{"content": 7}],
    [{"role": "\ud800", "content": "a"}], [{"role": "user", "content": "\ud800"}], [{"role": "tool", "content": "a"}],
    [{"role": "user", "content": [{"type": "image_url"}]}], list("abcdef"), "<end>", "\u202e\U0001f600",
]  # fmt: skip
FIELDS = (
    "id prompt messages turns prompt_token_ids max_new_tokens max_tokens temperature top_p top_k min_p seed n stop "
    "repetition_penalty presence_penalty frequency_penalty logprobs chat_template_kwargs body url method model stream"
).split()


def attack(bench: Bench, rng: random.Random, scale: float) -> dict[str, object]:
    """10,000 lines at scale 1, one in three good."""
    room, count = bench.room("fuzz"), max(20, round(10_000 * scale))
    good = {i: good_line(rng, f"g{i}") for i in range(count) if rng.random() < 1 / 3}
    lines = [json.dumps(good[i]).encode() if i in good else _malformed(rng, f"r{i}") for i in range(count)]
    (room / "clean.jsonl").write_text("".join(json.dumps(line) + "\n" for line in good.values()))
    (room / "fuzz.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    more = "--max-length", "256"
    running = {name: bench.start(room / f"{name}.jsonl", room / f"{name}.out", *more) for name in ("clean", "fuzz")}
    statuses = {name: run.wait()[0] for name, run in running.items()}
    expect(statuses == {"clean": 0, "fuzz": 1}, f"statuses {statuses}")
    found, clean = answers(room / "fuzz.out"), answers(room / "clean.out")
    expect(len(found) == count, f"{count} lines, but {len(found)} records")
    same({name: found.get(name) for name in clean}, clean)
    refused = sum(isinstance(answer, str) for answer in found.values())
    return {"lines": count, "answered": count - refused, "refused": refused, "lost": 0, "good lines differing": 0}


def _malformed(rng: random.Random, name: str) -> bytes:
    """A line with one to three faults, in its fields or in its bytes; never blank, nor with a line end inside."""
    line = good_line(rng, name)
    if rng.random() < 0.6:
        for _ in range(rng.randint(1, 3)):
            within = line["body"] if isinstance(line.get("body"), dict) and rng.random() < 0.8 else line
            field = rng.choice([*within, *FIELDS])
            if field in ("id", "custom_id"):
                continue  # the same twice would be the same id twice
            if rng.random() < 0.2:
                within.pop(field, None)
            else:
                within[field] = rng.choice(JUNK)
        return json.dumps(line).encode()
    text = json.dumps(line).encode()
    head, rest = text[: text.index(b",")], bytearray(text[text.index(b",") :])
    for _ in range(rng.randint(1, 3)):
        at, byte = rng.randrange(len(rest)), rng.choice([b for b in range(256) if b not in b"\r\n"])
        rest[at : at + rng.randint(0, 2)] = rng.choice([b"", bytes([byte]), bytes([byte]) * 50, b"[" * 2000])
        if not rest:
            break
    return head + bytes(rest)
