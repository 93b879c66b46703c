"""Trained pairs: the official implementation's tokens and acceptance lengths on real prompts."""

import json
from itertools import islice
from pathlib import Path

import pytest

official = pytest.importorskip("dflash_jax.benchmarks.official")
pytest.importorskip("dflash.model")

from dflash_jax import bundled_pair, load_drafter, load_target, replay, spec_generate  # noqa: E402
from dflash_jax.data.problems import problems  # noqa: E402
from dflash_jax.infer.engine.params import SamplingParams  # noqa: E402
from dflash_jax.infer.engine.requests import Request  # noqa: E402
from dflash_jax.infer.text import Text  # noqa: E402

SHARED = Path(__file__).parents[3] / "shared"
PAIR = SHARED / "pairs" / "gsm8k-qwen3"
BUDGET = 80


def compare(target_directory, drafter_directory, questions):
    """Asserts equal tokens and acceptance lengths, of all rows but one that a near-tie parts, and returns tau."""
    target, drafter = load_target(target_directory), load_drafter(drafter_directory)
    text = Text(str(target_directory))
    prompts = [text.encode_chat([{"role": "user", "content": question}]) for question in questions]
    ours = spec_generate(target, drafter, prompts, max_new_tokens=BUDGET)
    theirs = official.Official(str(target_directory), str(drafter_directory))
    compared = 0
    for row, prompt in enumerate(prompts):
        params = SamplingParams(BUDGET, eos_token_ids=target.config.eos_token_ids)
        tokens, lengths, _ = theirs.dflash(Request(prompt, params), 16)
        if tokens != ours.tokens[row]:  # only a near-tie may explain it
            checked = replay(target, prompt, ours.tokens[row], request_id=str(row))
            assert checked.worst_gap < 1e-4
            continue
        whole = 0
        while whole < len(lengths) and 1 + sum(lengths[:whole]) + 16 <= BUDGET:
            whole += 1
        assert whole >= 1
        assert ours.acceptance_lengths[row][:whole] == lengths[:whole]
        compared += 1
    assert compared >= len(prompts) - 1
    steps = [n for row in ours.acceptance_lengths for n in row]
    return sum(steps) / len(steps)


@pytest.mark.slow
@pytest.mark.skipif(not PAIR.is_dir(), reason="the shared pair is not here")
def test_the_shared_pair():
    rows = (SHARED / "data" / "bench" / "gsm8k.jsonl").read_text().splitlines()[:6]
    assert compare(PAIR / "target", PAIR / "drafter", [json.loads(row)["turns"][0] for row in rows]) > 2.8


@pytest.mark.slow
def test_the_bundled_pair():
    questions = [problem.question for problem in islice(problems(7, held_out=True), 6)]
    assert compare(*bundled_pair(), questions) > 4
