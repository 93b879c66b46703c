"""Small jobs: their lines, commands and records."""

import json

COMPARED = ("id", "token_ids", "text", "finish_reason", "usage", "turns")


def command(pair, source, output, *more):
    models = ["--target", str(pair / "target"), "--drafter", str(pair / "drafter")]
    return [*models, "--input", *source, "--output", str(output), "--max-new-tokens", "12", "--block-size", "4", *more]


def records(path):
    return {str(r["id"]): {k: r.get(k) for k in COMPARED} for r in map(json.loads, path.read_text().splitlines())}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


ROWS = [{"id": f"r{i}", "prompt_token_ids": [i + 1, 5, 9], "temperature": 0.3 * (i % 3)} for i in range(7)]
