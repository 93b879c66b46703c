"""The pages of recipes: their commands are understood, and the figures for an 8B model are those of the compilers."""

import json
import re
import shlex
from pathlib import Path

import pytest

from dflash_jax import plan, serve
from dflash_jax.benchmarks import topologies
from dflash_jax.benchmarks.arguments import PlanOptions
from dflash_jax.parsing import parse
from dflash_jax.train.arguments import parse_stage, settings_given
from dflash_jax.train.config import make_config
from tests.chips import topology

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "recipe.md").read_text()


def commands(page):
    """The words of every command of a page that runs a module."""
    code = "\n".join(re.findall(r"^    (.*)$", page, re.M)).replace("\\\n", " ")
    return [shlex.split(line) for line in code.splitlines() if line.startswith("python -m ")]


COMMANDS = commands(PAGE.replace("$TARGET", "./my-llama-fine-tune"))
TABLE = [[cell.strip() for cell in line.strip("| ").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
PARSERS = {
    "train": parse_stage,
    "plan": lambda words: parse(PlanOptions, words, prog="plan", description=""),
    "serve": lambda words: parse(serve.ServeOptions, words, prog="serve", description=""),
}


def options(commands):
    """Of every command, by the module that it runs."""
    made = {}
    for _, _, module, *words in commands:
        made.setdefault(module.removeprefix("dflash_jax."), []).append(
            PARSERS[module.removeprefix("dflash_jax.")](words)
        )
    return made


def test_its_commands_are_understood():
    found = options(COMMANDS)
    assert {name: len(made) for name, made in found.items()} == {"train": 6, "plan": 3, "serve": 1}
    fits = [made for made in found["train"] if hasattr(made, "settings")]
    configs = [make_config(settings_given(made.settings)) for made in fits]
    assert {(c.batch_size, c.blocks, c.block_size, c.length, c.epochs) for c in configs} == {(16, 1536, 10, 3072, 6)}
    parts = [c.batch_size // c.accumulate for c in configs]
    assert parts == [planned.batch_size for planned in found["plan"]] == [int(n) for n in row("rows of a part")]
    assert {(p.max_length, p.row_anchors, p.tokens) for p in found["plan"]} == {(3072, 1536, 100_000_000)}


def test_the_commands_for_a_fine_tune_are_understood():
    """They follow from one another: what one writes, the next one reads."""
    found = options(commands((DOCS / "fine_tune.md").read_text().replace("$DRAFTER", "./drafter-of-the-base")))
    assert {name: len(made) for name, made in found.items()} == {"train": 6, "serve": 1}
    before, answers, features, fit, exported, after = found["train"]
    assert {made.models.target for made in (before, answers, after)} == {"finetune"}
    assert answers.output == features.source.data == fit.source.data
    assert features.output == fit.features
    assert features.source.init_from == fit.source.init_from == before.models.drafter
    assert settings_given(features.settings)["length"] == settings_given(fit.settings)["length"]
    assert fit.output == exported.run
    assert exported.output == after.models.drafter == found["serve"][0].models.drafter
    assert before.prompts == after.prompts != fit.evaluate_prompts
    make_config(settings_given(fit.settings))


def row(name):
    """The figures of one line of the first table."""
    return next(cells[1:] for cells in TABLE if cells[0].startswith(name))


@pytest.mark.slow
@pytest.mark.parametrize("machine", [0, 1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_its_figures_are_those_of_the_compilers(machine, tmp_path):
    command = [words for words in COMMANDS if words[2] == "dflash_jax.plan"][machine]
    asked = PARSERS["plan"](command[3:])
    topology(asked.topology)
    assert plan.main([*command[3:], "--json", str(tmp_path / "f.json")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    assert float(row("memory of a device")[machine]) == pytest.approx(figures["peak_bytes"] / 2**30, rel=0.05)
    assert float(row("least time of a part")[machine]) == pytest.approx(1e3 * figures["least_step_seconds"], rel=0.05)
    assert float(row("least hours of an epoch")[machine]) == pytest.approx(figures["epoch_hours"], rel=0.05)
    assert float(row("least hours of six")[machine]) == pytest.approx(6 * figures["epoch_hours"], rel=0.05)
    assert not figures["again"]
    assert figures["chip_bytes"] == topologies.CHIPS[asked.topology.split(":")[0]].memory
