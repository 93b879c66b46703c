"""The package list in `pyproject.toml` is the tree; an installed wheel works from anywhere."""

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("kernels", "infer", "train")


def test_package_list_is_the_tree():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = set()
    for top in ("dflash_jax", *PARTS):
        for file in (ROOT / top).rglob("*.py"):
            parts = file.parent.relative_to(ROOT).parts
            if not (parts[0] == "dflash_jax" and parts[1:2] and parts[1] in PARTS):
                found.add(".".join(parts if parts[0] == "dflash_jax" else ("dflash_jax", *parts)))
    assert set(listed) == found


def test_links_and_no_stray_top_level_packages():
    for part in PARTS:
        link = ROOT / "dflash_jax" / part
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{part}"
        assert not (ROOT / part / "__init__.py").exists()  # would shadow other people's packages


def test_public_names_exist():
    import dflash_jax

    for name in dflash_jax.__all__:
        assert getattr(dflash_jax, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = dflash_jax.nonsense


def test_completion_knows_names_before_they_are_imported():
    code = (
        "import sys, dflash_jax as d; print('jax' in sys.modules, set(d.__all__) - set(dir(d)), '__file__' in dir(d))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "set()", "True"]


def test_metadata_is_what_the_tree_holds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE"]
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "dflash_jax" / "py.typed").is_file()
    oldest = project["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in project["classifiers"]


@pytest.mark.slow
def test_wheel_installs_and_imports_elsewhere(tmp_path):
    run = lambda *command, **options: subprocess.run(command, check=True, capture_output=True, text=True, **options)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT))
    wheel = next(tmp_path.glob("*.whl"))
    files = zipfile.ZipFile(wheel).namelist()
    for models in ("pair", "smollm2"):
        for file in (ROOT / "dflash_jax" / models).rglob("*.*"):
            assert str(file.relative_to(ROOT)) in files
    assert "dflash_jax/py.typed" in files
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)
    names = {name.split("/")[0] for name in files}
    assert {name for name in names if not name.endswith(".dist-info")} == {"dflash_jax"}
    venv.create(tmp_path / "env", with_pip=True, system_site_packages=False)
    python = str(tmp_path / "env" / "bin" / "python")
    run(python, "-m", "pip", "install", "--no-deps", str(wheel))
    code = "from importlib.util import find_spec as f; f('dflash_jax.infer.engine').name; print(f('dflash_jax').origin)"
    assert str(tmp_path) in run(python, "-I", "-c", code, cwd=tmp_path).stdout
