"""The family that docs/families.md writes as an example, run as it stands there."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from dflash_jax import Engine, load_drafter, load_target, models
from dflash_jax.infer.engine import prefixes
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
HEAD = [(7 * i + 3) % 60 for i in range(18)]
REQUESTS = [tiny.ask([*HEAD, i], 12, 0.6 * (i % 2), id=str(i), stop_token_ids=()) for i in range(3)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Tiny checkpoints of the family, whose code is a module for the time being, and of a drafter."""
    section = PAGE.read_text().split("## Another kind of layer")[1].split("\n## ")[0]
    [code] = re.findall(r"^```python\n(.*?)^```$", section, re.S | re.M)
    directory = tmp_path_factory.mktemp("recipe")
    (directory / "totals.py").write_text(code)
    spec = importlib.util.spec_from_file_location("totals", directory / "totals.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["totals"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    models.register("totals", module)
    tiny.write_target(directory / "target", tiny.target_config(model_type="totals", architectures=["Totals"]))
    tiny.write_drafter(directory / "drafter", tiny.drafter_config())
    yield directory
    del models.FAMILIES["totals"], sys.modules["totals"]


def answers(directory, mesh, drafter=None, **settings):
    engine = Engine(load_target(directory / "target", mesh=mesh), drafter, slots=2, max_length=64, **settings)
    return [done.token_ids for done in engine.generate(REQUESTS)], engine.stats


@pytest.fixture(scope="module")
def plain(directory):
    return answers(directory, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("axes", [None, pytest.param("data=2,model=2", marks=pytest.mark.exhaustive)])
def test_trees_and_copied_prompts_give_the_answers_of_plain_decoding(directory, plain, axes, monkeypatch):
    monkeypatch.setattr(prefixes, "STATE_EVERY", 8)
    mesh = None if axes is None else make_mesh(parse_mesh(axes, range(4)))
    drafter = load_drafter(directory / "drafter", mesh=mesh)
    found, stats = answers(directory, mesh, drafter, tree=6, block_size=4, prefill_chunk=8, prefix_chunks=4)
    assert found == plain
    assert stats.prefix_tokens > 0
    assert stats.tau > 1
