"""Drafters of every kind side by side: the table is complete, and so are its checks."""

import contextlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_jax import benchmark, load_drafter
from dflash_jax.benchmarks import drafters, plots, sweep
from dflash_jax.benchmarks.cells import relative_error, tau_error
from dflash_jax.benchmarks.compare import tau_ratio
from dflash_jax.benchmarks.drafters import bytes_per_step
from dflash_jax.infer.engine.requests import Completion
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


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_cell_is_measured(pair, tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "hello there"}\n{"prompt": "and again"}\n')
    sources = {"v1": pair / "drafter", **trio(tmp_path / "trio")}
    named = ",".join(f"{name}={source}" for name, source in sources.items())
    arguments = [
        "drafters",
        "--target",
        str(pair / "target"),
        "--drafters",
        named,
        "--tasks",
        str(data),
        "--temperature",
        "0,1",
    ]
    arguments += ["--max-new-tokens", "8", "--block-size", "4", "--batch-size", "2"]
    arguments += ["--json", str(tmp_path / "figures.json"), "--plot", str(tmp_path / "plot.svg")]
    assert benchmark.main(arguments) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert len(figures["cells"]) == 8
    assert (figures["rounds"], figures["dtype"]) == (2, "float32")
    assert {(cell["drafter"], cell["temperature"]) for cell in figures["cells"]} == {
        (name, temperature) for name in sources for temperature in (0, 1)
    }
    for cell in figures["cells"]:
        assert cell["equal_outputs"] == cell["samples"] == 2
        assert cell["proposals"] == len(cell["acceptance_per_position"]) == 3
        assert cell["omega"] == pytest.approx(cell["tau"] / cell["speedup"] - 1)
        assert cell["speedup_error"] > 0
        assert cell["tokens_per_second_error"] > 0
    steps = figures["steps"]  # in one place: they are not measured for every task
    assert len(steps) == 8
    assert all(min(each["ms"].values()) > 0 for each in steps)
    rounds = figures["qwen3_8b"]
    assert rounds["eagle3"]["draft_gb"] > 1.5 * rounds["dflash"]["draft_gb"]  # its head is read three times
    assert (tmp_path / "plot.svg").stat().st_size > 1000
    assert "| eagle3 |" in capsys.readouterr().out


