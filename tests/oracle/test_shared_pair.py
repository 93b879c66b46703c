"""The small trained pair, where it is at hand: the official implementation's tokens and lengths on real prompts."""

import json
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared"
PAIR = SHARED / "pairs" / "gsm8k-qwen3"
pytestmark = pytest.mark.skipif(not PAIR.is_dir(), reason="the shared pair is not here")


def test_real_prompts_equal_the_official_implementation():
    official = pytest.importorskip("dflash_jax.infer.official")
    pytest.importorskip("dflash.model")
    from dflash_jax import load_drafter, load_target, replay, spec_generate
    from dflash_jax.infer.text import Text

    rows = (SHARED / "data" / "bench" / "gsm8k.jsonl").read_text().splitlines()[:6]
    text = Text(str(PAIR / "target"))
    prompts = [text.encode_chat([{"role": "user", "content": json.loads(row)["turns"][0]}]) for row in rows]
    target, drafter = load_target(PAIR / "target"), load_drafter(PAIR / "drafter")
    ours = spec_generate(target, drafter, prompts, max_new_tokens=80)
    theirs = official.Official(str(PAIR / "target"), str(PAIR / "drafter"))
    for row, prompt in enumerate(prompts):
        tokens, lengths, _ = theirs.dflash(prompt, 80, [4094], 16)
        if tokens != ours.tokens[row]:  # only a near-tie may explain it
            checked = replay(target, prompt, ours.tokens[row], request_id=str(row))
            assert checked.worst_gap < 1e-4
            continue
        whole = 0
        while whole < len(lengths) and 1 + sum(lengths[:whole]) + 16 <= 80:
            whole += 1
        assert ours.acceptance_lengths[row][:whole] == lengths[:whole]
    steps = [n for row in ours.acceptance_lengths for n in row]
    assert sum(steps) / len(steps) > 2.8
