"""Engines with quantized weights: chunks of prompts, prefixes that are there, blocks and trees change no token."""

import pytest

from dflash_jax import Engine, load_drafter, load_target
from tests import tiny

HEAD = [(7 * i + 3) % 60 for i in range(20)]


def outcome(results):
    return [(result.token_ids, result.finish_reason) for result in results]


def requests():
    """Prompts that begin alike, greedy and not, with penalties."""
    asked = [[*HEAD, 1], [*HEAD, 2, 3], [*HEAD[:8], 9], [4], [*HEAD, 1, 5, 6]]
    settings = [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.3}, {}, {"temperature": 0.7, "seed": 1}]
    return [tiny.ask(prompt, 16, **how) for prompt, how in zip(asked, settings, strict=True)]


@pytest.mark.lossless
@pytest.mark.parametrize(
    "quantize",
    [
        pytest.param("target=int8,drafter=int8,head=int8", marks=pytest.mark.slow),
        pytest.param("target=int4,drafter=int4,head=int8", marks=pytest.mark.slow),
        pytest.param("target=fp8,drafter=fp8,head=fp8", marks=pytest.mark.slow),
        pytest.param("target=int4,drafter=none,head=int4", marks=pytest.mark.slow),
    ],
)
def test_no_token_depends_on_how_it_is_computed(quantize, tmp_path):
    tiny.write_target(tmp_path / "target", tiny.target_config(tie_word_embeddings=False))
    tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config())
    target = load_target(tmp_path / "target", quantize=quantize)
    drafter = load_drafter(tmp_path / "drafter", quantize=quantize)
    expected = outcome(Engine(target, None, slots=1, max_length=96, prefill_chunk=32).generate(requests()))
    assert len({tuple(tokens) for tokens, _ in expected}) > 3
    for how in ({"block_size": 5}, {"block_size": 4, "tree": 7}):
        engine = Engine(target, drafter, slots=3, max_length=96, prefill_chunk=8, prefix_chunks=8, **how)
        for _ in range(2):
            assert outcome(engine.generate(requests())) == expected
        assert engine.stats.prefix_tokens > engine.stats.prompt_tokens / 3
