"""Drafters of every kind side by side: the table is complete, and so are its checks."""

import contextlib
import json

import pytest

from dflash_jax import benchmark, load_drafter
from dflash_jax.benchmarks.compare import tau_ratio
from dflash_jax.benchmarks.drafters import bytes_per_round, tau_error
from dflash_jax.infer.requests import Completion
from tests import tiny

EAGLE = {"architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 1, "num_target_layers": 4, "ttt_length": 3}
EAGLE |= {"target_layer_ids": [0, 1, 2], "draft_num_hidden_layers": 1, "step_loss_decay": 1.0, "block_size": None}
DEEPSPEC = {  # fields of the trio on Qwen3-4B; the target's own fields stand beside them
    "dflash": {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "enable_confidence_head": False},
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
TRIO = {"target_layer_ids": [0, 2], "mask_token_id": tiny.MASK, "num_anchors": 512, "block_size": 3}


def trio(directory):
    """Checkpoints with the names and fields of DeepSpec's three drafters: embedding and head are their own."""
    raws = {name: tiny.target_config() | {"num_hidden_layers": 2, "num_target_layers": 4} for name in DEEPSPEC}
    raws = {name: raw | TRIO | DEEPSPEC[name] | {"tie_word_embeddings": False} for name, raw in raws.items()}
    raws["eagle3"] = tiny.target_config() | EAGLE | {"tie_word_embeddings": False}
    for name, raw in raws.items():
        tiny.write_drafter(directory / name, raw, own=True)
    return {name: directory / name for name in raws}


def test_the_published_trio_loads(tmp_path):
    sources = trio(tmp_path)
    for name, source in sources.items():
        drafter = load_drafter(source)
        assert drafter.depth(drafter.config.block_size) == 3
        assert drafter.config.own_embedding
        assert drafter.config.own_head
        assert name != "eagle3" or drafter.taps == (0, 1, 2)


@pytest.mark.slow
def test_every_cell_is_measured(pair, tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "hello there"}\n{"prompt": "and again"}\n')
    sources = {"v1": pair / "drafter", **trio(tmp_path / "trio")}
    named = ",".join(f"{name}={source}" for name, source in sources.items())
    arguments = ["--target", str(pair / "target"), "--drafters", named, "--tasks", str(data), "--temperature", "0,1"]
    arguments += ["--max-new-tokens", "8", "--block-size", "4", "--batch-size", "2"]
    arguments += ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "plot.svg")]
    assert benchmark.main(arguments) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["cells"]) == 8
    assert {(cell["drafter"], cell["temperature"]) for cell in figures["cells"]} == {
        (name, temperature) for name in sources for temperature in (0, 1)
    }
    for cell in figures["cells"]:
        assert cell["equal_outputs"] == cell["samples"] == 2
        assert cell["proposals"] == len(cell["acceptance_per_position"]) == 3
        assert cell["omega"] == pytest.approx(cell["tau"] / cell["speedup"] - 1)
        assert min(cell["step_ms"].values()) > 0
    rounds = figures["qwen3_8b"]
    assert rounds["eagle3"]["draft_gb"] > 1.5 * rounds["dflash"]["draft_gb"]  # its head is read three times
    assert (tmp_path / "plot.svg").stat().st_size > 1000
    assert "| eagle3 |" in capsys.readouterr().out


def test_wrong_arguments(pair, capsys):
    target = ["--target", str(pair / "target")]
    for arguments, named in (
        (["--drafters", "a"], "a=DIR"),
        (["--drafters", "a=x,a=y"], "different names"),
        (["--temperature", "0,1"], "for --drafters"),
        (["--drafters", f"a={pair / 'drafter'}", "--block-size", "auto"], "block-size auto"),
        (["--drafters", f"a={pair / 'drafter'}", "--jobs", "2"], "of its own"),
    ):
        with contextlib.suppress(SystemExit):  # of what the parser finds
            assert benchmark.main([*target, *arguments]) == 2
        assert named in capsys.readouterr().err


def test_the_error_of_tau():
    def answered(*lengths):
        answer = Completion(prompt_tokens=1)
        answer.acceptance_lengths.extend(lengths)
        return answer

    assert tau_error([answered(2, 2), answered(2, 2, 2)]) == 0
    assert tau_error([answered(1, 1), answered(3, 3)]) == pytest.approx(1.0)


def test_bytes_of_a_round():
    """DFlash reads its layers and the head once, DFlash 2 hardly more, EAGLE-3 its layer and the head every pass."""
    common = tiny.drafter_config(num_hidden_layers=2)
    gb = lambda raw: bytes_per_round(raw, 7)["draft_gb"]
    v1 = gb({**common, "num_hidden_layers": 5})
    nested = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
    second = tiny.drafter_config(num_hidden_layers=5, architectures=["DFlash2DraftModel"], dflash_config=nested)
    assert v1 == pytest.approx(5 * 0.386 + 1.24, rel=0.1)
    assert 1 < gb(second) / v1 < 1.05
    assert gb(tiny.target_config() | EAGLE) > 2.5 * v1


def test_the_bound_of_a_ratio_of_taus():
    def answered(*lengths):
        answer = Completion(prompt_tokens=1)
        answer.acceptance_lengths.extend(lengths)
        return answer

    ours, theirs = [answered(4, 4), answered(2, 2, 2)], [answered(2, 2, 2, 2), answered(1, 1, 1, 1, 1, 1)]
    ratio, least = tau_ratio(ours, theirs)
    assert ratio == pytest.approx(2.0)
    assert least == pytest.approx(2.0, rel=0.02)  # the prompts differ much, but in both alike
    worse = tau_ratio([answered(4, 4), answered(1, 1, 1)], theirs)
    assert worse[1] < 0.9 * worse[0]
