"""The bundled pair: small, right about problems nobody trained it on, and the default of the command lines."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from dflash_jax import benchmark, bundled_pair, load_drafter, load_target, serve, spec_generate
from dflash_jax.benchmarks import pictures
from dflash_jax.data.problems import is_correct, problems
from dflash_jax.infer.text import Text


def test_shape_and_size():
    target, drafter = bundled_pair()
    root = target.parent
    assert sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) < 25e6
    assert (root / "README.md").is_file()
    configs = [json.loads((directory / "config.json").read_text()) for directory in (target, drafter)]
    assert configs[0]["num_hidden_layers"] >= 12
    assert configs[1]["num_hidden_layers"] <= 2
    assert [config["dtype"] for config in configs] == ["bfloat16"] * 2


@pytest.mark.slow
def test_held_out_answers_are_right():
    target_directory, drafter_directory = bundled_pair()
    target, drafter = load_target(target_directory), load_drafter(drafter_directory)
    text = Text(target.directory)
    asked = list(islice(problems(11, held_out=True), 20))
    prompts = [text.encode_chat([{"role": "user", "content": problem.question}]) for problem in asked]
    out = spec_generate(target, drafter, prompts, max_new_tokens=120)
    assert sum(is_correct(p, text.decode(tokens)) for p, tokens in zip(asked, out.tokens, strict=True)) >= 17
    lengths = [n for row in out.acceptance_lengths for n in row]
    assert sum(lengths) / len(lengths) > 4


@pytest.mark.slow
def test_serve_and_benchmark_without_a_checkpoint(tmp_path, capsys):
    assert serve.main(["--prompt", "What is 4 times 13?"]) == 0
    assert "The answer is 52." in capsys.readouterr().out
    figures = tmp_path / "figures.json"
    assert benchmark.main(["--max-samples", "2", "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert found["dataset"] == "problems"
    assert found["equal_outputs"] == 2
    assert found["correct"]["speculative"] == found["correct"]["autoregressive"]
    assert "correct answers of 2" in capsys.readouterr().out


def test_a_drafter_that_names_no_target_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert serve.main(["--prompt", "x", "--drafter", str(tmp_path)]) == 2
    assert "names no target; give one with --target" in capsys.readouterr().err


@pytest.mark.slow
def test_the_readme_runs():
    """Its Python, and its picture."""
    root = Path(__file__).parent.parent
    (code,) = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(), re.S)
    exec(compile(code, "README.md", "exec"), {})
    kept = json.loads((root / "docs" / "figures" / "answer.json").read_text())
    assert pictures.answered(kept["prompt"]) == kept
    assert pictures.answer_picture(kept) == (root / "docs" / "figures" / "answer.svg").read_text()