@pytest.mark.slow
def test_proposers_without_a_checkpoint_are_compared_too(pair, tmp_path, monkeypatch):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "hello there"}\n')
    (tmp_path / "own_proposer.py").write_text(
        "import dflash_jax, jax.numpy as jnp\n"
        "Mine = dflash_jax.stateless(lambda tokens, length: jnp.full(3, tokens[length - 1]), block_size=4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    named = f"v1={pair / 'drafter'},mine=own_proposer:Mine,copies=ngram"
    arguments = ["drafters", "--target", str(pair / "target"), "--drafters", named, "--tasks", str(data)]
    arguments += ["--max-new-tokens", "8", "--block-size", "4", "--json", str(tmp_path / "figures.json")]
    assert benchmark.main(arguments) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [cell["drafter"] for cell in figures["cells"]] == ["v1", "mine", "copies"]
    assert all(cell["equal_outputs"] == cell["samples"] == 1 for cell in figures["cells"])
    assert list(figures["qwen3_8b"]) == ["v1"]


def test_wrong_arguments(pair, capsys):
    target = ["--target", str(pair / "target")]
    for arguments, named in (  # as they were written before there were modes
        (["--drafters", "a"], "a=DIR"),
        (["--drafters", "a=x,a=y"], "different names"),
        (["--temperature", "0,1"], "Error parsing --temperature"),
        (["--drafters", f"a={pair / 'drafter'}", "--temperature", "0,-1"], "at least 0"),
        (["--temperature", "nan"], "temperature must be"),
        (["--tasks", "gsm8k"], "drafters --help"),
        (["--drafters", f"a={pair / 'drafter'}", "--rounds", "0"], "--rounds must be at least 1"),
        (["--drafters", f"a={pair / 'drafter'}", "--block-size", "auto"], "block-size auto"),
        (["--drafters", f"a={pair / 'drafter'}", "--jobs", "2"], "are different modes"),
    ):
        with contextlib.suppress(SystemExit):  # of what the parser finds
            assert benchmark.main([*target, *arguments]) == 2
        assert named in capsys.readouterr().err


def test_the_error_of_tau():
    def answered(*lengths):
        answer = Completion(prompt_tokens=1)
        answer.acceptance_lengths.extend(lengths)
        return answer

    assert tau_error([[answered(2, 2), answered(2, 2, 2)]]) == 0
    assert tau_error([[answered(1, 1), answered(3, 3)]]) == pytest.approx(1.0)
    same = [answered(1, 1), answered(3, 3)]
    assert tau_error([same, same]) == pytest.approx(1.0)  # a round more of the same prompts tells nothing of others


def test_errors_over_batches_and_rounds():
    rng = np.random.default_rng(0)
    tokens, steady = np.full((2, 40), 64.0), np.full((2, 40), 2.0)
    assert relative_error([tokens], [steady]) == 0
    noisy = steady + 0.3 * rng.standard_normal((1, 40))
    spread = np.std(noisy[0] / 2, ddof=1) / 40**0.5
    assert relative_error([tokens], [noisy]) == pytest.approx(spread, rel=0.05)
    slower = np.stack([steady[0], 1.2 * steady[1]])
    assert relative_error([tokens], [slower]) == pytest.approx(0.1 / 1.1, rel=1e-6)
    assert relative_error([tokens, slower], [slower, tokens]) == 0  # both engines were slower in that round
    assert math.isnan(relative_error([tokens[:1, :1]], [steady[:1, :1]]))


def test_answers_that_differ_end_with_a_status_of_their_own(monkeypatch, tmp_path, capsys):
    cell = {"drafter": "a", "task": "t", "temperature": 0.0, "tau": 2.0, "tau_error": 0.1, "speedup": 1.0}
    cell |= {"tokens_per_second": 9.0, "tokens_per_second_error": 1.0, "speedup_error": 0.1, "omega": 1.0}
    cell |= {"samples": 3, "equal_outputs": 2}
    steps = [{"drafter": "a", "temperature": 0.0, "ms": dict.fromkeys(("draft", "verify", "accept", "commit"), 1.0)}]
    figures = {"cells": [cell], "steps": steps, "qwen3_8b": {}, "dtype": "float32"}
    monkeypatch.setattr(drafters, "measure", lambda options: figures)
    asked = ["drafters", "--drafters", "a=b", "--json", str(tmp_path / "figures.json")]
    assert benchmark.main(asked) == 1
    told = capsys.readouterr()
    assert "| a | t | 0 |" in told.out
    assert "1 of a on t" in told.err
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    figures["dtype"] = "bfloat16"  # rounding may change what is near a tie
    assert benchmark.main(asked) == 0


def test_what_is_measured_is_written_before_it_is_drawn(monkeypatch, tmp_path, capsys):
    """And what cannot be drawn is refused before anything is measured."""
    measured = []
    monkeypatch.setattr(sweep, "measure", lambda options: measured.append(options) or {"sweep": []})
    monkeypatch.setattr(sweep, "text", lambda figures: "shown")
    asked = ["sweep", "--concurrency", "1", "--json", str(tmp_path / "figures.json"), "--plot"]
    for path, named in (
        (tmp_path / "plot.nothing", "must name a file that ends in"),
        (tmp_path / "gone" / "plot.svg", "there is no such directory"),
        (tmp_path, "must name a file"),
    ):
        assert benchmark.main([*asked, str(path)]) == 2
        assert named in capsys.readouterr().err
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "matplotlib.figure", None)
        assert benchmark.main([*asked, str(tmp_path / "plot.svg")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err
    assert not measured
    monkeypatch.setattr(plots, "plot_sweep", lambda rows, path: Path(tmp_path / "gone").read_bytes())
    assert benchmark.main([*asked, str(tmp_path / "plot.svg")]) == 2
    assert "shown" in capsys.readouterr().out
    assert json.loads((tmp_path / "figures.json").read_text()) == {"sweep": []}


@pytest.mark.slow
def test_bytes_of_a_step():
    """DFlash reads its layers and the head once, DFlash 2 hardly more, EAGLE-3 its layer and the head every pass."""
    common = tiny.drafter_config(num_hidden_layers=2)
    gb = lambda raw, nodes=0: bytes_per_step(raw, 8, nodes)["draft_gb"]
    v1 = gb({**common, "num_hidden_layers": 5})
    nested = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
    second = tiny.drafter_config(num_hidden_layers=5, architectures=["DFlash2DraftModel"], dflash_config=nested)
    assert v1 == pytest.approx(5 * 0.386 + 1.24, rel=0.1)
    assert 1 < gb(second) / v1 < 1.05
    eagle = tiny.target_config() | EAGLE
    assert gb(eagle) > 2.5 * v1
    assert gb(eagle, 60) == pytest.approx(gb(eagle), rel=0.05)  # a pass of each level of the tree


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
