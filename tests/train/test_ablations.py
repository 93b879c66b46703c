"""The ablation script: its variants decode what they are trained on, its results continue."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import load_drafter, spec_generate
from dflash_jax.decoding.state import Query, Seen
from dflash_jax.drafters import dflash
from dflash_jax.train.__main__ import main
from dflash_jax.train.blocks import draw_blocks
from dflash_jax.train.plot import plot_ablations
from dflash_jax.train.toy import ablations
from dflash_jax.train.toy.ablations import ROWS, InputInjection
from dflash_jax.train.toy.pair import build
from tests import tiny
from tests.train.test_pair import RECIPE


@pytest.mark.slow
def test_input_injection_trains_what_it_decodes(target, drafter):
    """As `test_blocks` for the published drafters: the packed pass equals context committed piece by piece."""
    drafter = InputInjection(drafter.params, drafter.config)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 60, (1, 24)), jnp.int32)
    starts = jnp.asarray([[0] * 10 + [10] * 14])
    features = jnp.asarray(rng.standard_normal((1, 24, 64)), jnp.float32)
    blocks = draw_blocks(
        jax.random.split(jax.random.key(0), 1),
        tokens,
        starts,
        jnp.ones((1, 24), bool),
        count=24,
        per_document=24,
        block_size=5,
        predictions=4,
    )
    packed = drafter.teacher_forced(target, features, blocks)
    compared = 0
    for a, (anchor, start) in enumerate(zip(blocks.anchors[0].tolist(), blocks.starts[0].tolist(), strict=True)):
        if anchor % 3 or not bool(blocks.labelled[0, a].any()):
            continue
        cache, at = drafter.init_state(1, 32), start
        while at < anchor:  # in pieces, as steps commit them
            count = min(3, anchor - at)
            piece = jnp.pad(features[:, at : at + count], ((0, 0), (0, 3 - count), (0, 0)), constant_values=7.0)
            positions = at - start + jnp.arange(3)[None]
            seen = Seen(positions, piece, positions, jnp.asarray([at - start]), jnp.asarray([count]))
            cache, at = drafter.commit(target, cache, seen), at + count
        alone = drafter.denoise(target, cache, Query(blocks.tokens[:, a], jnp.asarray([at - start]), 5))
        np.testing.assert_allclose(packed[0, a], alone[0], atol=2e-5)
        compared += 1
    assert compared > 4
    published = dflash.Drafter(drafter.params, drafter.config).teacher_forced(target, features, blocks)
    assert float(jnp.abs(packed - published).max()) > 1e-3


@pytest.mark.slow
def test_input_injection_is_lossless(target, drafter):
    prompts = [[5, 9, 11], [1, 2, 3, 4, 5, 6, 7]]
    plain = spec_generate(target, None, prompts, max_new_tokens=20)
    other = InputInjection(drafter.params, drafter.config)
    assert spec_generate(target, other, prompts, max_new_tokens=20).tokens == plain.tokens


@pytest.mark.exhaustive
@pytest.mark.slow
def test_rows_are_trained_once(tmp_path, capsys):
    quick = lambda arguments: main([*arguments, *(["--max-new-tokens", "12"] if arguments[0] == "regenerate" else [])])
    build(tmp_path / "made", RECIPE, quick, lambda *_: None)
    halves = "two halves, the second on-policy"
    names = ["target features off", "3 draft layers, input injection", "raw answers", "LK hybrid", halves]
    run = ["ablate", "--pair", str(tmp_path / "made"), "--output", str(tmp_path / "out")]
    run += ["--steps", "2", "--samples", "3"]
    # One block size that is decoded narrower than it was trained, too.
    assert main([*run, "--rows", ";".join(["KV injection", *names])]) == 0
    results = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(r["row"], r["decoded_block"]) for r in results[:3]] == [("KV injection", b) for b in (16, 8, 4)]
    assert [r["row"] for r in results[3:]] == names
    assert all(r["tau"] >= 1 for r in results)
    capsys.readouterr()
    assert main([*run, "--rows", ";".join(["KV injection", *names])]) == 0
    assert capsys.readouterr().out == ""
    assert main([*run, "--rows", "nonsense"]) == 2
    assert "unknown rows nonsense" in capsys.readouterr().err
    assert main([*run, "--rows", "raw answers", "--steps", "3"]) == 2
    assert "choose another directory" in capsys.readouterr().err
    assert set(names) < set(ROWS)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_bundled_target_answers_where_no_pair_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, "Recipe", lambda: RECIPE)
    run = ["ablate", "--output", str(tmp_path), "--steps", "2", "--samples", "2", "--rows", "block 4"]
    assert main(run) == 0
    (result,) = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert (result["row"], result["decoded_block"]) == ("block 4", 4)


def test_results_are_drawn(tmp_path):
    figures = {"steps": 5, "samples": 4, "tau": 3.0, "tau_deviation_over_prompts": 1.0, "decoded_block": 4}
    lines = [json.dumps({"row": row} | figures) for row in ("block 4", "D-PACE")]
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    plot_ablations(list(ablations.read_results(tmp_path / "results.jsonl", 5, 4)), tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("<svg") == 1
    with pytest.raises(ValueError, match="results of 5 steps and 4 problems"):
        list(ablations.read_results(tmp_path / "results.jsonl", 5, 5))


def test_taps_of_the_embedding_are_the_text_alone(target, tmp_path):
    raw = tiny.drafter_config(dflash_config={"target_layer_ids": [-1, 2]})
    drafter = load_drafter(tiny.write_drafter(tmp_path, raw))
    assert drafter.taps == (-1, 2)
    tokens = jnp.asarray([[3, 4, 5]])
    _, features, _ = target.forward(tokens, jnp.arange(3)[None], None, target.init_cache(1, 8), taps=drafter.taps)
    np.testing.assert_array_equal(features[..., :32], target.embed(tokens))
