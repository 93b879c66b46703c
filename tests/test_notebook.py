"""The notebooks run from top to bottom."""

from pathlib import Path

import pytest

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


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs a notebook in its short form, in an empty folder."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SMOKE", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))

    def run(name):
        notebook = nbformat.read(ROOT / "colab" / f"{name}.ipynb", as_version=4)
        return Shown(nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute())

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


@pytest.mark.slow
def test_quickstart(execute):
    shown = execute("quickstart")
    assert "The answer is 27." in shown.text
    assert shown.count("image/png") == 1
    assert shown.count("text/html") == 2


@pytest.mark.slow
def test_own_proposer(execute):
    shown = execute("own_proposer")
    assert "the same tokens" in shown.text
    assert shown.count("image/png") == 1
