"""Measurements that no command of its own tests: they run, on small models."""

import json
import re

import pytest

from benchmarks import host_time, loads
from dflash_jax import load_drafter, load_target


def test_jobs_fit_the_pair_that_is_written_with_them(tmp_path):
    assert loads.main([str(tmp_path)]) == 0
    target, drafter = load_target(tmp_path / "target"), load_drafter(tmp_path / "drafter")
    drafter.config.check_pair(target.config)
    lines = lambda name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
    assert {name: len(lines(name)) for name in ("long", "short", "mixed")} == {"long": 48, "short": 96, "mixed": 52}
    for line in lines("lengths") + lines("alike"):
        assert max(line["prompt_token_ids"]) < target.config.vocab_size
        assert len(line["prompt_token_ids"]) + line["max_new_tokens"] <= target.config.max_position_embeddings


@pytest.mark.slow
def test_the_time_of_the_host_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(host_time, "LAYERS", 4)
    monkeypatch.setattr(host_time, "DRAFT_LAYERS", 1)
    assert host_time.main(["2"]) == 0
    assert re.fullmatch(r"2 rows, \d+ visits of \d+ steps: .* \(medians\)\n", capsys.readouterr().out)


@pytest.mark.slow
def test_training_steps_take_turns_with_torch(pair, tmp_path, capsys):
    pytest.importorskip("dflash.model")
    from benchmarks import training_speed

    row = {"prompt_token_ids": [5] * 20, "response_token_ids": [7] * 200, "loss_mask": [0] * 20 + [1] * 200}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    given = ["--target", str(pair / "target"), "--data", str(tmp_path / "data.jsonl"), "--layers", "1"]
    assert training_speed.main([*given, "--rows", "1", "--blocks", "4", "--steps", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["ratio"] > 0
