"""The workflows for GitHub: what they run exists here."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_are_whole(path):
    found = yaml.safe_load(path.read_text())
    assert found["permissions"] == {"contents": "read"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for job in found["jobs"].values():
        steps = job["steps"]
        assert all(("uses" in step) != ("run" in step) for step in steps)
        for step in steps:
            for extras in re.findall(r"'\.\[([\w,]+)\]'", step.get("run", "")):
                assert set(extras.split(",")) <= project["optional-dependencies"].keys()
        for entry in job.get("strategy", {}).get("matrix", {}).get("include", []):
            assert f"Programming Language :: Python :: {entry['python']}" in project["classifiers"]


def test_a_release_is_published_without_a_secret():
    publish = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "password" not in str(publish)
    version = re.search(r"exec\(open\(\"(.*?)\"\)", (ROOT / ".github/workflows/release.yml").read_text())[1]
    assert (ROOT / version).read_text().startswith("__version__ = ")
