"""The notebooks run from top to bottom."""

import json
import re
from pathlib import Path

import pytest

from dflash_jax import load_drafter

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


class Shown:
    """What a notebook's cells showed, by kind."""

    def __init__(self, notebook):
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        self.text = "".join(output.get("text", "") for output in outputs)
        self.data = [output["data"] for output in outputs if "data" in output]

    def count(self, kind):
        return sum(kind in data for data in self.data)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Where the notebooks keep compiled programs; they have many in common."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def execute(tmp_path, compiled, monkeypatch):
    """Runs a notebook in its short form, in an empty folder; `before` is what its first cell is preceded by."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SMOKE", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(compiled))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

    def run(name, before=""):
        notebook = nbformat.read(ROOT / "colab" / f"{name}.ipynb", as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
        client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}})
        return Shown(client.execute())

    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    # One variable says where the package is installed from, in the same way everywhere.
    assert code[0].source.startswith('SOURCE = ".."')
    assert code[0].source == nbformat.read(NOTEBOOKS[0], as_version=4).cells[1].source
    text = path.read_text(encoding="utf-8")
    assert not [word for word in ("/home/", "/root/", "/tmp/", "/work/", "/Users/", "/content/") if word in text]


def test_a_script_is_its_notebook():
    """All cells but the one that installs the package."""
    script = (ROOT / "colab" / "rl_rollouts.py").read_text()
    cells = [part.partition("\n") for part in re.split(r"^# %%", script, flags=re.M)[1:]]
    text = lambda head, body: re.sub(r"^# ?", "", body, flags=re.M) if "[markdown]" in head else body
    notebook = nbformat.read(ROOT / "colab" / "rl_rollouts.ipynb", as_version=4)
    assert [text(head, body).strip() for head, _, body in cells] == [
        cell.source.strip() for i, cell in enumerate(notebook.cells) if i != 1
    ]


@pytest.mark.slow
def test_rl_rollouts(execute):
    assert "samples and weights are the same after 20 steps" in execute("rl_rollouts").text


@pytest.mark.slow
def test_quickstart(execute):
    shown = execute("quickstart")
    assert "The answer is 27." in shown.text
    assert shown.count("image/png") == 1
    assert shown.count("text/html") == 2


@pytest.mark.slow
def test_tools(execute):
    shown = execute("tools")
    assert "the function returned" in shown.text
    assert "8 of 8 answers ended, and are JSON" in shown.text
    assert "without the form" in shown.text


@pytest.mark.slow
def test_own_proposer(execute):
    shown = execute("own_proposer")
    assert "the same tokens" in shown.text
    assert shown.count("image/png") == 1


@pytest.mark.slow
def test_published_pair(execute):
    shown = execute("published_pair")
    assert shown.count("image/png") == 1
    (table,) = (data["text/markdown"] for data in shown.data if "text/markdown" in data)
    assert table in shown.text  # to copy
    rows = dict(line.strip("| ").split(" | ", 1) for line in table.splitlines()[2:])
    assert rows["dtype"] == "float32"
    assert rows["equal answers, greedy"] == rows["equal answers, temperature 0.8"] == "3 of 3"
    middle, low, high = (float(number) for number in re.findall(r"[\d.]+", rows["tau, greedy"]))
    assert 5 < low <= middle <= high < 17
    assert re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", rows["speedup"])


@pytest.mark.slow
def test_published_pair_that_does_not_fit(execute):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=r"needs about .* GiB in float32, and .* STAND_IN"):
        execute("published_pair", before="import os\n\nos.sysconf = lambda name: 2**13")


@pytest.mark.slow
def test_train_a_drafter(execute, tmp_path):
    shown = execute("train_a_drafter")
    assert shown.count("image/png") == 1
    lines = [json.loads(line) for line in (tmp_path / "drafter_run/run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "tau" in line] == [3, 6]
    assert load_drafter(tmp_path / "drafter_run" / "drafter").config.num_hidden_layers == 1
