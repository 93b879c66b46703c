"""Fields of `config.json` that the user replaces."""

import json

import pytest

from dflash_jax import SamplingParams, load_drafter, load_target
from dflash_jax.infer.jobs.answering import job_settings
from dflash_jax.infer.text import Text
from dflash_jax.loading import target_config
from dflash_jax.overrides import overridden
from tests import tiny


def test_objects_are_merged_and_a_field_is_replaced_where_it_stands():
    raw = {"a": 1, "dflash_config": {"b": 2, "c": 3}, "rope": {"x": 1}}
    assert overridden(raw, None) == raw
    assert overridden(raw, {"a": 5, "d": 6}) == {**raw, "a": 5, "d": 6}
    assert overridden(raw, {"b": 7}) == {**raw, "dflash_config": {"b": 7, "c": 3}}
    assert overridden(raw, {"dflash_config": {"c": None}})["dflash_config"] == {"b": 2, "c": None}
    assert overridden(raw, {"rope": {"y": 2}})["rope"] == {"x": 1, "y": 2}
    assert raw["dflash_config"] == {"b": 2, "c": 3}


def test_they_win_over_the_file(tmp_path):
    target = tiny.write_target(tmp_path / "target", tiny.target_config())
    drafter = tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config())
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert target_config(target).eos_token_ids == (1, 7)  # as `load_target` reads it
    assert load_target(target).config.eos_token_ids == (1, 7)
    assert load_target(target, overrides={"eos_token_id": 5}).config.eos_token_ids == (5,)
    assert load_drafter(drafter, overrides={"sample_from_anchor": True}).config.anchor_predicts
    assert load_drafter(drafter, overrides={"block_size": 3}).config.block_size == 3
    with pytest.raises(ValueError, match="rope_theta"):
        load_target(target, overrides={"rope_theta": None})


def test_what_can_change_an_answer_is_part_of_a_jobs_identity():
    noted = lambda params=None, **more: job_settings(
        "", "float32", Text(""), params or SamplingParams(4), [], 0, None, **more
    )
    plain = noted()
    assert "min_tokens" not in plain  # outputs of earlier versions continue
    assert noted(overrides={"target_config": {}, "drafter_config": {}, "quantize": {}}) == plain
    for other in (
        noted(SamplingParams(4, min_tokens=2)),
        noted(SamplingParams(4, stop_token_ids=(5,))),
        noted(overrides={"target_config": {"rope_theta": 5.0}}),
        noted(overrides={"drafter_config": {"sample_from_anchor": True}}),
        noted(overrides={"quantize": {"target": "int8"}}),
        noted(cache_dtype="int8"),
    ):
        assert other != plain
    ends = noted(SamplingParams(4, eos_token_ids=(1,)))
    assert noted(SamplingParams(4, eos_token_ids=(1,), ignore_eos=True)) != ends
    assert noted(SamplingParams(4, stop_token_ids=(1,))) == ends
