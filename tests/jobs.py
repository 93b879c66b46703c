"""Small jobs: their lines, commands and records."""

import json

COMPARED = ("id", "token_ids", "text", "finish_reason", "usage", "turns")


def models_of(pair):
    return ["--target", str(pair / "target"), "--drafter", str(pair / "drafter"), "--block-size", "4"]


def options_of(source, output):
    return ["--input", *source, "--output", str(output), "--max-new-tokens", "12"]


def command(pair, source, output, *more):
    return [*models_of(pair), *options_of(source, output), *more]


def records(path):
    return {str(r["id"]): {k: r.get(k) for k in COMPARED} for r in map(json.loads, path.read_text().splitlines())}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


ROWS = [{"id": f"r{i}", "prompt_token_ids": [i + 1, 5, 9], "temperature": 0.3 * (i % 3)} for i in range(7)]
