"""Drafters in the layout of the `speculators` library, read back by our own loader."""

import json

import jax
import numpy as np
import pytest

from dflash_jax import load_drafter
from dflash_jax.checkpoint import read_config
from dflash_jax.pairs import target_of
from dflash_jax.train.card import card
from dflash_jax.train.drafters import save_speculators
from tests import tiny

SHARP = {"proposal_sharpness": [1.5, 0.5, 0.25, 0.125]}


@pytest.mark.parametrize("reduced", [False, True])
def test_a_drafter_in_the_layout_of_speculators_is_the_same(reduced, tmp_path):
    raw = tiny.drafter_config(block_size=5, **({"draft_vocab_size": 40} if reduced else {}), **SHARP)
    raw["target_model_name_or_path"] = "somebody/target"
    ours = load_drafter(tiny.write_drafter(tmp_path / "ours", raw))
    if reduced:
        tokens = np.sort(np.random.default_rng(0).permutation(tiny.VOCAB)[:40])
        ours = ours.replace(params=ours.params | {"d2t": (tokens - np.arange(40)).astype(np.int32)})
    save_speculators(tmp_path / "theirs", ours, raw)
    again = load_drafter(tmp_path / "theirs")
    assert again.config == ours.config
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, ours.params))
    assert target_of(str(tmp_path / "theirs")) == "somebody/target"
    written = read_config(tmp_path / "theirs")
    (method,) = written["speculators_config"]["proposal_methods"]
    assert method["speculative_tokens"] == 4
    assert written["speculators_config"]["verifier"]["architectures"] == []


def test_the_classes_of_a_target_at_hand_are_named(tmp_path):
    target = tiny.write_target(tmp_path / "target", tiny.target_config(architectures=["Qwen3ForCausalLM"]))
    raw = tiny.drafter_config() | {"target_model_name_or_path": str(target)}
    save_speculators(tmp_path / "theirs", load_drafter(tiny.write_drafter(tmp_path / "ours", raw)), raw)
    verifier = json.loads((tmp_path / "theirs" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target), "architectures": ["Qwen3ForCausalLM"]}


CAPPED = tiny.drafter_config(final_logit_softcapping=30.0)
REFUSED = {
    "is for dflash drafters, and this is a dspark one": (tiny.kinds()["dspark"], False),
    "share the target's embedding and head": (tiny.drafter_config(), True),
    "cannot say this drafter's final_logit_softcapping; leave": (CAPPED, False),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_that_layout_cannot_say_is_refused(message, tmp_path):
    raw, own = REFUSED[message]
    drafter = load_drafter(tiny.write_drafter(tmp_path / "ours", raw, own=own))
    with pytest.raises(ValueError, match=message):
        save_speculators(tmp_path / "theirs", drafter, raw)
    assert not (tmp_path / "theirs").exists()


def test_the_card_says_how_vllm_finds_the_target(tmp_path):
    """By its name in `config.json`, if it has one on the hub."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    raw = tiny.drafter_config()
    drafter = load_drafter(tiny.write_drafter(tmp_path / "ours", raw))
    for target, how in {
        "somebody/target": "\n    vllm serve DIR\n",
        str(tmp_path / "here"): '\n    vllm serve here --speculative-config \'{"model": "DIR", ',
    }.items():
        text = card(drafter, raw | {"target_model_name_or_path": target}, tmp_path, None, None, speculators=True)
        assert how in text
        assert str(tmp_path) not in text
