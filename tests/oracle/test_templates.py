"""The published chat templates, where they are at hand: DFLASH_TEMPLATES names a folder with what llama.cpp has in
`models/templates` (part of the source distribution of llama-cpp-python)."""

import os
from pathlib import Path

import pytest

from tests.fakes.templates import TEMPLATES
from tests.infer.test_tools import check_round_trip

DIRECTORY = os.environ.get("DFLASH_TEMPLATES")
PUBLISHED = [name for name, template in TEMPLATES.items() if template.published]


@pytest.mark.skipif(not DIRECTORY, reason="DFLASH_TEMPLATES names no directory")
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_write_what_ours_write(name, tmp_path):
    template = TEMPLATES[name]
    published = (Path(DIRECTORY) / f"{template.published}.jinja").read_text()
    arguments = {"enable_thinking": True} if name == "gemma4" else {}
    check_round_trip(tmp_path, name, published, template.end, content=name != "gemma4", **arguments)
